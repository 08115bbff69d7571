"""Acceptance in numbers, from the rounds of all answers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speculate.decode import Round

NUM_RESAMPLES = 4000  # moves the ends of an interval by some 3 % of its width
Interval = tuple[float, float]  # 95 %


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """τ is tokens committed per target pass, the bonus token included. None where there was nothing to count."""

    acceptance_length_macro: float | None  # mean over answers of each answer's mean (the published client's τ)
    acceptance_length_pooled: float | None  # all tokens over all rounds
    acceptance_length_macro_interval: Interval | None  # None with fewer than two answers that have rounds
    acceptance_length_pooled_interval: Interval | None
    rounds: int
    histogram: list[int]  # entry i: rounds that committed i + 1 tokens
    per_slot: list[float | None]  # entry j − 1: share of the rounds that judged slot j in which it was accepted


def measure(answers: Sequence[Sequence[Round]], block_size: int) -> Acceptance:
    """Count the rounds of every answer. An answer without rounds (its first token ended it) has no mean."""
    rounds = [item for answer in answers for item in answer]
    committed = Counter(item.num_committed for item in rounds)
    macro_interval, pooled_interval = _intervals(answers)
    return Acceptance(
        acceptance_length_macro=macro_acceptance_length(answers),
        acceptance_length_pooled=sum(item.num_committed for item in rounds) / len(rounds) if rounds else None,
        acceptance_length_macro_interval=macro_interval,
        acceptance_length_pooled_interval=pooled_interval,
        rounds=len(rounds),
        histogram=[committed[i + 1] for i in range(block_size)],
        per_slot=[_slot_acceptance(rounds, slot) for slot in range(1, block_size)],
    )


def macro_acceptance_length(answers: Sequence[Sequence[Round]]) -> float | None:
    means = [sum(item.num_committed for item in answer) / len(answer) for answer in answers if answer]
    return sum(means) / len(means) if means else None


def _intervals(answers: Sequence[Sequence[Round]]) -> tuple[Interval | None, Interval | None]:
    """Of the macro and the pooled τ, by the percentile bootstrap (Efron, 1979): answers drawn anew with replacement.

    Answers are what is drawn, because the rounds of one answer are alike.
    """
    sums = [(sum(item.num_committed for item in answer), len(answer)) for answer in answers if answer]
    if len(sums) < 2:
        return None, None
    tokens, rounds = np.array(sums, np.float64).T
    drawn = np.random.default_rng(0).integers(len(sums), size=(NUM_RESAMPLES, len(sums)))
    macro = (tokens / rounds)[drawn].mean(axis=1)
    pooled = tokens[drawn].sum(axis=1) / rounds[drawn].sum(axis=1)
    return _middle(macro), _middle(pooled)


def _middle(values: np.ndarray) -> Interval:
    low, high = np.quantile(values, (0.025, 0.975)).tolist()
    return low, high


def _slot_acceptance(rounds: Sequence[Round], slot: int) -> float | None:
    """A slot is accepted with all before it. Where the answer's end cut a round short, later slots were not judged."""
    num_accepted = sum(item.num_accepted >= slot for item in rounds)
    num_judged = sum(item.num_accepted >= slot or not item.is_clipped for item in rounds)
    return num_accepted / num_judged if num_judged else None
