"""Blocks: what the drafter sees and must predict after each anchor, and how much every slot counts."""

from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """The N blocks of each row. Slots are numbered 0..B−1; slot 0 holds the anchor, which is known."""

    token_ids_RNB: Tensor  # int64: the anchor's token, then mask tokens
    position_ids_RNB: Tensor  # int64: position in the document
    labels_RNB: Tensor  # int64: the token at anchor + slot; no shift
    supervised_RNB: Tensor  # bool: slots 1..j are all inside the document and in the loss mask; slot 0 never is
    context_start_RN: Tensor  # int32: first slot of the row that the block sees (its document's start)
    context_end_RN: Tensor  # int32: the anchor; context ends before it. Padding blocks see nothing: start = end = 0


def build_blocks(
    *,
    input_ids_RT: Tensor,
    position_ids_RT: Tensor,
    document_ids_RT: Tensor,
    loss_mask_RT: Tensor,
    anchors_RN: Tensor,
    is_block_RN: Tensor,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Lay out the blocks that start at `anchors_RN`. All inputs are integer tensors, `is_block_RN` is bool.

    A slot beyond the row's end repeats the row's last token as its (unsupervised) label.
    """
    num_tokens = input_ids_RT.shape[1]
    slots_B = torch.arange(block_size, device=anchors_RN.device)
    unclipped_RNB = anchors_RN[:, :, None] + slots_B
    index_RNB = unclipped_RNB.clamp(max=num_tokens - 1)

    def gather(values_RT: Tensor) -> Tensor:
        return values_RT.long().gather(1, index_RNB.flatten(1)).view_as(index_RNB)

    labels_RNB = gather(input_ids_RT)
    documents_RNB = gather(document_ids_RT)
    counts_RNB = (
        (gather(loss_mask_RT) != 0)
        & (documents_RNB == documents_RNB[:, :, :1])
        & (unclipped_RNB < num_tokens)
        & is_block_RN[:, :, None]
    )
    counts_RNB[:, :, 0] = True  # the anchor does not interrupt the prefix …
    supervised_RNB = counts_RNB.cumprod(dim=2).bool() & (slots_B > 0) & is_block_RN[:, :, None]  # … and has no loss
    anchor_position_RN = position_ids_RT.long().gather(1, anchors_RN)
    return Blocks(
        token_ids_RNB=torch.where(slots_B == 0, labels_RNB, mask_token_id),
        position_ids_RNB=anchor_position_RN[:, :, None] + slots_B,
        labels_RNB=labels_RNB,
        supervised_RNB=supervised_RNB,
        context_start_RN=torch.where(is_block_RN, anchors_RN - anchor_position_RN, 0).int(),
        context_end_RN=torch.where(is_block_RN, anchors_RN, 0).int(),
    )


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """Weight of each slot in the loss, [B] float32: exp(−(j−1)/γ) for slot j ≥ 1, and 0 for the anchor."""
    slots_B = torch.arange(block_size, dtype=torch.float32)
    return torch.where(slots_B > 0, torch.exp(-(slots_B - 1) / gamma), 0.0)


def accepted_lengths(correct_RNB: Tensor, supervised_RNB: Tensor) -> Tensor:
    """Simulated acceptance length of each block, int64 [R, N]: 1 + the leading slots predicted right.

    A block that the end of its document cuts short counts with the slots it has. The anchor's entry is ignored.
    """
    hits_RNS = (correct_RNB & supervised_RNB)[:, :, 1:]
    return 1 + hits_RNS.long().cumprod(dim=2).sum(dim=2)
