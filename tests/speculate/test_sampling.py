"""Drawn answers: that they have the target's distribution, by a test that samplers with common mistakes fail.

Counts of every possible answer are held against the expected ones by chi-square. Seeds are fixed, so nothing here is
a matter of luck; the bound is the value that a right sampler passes for 99.9 % of seeds.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shards.sections import DrafterConfig, SpeculateConfig
from speculate import sampling
from speculate.decode import decode_plainly, decode_speculatively
from speculate.drafting import BlockDrafter
from speculate.sampling import GREEDY, Draft, Sampling, make_chooser
from speculate.target import LiveTarget
from train.drafter import Drafter
from train.target_head import TargetHead

CPU = torch.device("cpu")
V, NUM_DRAFTED = 3, 2
TEMPERATURE = 0.7
Answer = tuple[int, ...]


def chi_square(counts: Mapping[Answer, int], expected: Mapping[Answer, float]) -> float:
    """Against probabilities, relative to the 99.9 % quantile (Wilson and Hilferty, 1931): above 1 they don't fit."""
    total = sum(counts.values())
    assert counts.keys() <= expected.keys()
    assert total * min(expected.values()) > 5  # what the approximation by chi-square wants
    value = sum((counts[key] - total * p) ** 2 / (total * p) for key, p in expected.items())
    freedom = len(expected) - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    return value / quantile


def answers_of_judging(sampler: Sampling, target_logits: Tensor, draft_logits: Tensor, number: int) -> Counter[Answer]:
    """Answers of three tokens that depend on nothing before them: what a round does not give is drawn plainly."""
    counts: Counter[Answer] = Counter()
    for _ in range(number):
        kept = sampler.judge(sampler.draft(draft_logits), target_logits)
        rest = sampler.choose(target_logits[len(kept) :]) if len(kept) <= NUM_DRAFTED else []
        counts[tuple(kept + rest)] += 1
    return counts


@pytest.fixture(scope="module")
def logits() -> tuple[Tensor, Tensor]:
    """Of target [3, V] and drafter [2, V]: alike, and clearly different."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(NUM_DRAFTED + 1, V, generator=generator) * 0.5
    return target, target[:NUM_DRAFTED] + torch.randn(NUM_DRAFTED, V, generator=generator) * 0.7


class TakesAll(Sampling):
    def is_kept(self, target: Tensor, draft: Tensor) -> bool:
        return True


class KeepsByTheTargetAlone(Sampling):
    def is_kept(self, target: Tensor, draft: Tensor) -> bool:
        return super().is_kept(target, torch.ones_like(draft))


class KeepsWhatIsLikely(Sampling):
    def is_kept(self, target: Tensor, draft: Tensor) -> bool:
        return bool(target >= draft)


class DraftsAtAnotherTemperature(Sampling):
    def draft(self, logits_TV: Tensor) -> Draft:
        return Draft(super().draft(logits_TV * 2).token_ids, self.probabilities(logits_TV))


SAMPLERS = {
    "all is kept": TakesAll,
    "the draft's probability is left out": KeepsByTheTargetAlone,
    "no chance in keeping": KeepsWhatIsLikely,
    "the draft is not from the distribution that it names": DraftsAtAnotherTemperature,
}
RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "drawn anew from the target": lambda target, draft: target,
    "what the draft has too much of": lambda target, draft: (draft - target).clamp(min=0),
    "either way": lambda target, draft: (target - draft).abs(),
}


def fit_of(sampler: Sampling, logits: tuple[Tensor, Tensor]) -> float:
    probabilities = sampler.probabilities(logits[0])
    expected = {
        answer: math.prod(probabilities[i, token].item() for i, token in enumerate(answer))
        for answer in product(range(V), repeat=NUM_DRAFTED + 1)
    }
    return chi_square(answers_of_judging(sampler, *logits, 1500), expected)


def test_judged_drafts_have_the_targets_distribution(logits: tuple[Tensor, Tensor]) -> None:
    assert fit_of(Sampling(TEMPERATURE, 0, CPU), logits) < 1


@pytest.mark.parametrize("mistake", SAMPLERS)
def test_a_wrong_sampler_is_found(logits: tuple[Tensor, Tensor], mistake: str) -> None:
    assert fit_of(SAMPLERS[mistake](TEMPERATURE, 0, CPU), logits) > 1.5


@pytest.mark.parametrize("mistake", RESIDUALS)
def test_a_wrong_residual_is_found(
    monkeypatch: pytest.MonkeyPatch, logits: tuple[Tensor, Tensor], mistake: str
) -> None:
    monkeypatch.setattr(sampling, "residual", RESIDUALS[mistake])
    assert fit_of(Sampling(TEMPERATURE, 0, CPU), logits) > 1.5


@pytest.fixture(scope="module")
def target() -> LiveTarget:
    """Of three tokens, with distributions that depend on what came before and are neither flat nor certain."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.normal_(model.lm_head.weight, std=0.12)
    return LiveTarget(model=model, feature_layers=(0,), stop_ids=frozenset())


def drafter_for(target: LiveTarget, sampler: Sampling) -> Iterator[BlockDrafter]:
    """New ones of a random drafter, one for each answer."""
    drafter = Drafter(
        DrafterConfig(
            num_layers=1,
            block_size=NUM_DRAFTED + 1,
            target_layer_ids=(0,),
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=16,
            rope_theta=1e4,
            init_std=0.5,
        ),
        16,
    )
    drafter.init_weights(0)
    head = TargetHead(
        embed_tokens_VH=target.model.get_input_embeddings().weight.detach(),
        lm_head_VH=target.model.get_output_embeddings().weight.detach(),
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
    )
    while True:
        yield BlockDrafter(drafter, head, 2, sampler)


def test_drawn_answers_have_the_targets_distribution(target: LiveTarget) -> None:
    """The whole loop, with caches, rewinding and clipping, against products of the target's own probabilities."""
    prompt = [0, 2, 1]
    expected: dict[Answer, float] = {}
    for answer in product(range(V), repeat=NUM_DRAFTED + 1):
        with torch.no_grad():
            logits_TV = target.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        rows = torch.softmax(logits_TV.double() / TEMPERATURE, dim=-1)
        expected[answer] = math.prod(rows[i, token].item() for i, token in enumerate(answer))
    assert sum(expected.values()) == pytest.approx(1)
    sampler = Sampling(TEMPERATURE, 0, CPU)
    drafters = drafter_for(target, sampler)
    counts: Counter[Answer] = Counter()
    num_accepted: Counter[int] = Counter()
    for _ in range(600):
        answer = decode_speculatively(target, next(drafters), prompt, NUM_DRAFTED + 1, chooser=sampler)
        counts[tuple(answer.token_ids)] += 1
        num_accepted[answer.rounds[0].num_accepted] += 1
    assert set(num_accepted) == {0, 1, 2}
    assert chi_square(counts, expected) < 1
    assert (
        chi_square(counts, dict(zip(expected, reversed(expected.values()), strict=True))) > 1.5
    )  # or it tells nothing


def test_plainly_drawn_answers_are_reproducible(target: LiveTarget) -> None:
    def drawn(seed: int) -> list[int]:
        return decode_plainly(target, [0, 2, 1], 20, chooser=Sampling(TEMPERATURE, seed, CPU))

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


def test_near_zero_a_temperature_is_greedy(logits: tuple[Tensor, Tensor]) -> None:
    target_logits, draft_logits = logits
    cold = Sampling(1e-4, 0, CPU)
    assert cold.choose(target_logits) == GREEDY.choose(target_logits)
    assert cold.draft(draft_logits).token_ids == GREEDY.draft(draft_logits).token_ids
    for token_ids in product(range(V), repeat=NUM_DRAFTED):
        certain = Draft(list(token_ids), torch.eye(V, dtype=torch.float64)[list(token_ids)])
        assert cold.judge(certain, target_logits) == GREEDY.judge(certain, target_logits)


def test_where_rounding_leaves_no_residual_the_target_is_drawn_from() -> None:
    same = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert torch.equal(sampling.residual(same, same), same)


def test_the_chooser_is_the_settings() -> None:
    assert make_chooser(SpeculateConfig(prompts="p"), CPU) is GREEDY
    chooser = make_chooser(SpeculateConfig(prompts="p", temperature=0.5, seed=9), CPU)
    assert isinstance(chooser, Sampling)
    assert (chooser.temperature, chooser.generator.initial_seed()) == (0.5, 9)
