"""Attention within the documents of packed rows, for the work of these documents alone: on GPUs, in half precision.

With a mask over whole rows most of the work is for nothing, and slower kernels do it. Elsewhere a mask it is.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

BY_DOCUMENT, BY_MASK = "by_document", "sdpa"  # names of attention in transformers
HALF_PRECISION = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)  # of GPUs; the kernel's limits, as those of the head size
MAX_HEAD_DIM, HEAD_DIM_MULTIPLE = 256, 8


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Where the documents of packed rows lie, one row after the other. Padding counts as a document."""

    bounds: Tensor  # int32 [documents + 1], on the device: document d has the slots bounds[d] up to bounds[d + 1]
    longest: int
    windows: list[int | None]  # by layer: how far a token sees, itself included; None: to its document's first

    @classmethod
    def of(cls, document_ids_RT: Tensor, windows: list[int | None], device: torch.device) -> Self:
        begins_RT = torch.ones_like(document_ids_RT, dtype=torch.bool)
        begins_RT[:, 1:] = document_ids_RT[:, 1:] != document_ids_RT[:, :-1]
        bounds = torch.cat((begins_RT.flatten().nonzero()[:, 0], torch.tensor([begins_RT.numel()]))).int()
        if device.type == "cuda":
            bounds = bounds.pin_memory()  # else the copy would wait for the row before
        return cls(bounds=bounds.to(device, non_blocking=True), longest=int(bounds.diff().max()), windows=windows)


def attention_of(
    model: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> str:
    """The attention that is fastest for this target there."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fits = (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
        and dtype in HALF_PRECISION
        and model._supports_attention_backend
        and not hasattr(config, "v_head_dim")  # values of another size than keys
        and head_dim <= MAX_HEAD_DIM
        and head_dim % HEAD_DIM_MULTIPLE == 0
    )
    return BY_DOCUMENT if fits else BY_MASK


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int | None, scale: float | None
) -> Tensor:
    """[slots, heads, head dim], each document alone and causally; keys and values may have fewer heads."""
    # What torch.nn.attention.varlen calls, whose own signature differs from release to release.
    output, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        documents.bounds,
        documents.bounds,
        documents.longest,
        documents.longest,
        0.0,  # dropout
        window is None,  # causal: else the window says so
        False,  # no mask to look at
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    return output


def _attend(
    module: nn.Module,
    query_RhTd: Tensor,
    key_RhTd: Tensor,
    value_RhTd: Tensor,
    _attention_mask: None,
    *,
    documents: Documents,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; `documents` comes from the arguments of the model's forward pass."""
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query_RhTd, key_RhTd, value_RhTd))
    window = documents.windows[module.layer_idx]
    output = flash_attention(query, key, value, documents, window, scaling)
    return output.unflatten(0, (len(query_RhTd), -1)), None


AttentionInterface.register(BY_DOCUMENT, _attend)
