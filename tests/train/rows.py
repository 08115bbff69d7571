"""Packed rows for the tests of training: documents of given lengths one after the other, then padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Row:
    input_ids: list[int]
    position_ids: list[int]
    document_ids: list[int]  # −1 in padding slots
    loss_mask: list[int]


def pack(lengths: Sequence[int], num_tokens: int, *, vocab_size: int = 50, holes: float = 0.0, seed: int = 0) -> Row:
    """A row of `num_tokens` slots; each token is left out of the loss with probability `holes`."""
    assert sum(lengths) <= num_tokens
    generator = np.random.default_rng(seed)
    num_padding = num_tokens - sum(lengths)
    num_real = num_tokens - num_padding
    return Row(
        input_ids=generator.integers(vocab_size, size=num_real).tolist() + [0] * num_padding,
        position_ids=[position for length in lengths for position in range(length)] + [0] * num_padding,
        document_ids=[d for d, length in enumerate(lengths) for _ in range(length)] + [-1] * num_padding,
        loss_mask=(generator.random(num_real) >= holes).astype(int).tolist() + [0] * num_padding,
    )


def adversarial_packings(num_tokens: int) -> dict[str, list[int]]:
    """Document lengths of rows that are easy to get wrong."""
    return {
        "one document fills the row": [num_tokens],
        "documents of one token": [1] * num_tokens,
        "documents of two tokens": [2] * (num_tokens // 2),
        "no document": [],
        "one short document, then padding": [3],
        "a long document between short ones": [1, 2, num_tokens - 7, 1, 3],
        "padding of one slot": [num_tokens // 2, num_tokens - num_tokens // 2 - 1],
        "lengths around the block": [4, 5, 3, 4, 1, 6],
    }


def stack(rows: Sequence[Row], name: str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Field `name` of all rows, [R, T]."""
    return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)
