"""The target's frozen ends, as the cache keeps them: the input embedding that starts the blocks and the output head."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from shards.errors import CacheError
from shards.schema import HEAD_CONFIG_FILE, HEAD_FILE


@dataclass(frozen=True, kw_only=True)
class TargetHead:
    embed_tokens_VH: Tensor  # raw; `embed` scales
    lm_head_VH: Tensor  # the same tensor when the target ties them
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None

    @classmethod
    def load(cls, cache: Path, *, vocab_size: int, hidden_size: int, device: torch.device, dtype: torch.dtype):
        """Read the head of a cache onto `device`; raise CacheError when its shape is not the target's."""
        path = cache / HEAD_FILE
        try:
            settings = json.loads((cache / HEAD_CONFIG_FILE).read_text(encoding="utf-8"))
            tensors = load_file(path, device=str(device))
        except (OSError, ValueError, SafetensorError) as error:
            raise CacheError(f"{path} cannot be read: {error}") from None
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != (vocab_size, hidden_size):
                raise CacheError(
                    f"{path} has {name} of shape {list(tensor.shape)}, the target's is [{vocab_size}, {hidden_size}]: "
                    "extract again"
                )
        embed_tokens = tensors["embed_tokens"].to(dtype)
        return cls(
            embed_tokens_VH=embed_tokens,
            lm_head_VH=embed_tokens if settings["tied"] else tensors["lm_head"].to(dtype),
            input_embedding_scale=settings["input_embedding_scale"],
            output_multiplier=settings["output_multiplier"],
            final_logit_softcapping=settings["final_logit_softcapping"],
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.embed_tokens_VH) * self.input_embedding_scale
