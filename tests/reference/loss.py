"""The loss of one row's blocks in float64: Σ w·CE and Σ w apart, since only the global step may divide."""

from collections.abc import Sequence

import torch
from torch import Tensor


def logits(hidden: Tensor, lm_head_VH: Tensor, *, multiplier: float = 1.0, softcap: float | None = None) -> Tensor:
    raw = hidden @ lm_head_VH.T * multiplier
    return raw if softcap is None else softcap * torch.tanh(raw / softcap)


def cross_entropy(logits_V: Tensor, label: int) -> Tensor:
    largest = logits_V.max()
    return largest + torch.log(torch.exp(logits_V - largest).sum()) - logits_V[label]


def weighted_sum(logits_MV: Tensor, labels: Sequence[int], weights: Sequence[float]) -> Tensor:
    """Σ w·CE over M slots; slots without weight don't enter, whatever they hold."""
    total = torch.zeros((), dtype=torch.float64)
    for logits_V, label, weight in zip(logits_MV, labels, weights, strict=True):
        if weight:
            total = total + weight * cross_entropy(logits_V, label)
    return total
