"""The head loss: weighted cross-entropy through the target's frozen head, chunk by chunk, gradient in the same pass.

All logits of a step would be gigabytes; here a chunk of rows is projected, its loss and its gradient are taken, and
its logits are dropped. The head is frozen, so the only gradient is that of the hidden states. On CUDA the pointwise
part is a kernel (train/head_kernels.py).
"""

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

if find_spec("triton"):  # it comes with torch's CUDA builds only; train/preflight.py refuses a GPU without it
    from train.float8 import Float8, multiply
    from train.head_kernels import loss_and_float8_gradient, loss_and_gradient_kernel

CHUNK_LOGITS = 1 << 29  # logits of one chunk: 1 GiB in bf16


class HeadLoss(NamedTuple):
    """Over M slots. Only `weighted_sum` carries a gradient."""

    weighted_sum: Tensor  # fp32 scalar: Σ w·CE
    cross_entropy_M: Tensor  # fp32, unweighted
    is_correct_M: Tensor  # bool: the label is the argmax (the lowest id, where several tie)


def head_loss(
    hidden_MH: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    lm_head_VH: Tensor,
    *,
    lm_head_float8: "Float8 | None" = None,
    output_multiplier: float = 1.0,
    final_logit_softcapping: float | None = None,
) -> HeadLoss:
    """Σ w·CE of `lm_head_VH` applied to `hidden_MH` (one dtype) against int64 labels, with fp32 weights.

    With `lm_head_float8`, the same head in 8 bits, products are 8-bit ones.
    """
    scaling = (output_multiplier, final_logit_softcapping)
    return HeadLoss(*_HeadLoss.apply(hidden_MH, labels_M, weights_M, lm_head_VH, lm_head_float8, *scaling))


def head_logits(hidden: Tensor, lm_head_VH: Tensor, output_multiplier: float, softcap: float | None) -> Tensor:
    """The target's logits in fp32: multiplied, then capped to ±softcap."""
    return capped(functional.linear(hidden, lm_head_VH), output_multiplier, softcap)


def capped(logits: Tensor, multiplier: float, softcap: float | None) -> Tensor:
    logits = logits.float() * multiplier
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def loss_and_gradient(
    logits_MV: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    multiplier: float,
    softcap: float | None,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of raw logits: cross-entropy [M], whether the argmax is right [M], and Σ w·CE's gradient [M, V], if wanted.

    The gradient may take the place of the logits.
    """
    if logits_MV.is_cuda:
        return loss_and_gradient_kernel(logits_MV, labels_M, weights_M, multiplier, softcap, wants_gradient)
    capped_MV = capped(logits_MV, multiplier, softcap)
    labels_M1 = labels_M[:, None]
    log_normaliser_M1 = capped_MV.logsumexp(dim=1, keepdim=True)
    cross_entropy_M = (log_normaliser_M1 - capped_MV.gather(1, labels_M1)).squeeze(1)
    is_correct_M = capped_MV.argmax(dim=1) == labels_M
    if not wants_gradient:
        return cross_entropy_M, is_correct_M, logits_MV
    gradient_MV = torch.exp(capped_MV - log_normaliser_M1)
    gradient_MV.scatter_(1, labels_M1, torch.expm1(-cross_entropy_M)[:, None])  # probability − 1 at the label
    gradient_MV *= weights_M[:, None] * multiplier
    if softcap is not None:
        gradient_MV *= 1 - (capped_MV / softcap).square()  # of the cap: tanh' = 1 − tanh²
    return cross_entropy_M, is_correct_M, gradient_MV.to(logits_MV.dtype)


def chunk_loss(
    hidden_MH: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    lm_head_VH: Tensor,
    lm_head_float8: "Float8 | None",
    multiplier: float,
    softcap: float | None,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a chunk of slots: cross-entropy [M], whether the argmax is right [M], Σ w·CE's gradient [M, H], if wanted."""
    if lm_head_float8 is None or not wants_gradient:
        logits_MV = functional.linear(hidden_MH, lm_head_VH)
        cross_entropy_M, is_correct_M, d_logits_MV = loss_and_gradient(
            logits_MV, labels_M, weights_M, multiplier, softcap, wants_gradient
        )
        return cross_entropy_M, is_correct_M, d_logits_MV @ lm_head_VH if wants_gradient else hidden_MH
    logits_MV = multiply(Float8.of(hidden_MH).rows, lm_head_float8.rows, is_fast=True)
    cross_entropy_M, is_correct_M, d_logits_MV, label_coefficient_M = loss_and_float8_gradient(
        logits_MV, labels_M, weights_M, multiplier, softcap
    )
    gradient_MH = multiply(d_logits_MV, lm_head_float8.columns, is_fast=False)
    gradient_MH -= label_coefficient_M[:, None] * lm_head_VH[labels_M]
    return cross_entropy_M, is_correct_M, gradient_MH


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_MH, labels_M, weights_M, lm_head_VH, lm_head_float8, *scaling):  # type: ignore[override]
        size = chunk_rows(len(labels_M), len(lm_head_VH))
        chunks = zip(*(x.split(size) for x in (hidden_MH, labels_M, weights_M)), strict=True)
        parts = [chunk_loss(*chunk, lm_head_VH, lm_head_float8, *scaling, ctx.needs_input_grad[0]) for chunk in chunks]
        cross_entropy_M, is_correct_M, gradient_MH = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(gradient_MH)
        ctx.mark_non_differentiable(cross_entropy_M, is_correct_M)
        return (weights_M * cross_entropy_M).sum(), cross_entropy_M, is_correct_M

    @staticmethod
    def backward(ctx, grad_sum, *_):  # type: ignore[override]
        (gradient_MH,) = ctx.saved_tensors
        return gradient_MH * grad_sum.to(gradient_MH.dtype), None, None, None, None, None, None


def chunk_rows(num_rows: int, vocab_size: int) -> int:
    """Rows of a chunk: as even as can be."""
    num_chunks = -(-num_rows * vocab_size // CHUNK_LOGITS)
    return -(-num_rows // num_chunks)
