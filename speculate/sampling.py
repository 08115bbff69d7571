"""How a token is chosen from logits, and how a draft is judged so that what comes out is still the target's choice.

Greedily that is the same token. At a temperature it is the same distribution, by rejection: a drafted token is kept
with probability min(1, target / draft), and the first that is not is drawn anew from what the draft had too little of
(Leviathan et al., 2023, algorithm 1).
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shards.sections import SpeculateConfig


class Draft(NamedTuple):
    """Proposed tokens, and the distributions that they were drawn from: fp64 [slots, V], or None if by no chance."""

    token_ids: list[int]
    probabilities: Tensor | None = None


class Chooser(Protocol):
    def choose(self, logits_TV: Tensor) -> list[int]:
        """One token from each row of the target's logits."""

    def draft(self, logits_TV: Tensor) -> Draft:
        """One token from each row of the drafter's logits."""

    def judge(self, draft: Draft, logits_TV: Tensor) -> list[int]:
        """The tokens of the draft that are kept, and one more of the target's.

        Row i is the target's logits for the token in the place of the draft's i-th; one row more than that has tokens.
        """


class Greedy:
    def choose(self, logits_TV: Tensor) -> list[int]:
        return logits_TV.argmax(dim=-1).tolist()

    def draft(self, logits_TV: Tensor) -> Draft:
        return Draft(self.choose(logits_TV))

    def judge(self, draft: Draft, logits_TV: Tensor) -> list[int]:
        chosen = self.choose(logits_TV)
        return chosen[: count_matching(draft.token_ids, chosen) + 1]


GREEDY = Greedy()


class Sampling:
    """Draws at a temperature, reproducibly; all draws of a process come from one stream."""

    def __init__(self, temperature: float, seed: int, device: torch.device) -> None:
        self.temperature = temperature
        self.generator = torch.Generator(device).manual_seed(seed)

    def choose(self, logits_TV: Tensor) -> list[int]:
        return self._draw(self.probabilities(logits_TV))

    def draft(self, logits_TV: Tensor) -> Draft:
        probabilities_TV = self.probabilities(logits_TV)
        return Draft(self._draw(probabilities_TV), probabilities_TV)

    def judge(self, draft: Draft, logits_TV: Tensor) -> list[int]:
        target_TV, draft_TV = self.probabilities(logits_TV), draft.probabilities
        assert draft_TV is not None
        for i, token_id in enumerate(draft.token_ids):
            if not self.is_kept(target_TV[i, token_id], draft_TV[i, token_id]):
                return draft.token_ids[:i] + self._draw(residual(target_TV[i], draft_TV[i])[None])
        return draft.token_ids + self._draw(target_TV[-1:])

    def probabilities(self, logits_TV: Tensor) -> Tensor:
        return torch.softmax(logits_TV.double() / self.temperature, dim=-1)

    def is_kept(self, target: Tensor, draft: Tensor) -> bool:
        """Of a token to which the two give these probabilities; the draft's is not 0."""
        uniform = torch.rand((), dtype=torch.float64, device=draft.device, generator=self.generator)
        return bool(uniform * draft < target)

    def _draw(self, weights_TV: Tensor) -> list[int]:
        return torch.multinomial(weights_TV, 1, generator=self.generator).flatten().tolist()


def residual(target_V: Tensor, draft_V: Tensor) -> Tensor:
    """What the target gives more than the draft, as weights; all is left where rounding hides that."""
    more_V = (target_V - draft_V).clamp(min=0)
    return more_V if more_V.any() else target_V


def make_chooser(settings: SpeculateConfig, device: torch.device) -> Chooser:
    if settings.temperature == 0.0:
        return GREEDY
    return Sampling(settings.temperature, settings.seed, device)


def count_matching(first: list[int], second: list[int]) -> int:
    """The length of the common beginning."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)
