"""What a measurement found: as JSON, as the table at the end, and as the sentence when an answer was changed."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speculate.acceptance import Acceptance, Interval
from speculate.session import LOOKUP, OFFLINE, OTHER_CONTEXT, UNTRAINED, Answer

COMPARED = {
    OFFLINE: "offline: this drafter after every token, as held-out τ is counted",
    LOOKUP: "prompt lookup, without a drafter",
    UNTRAINED: "this drafter before training",
    OTHER_CONTEXT: "this drafter with another answer's context",
}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens of answers per second, their prompts' passes included, one at a time."""

    tokens_per_second: float
    plain_tokens_per_second: float  # of the target alone

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> "Speed":
        return cls(
            tokens_per_second=sum(len(a.decoded.token_ids) for a in answers) / sum(a.decoded_s for a in answers),
            plain_tokens_per_second=sum(len(a.plain_ids) for a in answers) / sum(a.plain_s for a in answers),
        )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where an answer differs from the target's own, or from how the target goes on after a tie."""

    prompt: int  # counted from 0
    where: str
    token: int  # of the answer, counted from 0
    own_token_id: int
    speculative_token_id: int
    logit_gap: float  # between the two, in a pass of the target without a cache
    tie_gap: float  # below it rounding may choose either; 0 in float32

    @property
    def is_tie(self) -> bool:
        return self.logit_gap < self.tie_gap


@dataclass(frozen=True, kw_only=True)
class Report:
    target: str
    drafter: str
    device: str
    dtype: str
    block_size: int
    max_new_tokens: int
    temperature: float
    prompts: int
    new_tokens: int
    speed: Speed
    acceptance: Acceptance
    by_source: dict[str, float | None]  # macro τ
    replayed: dict[str, Acceptance]  # of what COMPARED names; nothing where answers are drawn
    differences: list[Difference]  # of greedy answers

    @property
    def ties(self) -> int:
        return sum(difference.is_tie for difference in self.differences)

    @property
    def first_difference(self) -> Difference | None:
        """That is no tie."""
        return next((difference for difference in self.differences if not difference.is_tie), None)

    @property
    def is_lossless(self) -> bool | None:
        """None where answers are drawn: what must be equal then is their distribution, and one draw shows none."""
        return None if self.temperature else self.first_difference is None

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self) | {"ties": self.ties}
        first = self.first_difference and dataclasses.asdict(self.first_difference)
        del values["differences"]
        merged = values.pop("acceptance") | values.pop("speed") | values
        return {"lossless": self.is_lossless, **merged, "first_difference": first}


def describe_difference(difference: Difference, dtype: str) -> str:
    sentence = (
        f"speculation changed the answer to {difference.where}: token {difference.token} is "
        f"{difference.speculative_token_id}, the target alone gives {difference.own_token_id}; "
        f"the target's logits of the two differ by {difference.logit_gap:.3g}"
    )
    return sentence if dtype == "float32" else f"{sentence}, and {dtype} explains {difference.tie_gap:.3g}"


def describe(report: Report) -> str:
    """The table at the end."""
    acceptance = report.acceptance
    macro = _mean(acceptance.acceptance_length_macro, acceptance.acceptance_length_macro_interval)
    pooled = _mean(acceptance.acceptance_length_pooled, acceptance.acceptance_length_pooled_interval)
    ties = f"{report.ties}  (tokens at which {report.dtype} can't tell the target's choice from another)"
    lines = [
        "",
        f"target          {report.target} ({report.dtype}, {report.device})",
        f"drafter         {report.drafter}, blocks of {report.block_size}",
        f"decoded         {report.new_tokens} tokens for {report.prompts} prompts in {acceptance.rounds} rounds",
        f"lossless        {_verdict(report)}",
        *([f"ties            {ties}"] if report.ties else []),
        f"τ, macro        {macro}  (mean over answers; tokens per target pass, bonus included)",
        f"τ, pooled       {pooled}  (over all rounds; 95 % intervals, over answers)",
        *_by_source(report),
        f"speed           {_speed(report.speed)}",
        *_compared(report.replayed),
        "",
        "slot            " + "".join(f"{slot:>7}" for slot in range(1, report.block_size)),
        "accepted        " + "".join(f"{_number(share, '.1%'):>7}" for share in acceptance.per_slot),
        "",
        "tokens a round  " + "".join(f"{i + 1:>7}" for i in range(report.block_size)),
        "rounds          " + "".join(f"{count:>7}" for count in acceptance.histogram),
    ]
    return "\n".join(lines)


def _verdict(report: Report) -> str:
    if report.is_lossless is None:
        return f"in distribution: answers are drawn at temperature {report.temperature:g}, and not compared"
    if not report.is_lossless:
        return "NO"
    return "yes, but for ties" if report.ties else "yes: every token is the target's own"


def _by_source(report: Report) -> list[str]:
    if len(report.by_source) < 2:
        return []
    return [f"  {source:<14}{_number(macro)}" for source, macro in report.by_source.items()]


def _speed(speed: Speed) -> str:
    ratio = speed.tokens_per_second / speed.plain_tokens_per_second
    return (
        f"{speed.tokens_per_second:.1f} tokens a second, {ratio:.2f} × the target alone, "
        f"{speed.plain_tokens_per_second:.1f}"
    )


def _compared(replayed: dict[str, Acceptance]) -> list[str]:
    """The same two τ of whatever the answers were replayed with."""
    if not replayed:
        return []
    rows = [
        f"{_number(item.acceptance_length_macro):>15} {_number(item.acceptance_length_pooled):>8}  {COMPARED[name]}"
        for name, item in replayed.items()
    ]
    return ["", f"{'τ, macro':>15} {'pooled':>8}  of the same answers, for comparison", *rows]


def _mean(value: float | None, interval: Interval | None) -> str:
    return _number(value) + (" [{:.3f}, {:.3f}]".format(*interval) if interval else "")


def _number(value: float | None, spec: str = ".3f") -> str:
    return "–" if value is None else format(value, spec)
