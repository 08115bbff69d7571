"""The drafter, live: it keeps the keys and values of the committed context and proposes the rest of a block.

Shapes: T context tokens, F = K·H features; the module's rows and blocks are R = N = 1.
"""

import torch
from torch import Tensor

from speculate.sampling import GREEDY, Chooser, Draft
from train.drafter import ContextKeyValue, Drafter
from train.head import head_logits
from train.target_head import TargetHead


class BlockDrafter:
    """Drafts for one sequence. Only context is kept; a block's own keys and values are not."""

    def __init__(self, drafter: Drafter, head: TargetHead, mask_token_id: int, chooser: Chooser = GREEDY) -> None:
        self.drafter = drafter
        self.chooser = chooser
        self.head = head
        self.mask_token_id = mask_token_id
        self.block_size = drafter.config.block_size
        self.num_context_tokens = 0
        self.context: list[ContextKeyValue] = []

    @torch.inference_mode()
    def extend(self, features_TF: Tensor) -> None:
        """Take the features of newly committed tokens, which follow those taken before."""
        num_tokens = self.num_context_tokens + len(features_TF)
        positions_T = torch.arange(self.num_context_tokens, num_tokens, device=features_TF.device)
        new = self.drafter.encode_context(features_TF[None], positions_T[None])
        self.context = [_append(*pair) for pair in zip(self.context, new, strict=True)] if self.context else new
        self.num_context_tokens = num_tokens

    def propose(self, anchor_token_id: int, num_drafted: int) -> Draft:
        """Tokens for the `num_drafted` slots after the anchor, which is the token after the context."""
        return self.chooser.draft(self.logits(anchor_token_id, num_drafted))

    @torch.inference_mode()
    def logits(self, anchor_token_id: int, num_drafted: int) -> Tensor:
        """Of those slots, fp32 [num_drafted, V]."""
        device = self.head.embed_tokens_VH.device
        block_B = torch.tensor([anchor_token_id] + [self.mask_token_id] * num_drafted, device=device)
        hidden_RNBH = self.drafter(
            self.head.embed(block_B)[None, None],
            (self.num_context_tokens + torch.arange(len(block_B), device=device))[None, None],
            self.context,
            torch.zeros(1, 1, dtype=torch.int32, device=device),
            torch.full((1, 1), self.num_context_tokens, dtype=torch.int32, device=device),
        )
        return head_logits(
            hidden_RNBH[0, 0, 1:],
            self.head.lm_head_VH,
            self.head.output_multiplier,
            self.head.final_logit_softcapping,
        )


def _append(old: ContextKeyValue, new: ContextKeyValue) -> ContextKeyValue:
    return ContextKeyValue(*(torch.cat(parts, dim=1) for parts in zip(old, new, strict=True)))
