"""The pointwise part of the head loss in Triton: one program reads a row of logits twice and writes its gradient once.

Softmax statistics are fp32. A row's gradient replaces its logits, so that a chunk of logits is all the memory used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from train.float8 import E4M3_MAX, Scaled


@triton.jit
def _capped_logits(logits, columns, V, multiplier, softcap, HAS_CAP: tl.constexpr):
    """The target's logits of a piece of a row, −∞ beyond its end."""
    x = tl.load(logits + columns, mask=columns < V, other=0.0).to(tl.float32) * multiplier
    if HAS_CAP:
        x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)  # tanh
    return tl.where(columns < V, x, float("-inf"))


@triton.jit
def _loss_kernel(
    logits, labels, weights, cross_entropy, is_correct, gradient, gradient_scale, label_coefficient,
    V, multiplier, softcap, limit,
    HAS_CAP: tl.constexpr, WANTS_GRADIENT: tl.constexpr, IS_FLOAT8: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * V
    label = tl.load(labels + row)
    label_logit = tl.max(_capped_logits(logits, label + tl.arange(0, 1), V, multiplier, softcap, HAS_CAP))

    highest = float("-inf")
    total = 0.0
    num_better = 0
    for first in range(0, V, PIECE):
        columns = first + tl.arange(0, PIECE)
        x = _capped_logits(logits, columns, V, multiplier, softcap, HAS_CAP)
        is_better = (x > label_logit) | ((x == label_logit) & (columns < label))  # of equals the lowest id wins
        num_better += tl.sum(is_better.to(tl.int32))
        new_highest = tl.maximum(highest, tl.max(x))
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(x - new_highest))
        highest = new_highest
    log_normaliser = highest + tl.log(total)
    loss = log_normaliser - label_logit
    tl.store(cross_entropy + row, loss)
    tl.store(is_correct + row, num_better == 0)

    if WANTS_GRADIENT:
        gradient += row.to(tl.int64) * V
        scale = tl.load(weights + row) * multiplier
        if IS_FLOAT8:
            largest = tl.exp(highest - log_normaliser) / limit
            tl.store(gradient_scale + row, scale * largest)
            coefficient = scale
            scale = 1 / largest
            if HAS_CAP:
                coefficient *= 1 - (label_logit / softcap) * (label_logit / softcap)
            tl.store(label_coefficient + row, coefficient)
        for first in range(0, V, PIECE):
            columns = first + tl.arange(0, PIECE)
            x = _capped_logits(logits, columns, V, multiplier, softcap, HAS_CAP)
            values = tl.exp(x - log_normaliser)
            if not IS_FLOAT8:
                values = tl.where(columns == label, values - 1, values)
            if HAS_CAP:
                values *= 1 - (x / softcap) * (x / softcap)  # tanh' = 1 − tanh²
            tl.store(gradient + columns, (values * scale).to(gradient.dtype.element_ty), mask=columns < V)


def loss_and_gradient_kernel(
    logits_MV: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    multiplier: float,
    softcap: float | None,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `train.head.loss_and_gradient` returns; the gradient takes the place of the contiguous logits."""
    cross_entropy_M, is_correct_M = _launch(
        logits_MV, labels_M, weights_M, multiplier, softcap, wants_gradient, gradient_MV=logits_MV
    )
    return cross_entropy_M, is_correct_M, logits_MV


def loss_and_float8_gradient(
    logits_MV: Tensor, labels_M: Tensor, weights_M: Tensor, multiplier: float, softcap: float | None
) -> tuple[Tensor, Tensor, Scaled, Tensor]:
    """Cross-entropy, correctness, and the gradient in two parts: what the probabilities give, in 8 bits, and the
    coefficient [M] with which the label's one is to be subtracted, which 8 bits beside it would drown.
    """
    values_MV = torch.empty_like(logits_MV, dtype=torch.float8_e4m3fn)
    scales_M1 = torch.empty(len(labels_M), 1, dtype=torch.float32, device=logits_MV.device)
    coefficient_M = torch.empty(len(labels_M), dtype=torch.float32, device=logits_MV.device)
    cross_entropy_M, is_correct_M = _launch(
        logits_MV, labels_M, weights_M, multiplier, softcap, True,
        gradient_MV=values_MV, scales_M1=scales_M1, coefficient_M=coefficient_M,
    )  # fmt: skip
    return cross_entropy_M, is_correct_M, Scaled(values_MV, scales_M1), coefficient_M


def _launch(
    logits_MV: Tensor, labels_M: Tensor, weights_M: Tensor, multiplier: float, softcap: float | None,
    wants_gradient: bool, *, gradient_MV: Tensor, scales_M1: Tensor | None = None, coefficient_M: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_rows, vocab_size = logits_MV.shape
    cross_entropy_M = torch.empty(num_rows, dtype=torch.float32, device=logits_MV.device)
    is_correct_M = torch.empty(num_rows, dtype=torch.bool, device=logits_MV.device)
    _loss_kernel[(num_rows,)](
        logits_MV, labels_M, weights_M, cross_entropy_M, is_correct_M, gradient_MV, scales_M1, coefficient_M,
        vocab_size, multiplier, softcap or 1.0, E4M3_MAX,
        HAS_CAP=softcap is not None, WANTS_GRADIENT=wants_gradient, IS_FLOAT8=scales_M1 is not None,
        PIECE=min(8192, triton.next_power_of_2(vocab_size)), num_warps=8,
    )  # fmt: skip
    return cross_entropy_M, is_correct_M
