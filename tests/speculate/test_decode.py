"""The decoding loop: the target's own answer in every case, and its bookkeeping to the token."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from speculate.acceptance import measure
from speculate.decode import Round, clip, decode_plainly, decode_speculatively
from speculate.drafting import BlockDrafter
from speculate.sampling import Draft, count_matching
from speculate.target import LiveTarget
from tests.reference import speculate as reference
from tests.reference.drafter import Shape
from tests.speculate.conftest import Pair
from tests.speculate.tiny import PROMPTS
from train.drafter import split_projections

NEW_TOKENS = 23  # the last round of the uneven growth below is clipped
PROMPT = PROMPTS[0]


class Knowing:
    """Proposes the target's own continuation, with a wrong token in the answer's places `wrong`."""

    def __init__(self, own_ids: Sequence[int], *, block_size: int, wrong: Sequence[int] = ()) -> None:
        self.own_ids = list(own_ids) + [0] * block_size
        self.block_size = block_size
        self.wrong = wrong
        self.num_context_tokens = 0

    def extend(self, features_TF: Tensor) -> None:
        self.num_context_tokens += len(features_TF)

    def propose(self, anchor_token_id: int, num_drafted: int) -> Draft:
        anchor = self.num_context_tokens - len(PROMPT)  # the answer's place of the token after the context
        assert anchor_token_id == self.own_ids[anchor]
        places = range(anchor + 1, anchor + 1 + num_drafted)
        return Draft([self.own_ids[place] ^ (place in self.wrong) for place in places])


def uncached(target: LiveTarget, token_ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    with torch.no_grad():
        output = target.model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)
    return output.logits[0], [hidden[0] for hidden in output.hidden_states]


def rounds_of(*committed_and_accepted: tuple[int, int]) -> list[Round]:
    return [Round(num_committed=committed, num_accepted=accepted) for committed, accepted in committed_and_accepted]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_plain_decoding_is_transformers_greedy_generation(pair: Pair, prompt: list[int]) -> None:
    input_ids = torch.tensor([prompt])
    generated = pair.target.model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    assert decode_plainly(pair.target, prompt, NEW_TOKENS) == generated[0, len(prompt) :].tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_random_drafter_changes_nothing(pair: Pair, prompt: list[int]) -> None:
    drafter = BlockDrafter(pair.drafter, pair.target.head(pair.checkpoint), pair.checkpoint.mask_token_id)
    answer = decode_speculatively(pair.target, drafter, prompt, NEW_TOKENS)
    assert answer.token_ids == decode_plainly(pair.target, prompt, NEW_TOKENS)
    assert sum(item.num_committed for item in answer.rounds) == NEW_TOKENS - 1


class Helped(BlockDrafter):
    """A drafter whose first slots are put right, 0 to 3 of them in turn, so that the context grows unevenly."""

    def __init__(self, pair: Pair, own_ids: list[int], num_prompt_tokens: int) -> None:
        super().__init__(pair.drafter, pair.target.head(pair.checkpoint), pair.checkpoint.mask_token_id)
        self.own_ids = own_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.drafted: list[list[int]] = []

    def propose(self, anchor_token_id: int, num_drafted: int) -> Draft:
        drafted = super().propose(anchor_token_id, num_drafted).token_ids
        anchor = self.num_context_tokens - self.num_prompt_tokens
        self.drafted.append(help_draft(drafted, self.own_ids, anchor))
        return Draft(self.drafted[-1])


def help_draft(drafted: list[int], own_ids: list[int], anchor: int) -> list[int]:
    num_right = min(anchor // 2 % 4, len(drafted))
    return own_ids[anchor + 1 : anchor + 1 + num_right] + drafted[num_right:]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_caches_give_the_drafts_of_a_loop_without_any(pair: Pair, prompt: list[int]) -> None:
    own_ids = decode_plainly(pair.target, prompt, NEW_TOKENS)
    config = pair.checkpoint.drafter
    drafting = reference.Drafting(
        weights={
            name: tensor.double() for name, tensor in split_projections(pair.drafter.state_dict(), config).items()
        },
        shape=Shape(
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            layer_types=config.resolved_layer_types,
            sliding_window=config.sliding_window,
            is_causal=config.is_causal,
        ),
        block_size=config.block_size,
        target_layer_ids=config.target_layer_ids,
        mask_token_id=pair.checkpoint.mask_token_id,
        embedding=pair.target.model.get_input_embeddings().weight.detach() * pair.checkpoint.input_embedding_scale,
        head=pair.target.model.get_output_embeddings().weight.detach(),
    )

    def target(token_ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        return uncached(pair.target, token_ids)

    def propose(committed: list[int], num_drafted: int) -> list[int]:
        drafted = drafting.propose(target, committed, num_drafted)
        return help_draft(drafted, own_ids, len(committed) - len(prompt) - 1)

    traces = reference.decode(
        target, propose, prompt, block_size=config.block_size, max_new_tokens=NEW_TOKENS, stop_ids=()
    )
    drafter = Helped(pair, own_ids, len(prompt))
    answer = decode_speculatively(pair.target, drafter, prompt, NEW_TOKENS)
    assert drafter.drafted == [trace.drafted for trace in traces[1:]]
    assert answer.token_ids == [token for trace in traces for token in trace.committed]
    assert [item.num_committed for item in answer.rounds] == [len(trace.committed) for trace in traces[1:]]
    assert {item.num_committed for item in answer.rounds} == {1, 2, 3, 4}  # every way of growing was there


def test_a_drafter_that_knows_gets_whole_blocks(qwen3: Pair) -> None:
    own_ids = decode_plainly(qwen3.target, PROMPT, 1 + 4 * 5)
    answer = decode_speculatively(qwen3.target, Knowing(own_ids, block_size=5), PROMPT, 1 + 4 * 5)
    assert answer.token_ids == own_ids
    assert answer.rounds == rounds_of((5, 4), (5, 4), (5, 4), (5, 4))
    assert measure([answer.rounds], 5).acceptance_length_pooled == 5.0


def test_the_last_round_is_clipped_at_the_longest_answer(qwen3: Pair) -> None:
    own_ids = decode_plainly(qwen3.target, PROMPT, 8)
    answer = decode_speculatively(qwen3.target, Knowing(own_ids, block_size=5), PROMPT, 8)
    assert answer.token_ids == own_ids
    assert answer.rounds == rounds_of((5, 4), (2, 2))


def test_what_is_accepted_ends_at_the_first_wrong_token(qwen3: Pair) -> None:
    """Places of the answer: 0 is the prompt's; a block of 5 after place p drafts p+1..p+4."""
    own_ids = decode_plainly(qwen3.target, PROMPT, 12)
    drafter = Knowing(own_ids, block_size=5, wrong=(1, 4, 11))
    answer = decode_speculatively(qwen3.target, drafter, PROMPT, 12)
    assert answer.token_ids == own_ids
    # Wrong at 1: only the bonus, place 1. Then 2, 3 right and 4 wrong: bonus at 4. Then 5..8 right, bonus 9. Then 10
    # right, 11 wrong, its bonus being the last.
    assert answer.rounds == rounds_of((1, 0), (3, 2), (5, 4), (2, 1))


@pytest.mark.parametrize("place", [0, 1, 4, 5, 6, 9])
def test_an_answer_ends_with_its_stop_token(qwen3: Pair, place: int) -> None:
    longest = decode_plainly(qwen3.target, PROMPT, NEW_TOKENS)
    own_ids = longest[: longest.index(longest[place]) + 1]
    target = dataclasses.replace(qwen3.target, stop_ids=frozenset({longest[place]}))
    assert decode_plainly(target, PROMPT, NEW_TOKENS) == own_ids
    answer = decode_speculatively(target, Knowing(longest, block_size=5), PROMPT, NEW_TOKENS)
    assert answer.token_ids == own_ids
    whole, rest = divmod(len(own_ids) - 1, 5)
    assert answer.rounds == rounds_of(*[(5, 4)] * whole, *([(rest, rest)] if rest else []))


def test_counting_and_clipping() -> None:
    assert count_matching([1, 2, 3], [1, 2, 4]) == 2
    assert count_matching([1, 2], [1, 2, 4]) == 2
    assert count_matching([], [1]) == 0
    assert clip([5, 6, 7], 9, frozenset()) == [5, 6, 7]
    assert clip([5, 6, 7], 2, frozenset({7})) == [5, 6]
    assert clip([5, 6, 7], 3, frozenset({6, 7})) == [5, 6]
