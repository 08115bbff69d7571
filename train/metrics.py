"""What a run reports: sums gathered on the device, and the numbers they come to once per log interval."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from train.step import BlockResult


class Metrics:
    """Sums over micro-steps in one fp64 vector on the device: read, and summed over ranks, as a whole."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.sums = torch.zeros(4 + 2 * block_size, dtype=torch.float64, device=device)

    def add(self, result: "BlockResult") -> None:
        scalars = (
            result.loss_sum.detach(),
            result.weight_sum,
            result.is_block_RN.sum(),
            (result.accepted_RN * result.is_block_RN).sum(),
        )
        added = torch.cat(
            (
                torch.stack([scalar.double() for scalar in scalars]),
                (result.is_correct_RNB & result.supervised_RNB).sum(dim=(0, 1)),
                result.supervised_RNB.sum(dim=(0, 1)),
            )
        )
        self.sums += torch.where(torch.isfinite(result.loss_sum.detach()), added, 0.0)  # else all of it says nothing

    def reset(self) -> None:
        self.sums.zero_()


def summarise(sums: Sequence[float], block_size: int) -> dict[str, float | list[float | None] | None]:
    """Metrics' sums as reported: None where nothing was counted. Slots 1..B−1 in `accuracy_per_slot`."""
    loss_sum, weight_sum, num_blocks, accepted_sum = sums[:4]
    correct, supervised = sums[4 : 4 + block_size], sums[4 + block_size :]
    return {
        "loss": _ratio(loss_sum, weight_sum),
        "acceptance_length": _ratio(accepted_sum, num_blocks),
        "accuracy_per_slot": [_ratio(c, s) for c, s in zip(correct[1:], supervised[1:], strict=True)],
    }


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval, mean ± half_width. half_width is None for fewer than two documents."""

    mean: float
    half_width: float | None


def mean_by_document(totals: Tensor, counts: Tensor) -> Interval:
    """The pooled mean Σ totals / Σ counts over documents, fp64 [D] each, with documents as the sampling unit.

    Blocks of one document are alike, so they are no independent draws: the variance is that of a ratio of sums over
    documents (Cochran, Sampling Techniques, 1977, section 6).
    """
    num_documents = len(totals)
    mean = (totals.sum() / counts.sum()).item()
    if num_documents < 2:
        return Interval(mean, None)
    residuals = totals - mean * counts
    variance = residuals.square().sum() / counts.sum().square() * num_documents / (num_documents - 1)
    return Interval(mean, 1.96 * math.sqrt(variance.item()))


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
