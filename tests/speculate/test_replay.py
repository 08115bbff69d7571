"""Answers replayed without the target: the same rounds as live, and the baselines' proposals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speculate.acceptance import measure
from speculate.decode import decode_plainly, decode_speculatively
from speculate.drafting import BlockDrafter
from speculate.replay import KnownAnswer, PromptLookup, replay, replay_everywhere
from speculate.sampling import Draft
from speculate.target import LiveTarget, read_architecture
from tests.speculate.fitted import CPU, fit
from tests.speculate.tiny import PAIRS, PROMPTS, Scale, make_target, run_config
from train.published import DraftCheckpoint
from train.ranks import Ranks
from train.trainer import Trainer

NEW_TOKENS = 23


class Fitted:
    def __init__(self, folder: Path, name: str) -> None:
        shape, config = PAIRS[name]
        target_folder = make_target(folder / "target", shape)
        checkpoint = DraftCheckpoint.read(fit(target_folder, folder / "fitted", config, Scale()))
        self.target = LiveTarget.load(read_architecture(target_folder, None, CPU), checkpoint, CPU)
        self.checkpoint = checkpoint
        self.block_size = config.block_size
        self.run = run_config(target_folder, shape, config)
        self._parts = (
            checkpoint.load_drafter(CPU, torch.float32),
            self.target.head(checkpoint),
            checkpoint.mask_token_id,
        )

    def drafter(self) -> BlockDrafter:
        return BlockDrafter(*self._parts)

    def known(self, prompt: list[int]) -> KnownAnswer:
        return KnownAnswer.of(self.target, prompt, decode_plainly(self.target, prompt, NEW_TOKENS))


@pytest.fixture(scope="module", params=PAIRS)
def fitted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    return Fitted(tmp_path_factory.mktemp("fitted"), request.param)


def test_replayed_rounds_are_the_live_ones(fitted: Fitted) -> None:
    for prompt in PROMPTS:
        live = decode_speculatively(fitted.target, fitted.drafter(), prompt, NEW_TOKENS)
        assert replay(fitted.drafter(), fitted.known(prompt), NEW_TOKENS) == live.rounds


@pytest.mark.parametrize("place", [0, 1, 4, 9])
def test_so_are_those_that_a_stop_token_ends(fitted: Fitted, place: int) -> None:
    stop_id = fitted.known(PROMPTS[0]).answer_ids[place]
    target = replace(fitted.target, stop_ids=frozenset({stop_id}))
    live = decode_speculatively(target, fitted.drafter(), PROMPTS[0], NEW_TOKENS)
    known = KnownAnswer.of(target, PROMPTS[0], decode_plainly(target, PROMPTS[0], NEW_TOKENS))
    assert replay(fitted.drafter(), known, NEW_TOKENS) == live.rounds


def test_offline_and_live_agree_where_both_have_a_block(fitted: Fitted) -> None:
    """Live blocks begin where the one before ended; offline there is one after every token, those among them.

    So the means differ only by which blocks they are over. Live decoding passes in few rounds through what is drafted
    well, and offline every token of it counts, which makes the offline mean the larger one, here by up to 0.63.
    """
    lengths, everywhere = [], []
    for prompt in PROMPTS:
        live = decode_speculatively(fitted.target, fitted.drafter(), prompt, NEW_TOKENS)
        offline = replay_everywhere(fitted.drafter(), fitted.known(prompt))
        assert len(offline) == NEW_TOKENS - 1
        place = 0
        for item in live.rounds:
            if place + fitted.block_size <= NEW_TOKENS:  # later ones are shorter live
                assert offline[place].num_committed == item.num_committed
            place += item.num_committed
        lengths.append(live.rounds)
        everywhere.append(offline)
    live_length = measure(lengths, fitted.block_size).acceptance_length_pooled
    offline_length = measure(everywhere, fitted.block_size).acceptance_length_pooled
    assert live_length > 1
    assert -0.1 < offline_length - live_length < 0.75


def test_offline_rounds_are_those_that_training_counts(fitted: Fitted) -> None:
    """The answer as a held-out row of its own, whose features are stored in bf16."""
    train = replace(fitted.run.train, num_anchors=NEW_TOKENS + 5, precision="fp32")
    config = replace(fitted.run, train=train)
    ranks = Ranks(rank=0, world_size=1, device=CPU)
    trainer = Trainer(config, fitted.target.head(fitted.checkpoint), ranks, num_steps=1)
    trainer.flat.begin_with(fitted.checkpoint.load_weights(CPU, torch.float32))
    for prompt in PROMPTS:
        known = fitted.known(prompt)
        token_ids = torch.tensor(known.prompt_ids + known.answer_ids)
        codes_TKC = known.features_TF.bfloat16().unflatten(1, (len(config.drafter.target_layer_ids), -1))
        rows = trainer.rows
        rows.input_ids_RT[0, : len(token_ids)] = token_ids
        rows.position_ids_RT[0] = torch.arange(config.cache.row_tokens)
        rows.document_ids_RT.fill_(-1)[0, : len(token_ids)] = 0
        rows.loss_mask_RT.zero_()[0, len(prompt) : len(token_ids)] = 1
        rows.codes_RKTC[0, :, : len(codes_TKC)] = codes_TKC.transpose(0, 1).contiguous().view(torch.uint16)
        trainer.heldout_step.run()
        result = trainer.heldout_step.result
        rounded = replace(known, features_TF=known.features_TF.bfloat16().float())
        counted = [item.num_committed for item in replay_everywhere(fitted.drafter(), rounded)]
        assert result.accepted_RN[result.is_block_RN].tolist() == counted


def test_another_answers_features_are_of_less_use(fitted: Fitted) -> None:
    first, second = fitted.known(PROMPTS[0]), fitted.known(PROMPTS[2])
    swapped = first.with_features_of(second)
    assert torch.equal(swapped.features_TF, second.features_TF[: len(first.features_TF)])
    back = second.with_features_of(first)
    num_first, num_second = len(first.features_TF), len(second.features_TF)
    assert torch.equal(back.features_TF[num_first:], first.features_TF[: num_second - num_first])
    own, other = (replay(fitted.drafter(), known, NEW_TOKENS) for known in (first, swapped))
    assert len(own) <= len(other)


TOKENS = [5, 6, 7, 8, 6, 7, 9, 1, 6, 7, 8, 8]


@pytest.mark.parametrize(
    ("num_context_tokens", "proposed"),
    [
        (1, []),  # 5 6: never seen before
        (4, [7, 8, 6]),  # … 6: what followed the first, as far as it is there
        (5, [8, 6, 7]),  # … 6 7
        (9, [9, 1, 6, 7]),  # … 6 7 again: the latest of two
        (10, [6, 7, 9, 1]),  # … 6 7 8: three tokens win over a later 8, of which there is none
    ],
)
def test_prompt_lookup_proposes_what_followed_before(num_context_tokens: int, proposed: list[int]) -> None:
    lookup = PromptLookup(TOKENS, block_size=5)
    lookup.extend(torch.zeros(num_context_tokens, 1))
    num_drafted = 3 if num_context_tokens == 5 else 4
    assert lookup.propose(TOKENS[num_context_tokens], num_drafted) == Draft(proposed)


def test_prompt_lookup_never_sees_what_is_to_come() -> None:
    others = [*TOKENS[:6], 99, 99]
    for tokens in (TOKENS, others):
        lookup = PromptLookup(tokens, block_size=5)
        lookup.extend(torch.zeros(5, 1))
        assert lookup.propose(7, 4).token_ids == [8, 6, 7]
