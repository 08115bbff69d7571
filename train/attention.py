"""Block attention: every block's queries read one contiguous range of context and the block itself.

Two implementations behind one function. On CUDA a kernel reads just the range (train/attention_kernels.py). Elsewhere
plain torch attends under a dense mask, spending work on pairs that the mask then hides; it also is the readable
statement of what the kernel computes.
"""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

if find_spec("triton"):  # it comes with torch's CUDA builds only; train/preflight.py refuses a GPU without it
    from train.attention_kernels import block_attention_kernel


def block_attention(
    query_RNBhd: Tensor,
    context_key_RTgd: Tensor,
    context_value_RTgd: Tensor,
    block_key_RNBgd: Tensor,
    block_value_RNBgd: Tensor,
    context_start_RN: Tensor,
    context_end_RN: Tensor,
    *,
    sliding_window: int | None,
    is_causal: bool,
    use_kernel: bool = True,
) -> Tensor:
    """Attention of h query heads over g key-value heads of size d, scaled by d^−½; returns [R, N, B, h, d].

    A block sees context slots start ≤ t < end (int32, blocks of a row ascending in both but for padding blocks, whose
    range is empty) and its own slots. With a window, slot j sees context t only when end + j − t < window, and its own
    slots likewise. With `is_causal` it sees its own slots up to j only.
    """
    tensors = (query_RNBhd, context_key_RTgd, context_value_RTgd, block_key_RNBgd, block_value_RNBgd)
    if use_kernel and query_RNBhd.is_cuda:
        contiguous = (tensor.contiguous() for tensor in tensors)
        return block_attention_kernel(*contiguous, context_start_RN, context_end_RN, sliding_window or 0, is_causal)[0]
    mask_RQK = block_mask(
        context_start_RN=context_start_RN,
        context_end_RN=context_end_RN,
        num_context_tokens=context_key_RTgd.shape[1],
        block_size=query_RNBhd.shape[2],
        sliding_window=sliding_window,
        is_causal=is_causal,
    )
    return masked_attention(*tensors, mask_RQK)


def block_mask(
    *,
    context_start_RN: Tensor,
    context_end_RN: Tensor,
    num_context_tokens: int,
    block_size: int,
    sliding_window: int | None,
    is_causal: bool,
) -> Tensor:
    """Which keys each query may see: bool [R, N·B, T + N·B]; keys are the row's context, then all block slots.

    Context slot t is seen when start ≤ t < end, and by slot j of a sliding layer when also anchor + j − t < window.
    Of the block slots only the block's own are seen: all, or with `is_causal` those up to the query's.
    """
    num_rows, num_blocks = context_end_RN.shape
    device = context_end_RN.device
    slots_B = torch.arange(block_size, device=device)
    context_T = torch.arange(num_context_tokens, device=device)
    lower_RNB = context_start_RN[:, :, None].expand(-1, -1, block_size)
    if sliding_window is not None:
        lower_RNB = torch.maximum(lower_RNB, context_end_RN[:, :, None] + slots_B - sliding_window + 1)
    sees_context_RNBT = (context_T >= lower_RNB[..., None]) & (context_T < context_end_RN[:, :, None, None])

    same_block_NM = torch.eye(num_blocks, dtype=torch.bool, device=device)
    sees_slot_BB = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    if is_causal:
        sees_slot_BB = sees_slot_BB.tril()
    if sliding_window is not None:
        sees_slot_BB = sees_slot_BB & ((slots_B[:, None] - slots_B).abs() < sliding_window)
    sees_blocks_NBMB = same_block_NM[:, None, :, None] & sees_slot_BB[None, :, None, :]

    num_queries = num_blocks * block_size
    return torch.cat(
        (
            sees_context_RNBT.reshape(num_rows, num_queries, num_context_tokens),
            sees_blocks_NBMB.reshape(1, num_queries, num_queries).expand(num_rows, -1, -1),
        ),
        dim=2,
    )


def masked_attention(
    query_RNBhd: Tensor,
    context_key_RTgd: Tensor,
    context_value_RTgd: Tensor,
    block_key_RNBgd: Tensor,
    block_value_RNBgd: Tensor,
    mask_RQK: Tensor,
) -> Tensor:
    """The same in plain torch, under `block_mask`'s mask."""
    num_blocks, block_size, num_heads = query_RNBhd.shape[1:4]

    def all_heads(block_RNBgd: Tensor, context_RTgd: Tensor) -> Tensor:
        """The keys or values that every query head reads, [R, h, T + N·B, d]."""
        both = torch.cat((context_RTgd, block_RNBgd.flatten(1, 2)), dim=1).transpose(1, 2)
        return both.repeat_interleave(num_heads // both.shape[1], dim=1)

    output_RhQd = functional.scaled_dot_product_attention(
        query_RNBhd.flatten(1, 2).transpose(1, 2),
        all_heads(block_key_RNBgd, context_key_RTgd),
        all_heads(block_value_RNBgd, context_value_RTgd),
        attn_mask=mask_RQK[:, None],
    )
    return output_RhQd.transpose(1, 2).unflatten(1, (num_blocks, block_size))
