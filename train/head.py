"""The head loss: weighted cross-entropy through the target's frozen head, chunk by chunk, gradient in the same pass.

All logits of a step would be gigabytes; here a chunk of rows is projected, its loss and its gradient are taken, and
its logits are dropped. The head is frozen, so the only gradient is that of the hidden states.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from train.graph import compiled

CHUNK_LOGITS = 1 << 28  # logits of one chunk: 1 GiB in fp32


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
    output_multiplier: float = 1.0,
    final_logit_softcapping: float | None = None,
) -> HeadLoss:
    """Σ w·CE of `lm_head_VH` applied to `hidden_MH` (one dtype) against int64 labels, with fp32 weights."""
    return HeadLoss(
        *_HeadLoss.apply(hidden_MH, labels_M, weights_M, lm_head_VH, output_multiplier, final_logit_softcapping)
    )


def head_logits(hidden: Tensor, lm_head_VH: Tensor, output_multiplier: float, softcap: float | None) -> Tensor:
    """The target's logits in fp32: multiplied, then capped to ±softcap."""
    logits = functional.linear(hidden, lm_head_VH).float() * output_multiplier
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def chunk_loss(
    hidden_CH: Tensor,
    labels_C: Tensor,
    weights_C: Tensor,
    lm_head_VH: Tensor,
    multiplier: float,
    softcap: float | None,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a chunk of C slots: cross-entropy, whether the argmax is right, and, if wanted, Σ w·CE's gradient [C, H]."""
    logits_CV = head_logits(hidden_CH, lm_head_VH, multiplier, softcap)
    labels_C1 = labels_C[:, None]
    log_normaliser_C1 = logits_CV.logsumexp(dim=1, keepdim=True)
    cross_entropy_C1 = log_normaliser_C1 - logits_CV.gather(1, labels_C1)
    is_correct_C = logits_CV.argmax(dim=1) == labels_C
    if not wants_gradient:
        return cross_entropy_C1.squeeze(1), is_correct_C, hidden_CH
    gradient_CV = torch.exp(logits_CV - log_normaliser_C1)
    gradient_CV = gradient_CV.scatter(1, labels_C1, torch.expm1(-cross_entropy_C1))  # probability − 1 at the label
    gradient_CV = gradient_CV * (weights_C[:, None] * multiplier)
    if softcap is not None:
        gradient_CV = gradient_CV * (1 - (logits_CV / softcap).square())  # of the cap: tanh' = 1 − tanh²
    return cross_entropy_C1.squeeze(1), is_correct_C, gradient_CV.to(hidden_CH.dtype) @ lm_head_VH


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_MH, labels_M, weights_M, lm_head_VH, multiplier, softcap):  # type: ignore[override]
        run_chunk = compiled(chunk_loss) if hidden_MH.is_cuda else chunk_loss
        chunks = [
            run_chunk(hidden, labels, weights, lm_head_VH, multiplier, softcap, ctx.needs_input_grad[0])
            for hidden, labels, weights in zip(
                *(x.split(chunk_rows(len(labels_M), len(lm_head_VH))) for x in (hidden_MH, labels_M, weights_M)),
                strict=True,
            )
        ]
        cross_entropy_M, is_correct_M, gradient_MH = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(gradient_MH)
        ctx.mark_non_differentiable(cross_entropy_M, is_correct_M)
        return (weights_M * cross_entropy_M).sum(), cross_entropy_M, is_correct_M

    @staticmethod
    def backward(ctx, grad_sum, *_):  # type: ignore[override]
        (gradient_MH,) = ctx.saved_tensors
        return gradient_MH * grad_sum.to(gradient_MH.dtype), None, None, None, None, None


def chunk_rows(num_rows: int, vocab_size: int) -> int:
    """Rows of a chunk: as even as can be, so that at most two shapes are compiled."""
    num_chunks = -(-num_rows * vocab_size // CHUNK_LOGITS)
    return -(-num_rows // num_chunks)
