"""The tensors that a micro-step reads its rows from: the same shapes at the same addresses for the whole run."""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from shards.codec import CODECS
from shards.reader import RowBuffers

CODE_DTYPES = {"uint16": torch.uint16, "int8": torch.int8, "uint8": torch.uint8}  # numpy's names


@dataclass(frozen=True, kw_only=True)
class StagedRows:
    """R rows of T token slots with K layers of codes, and the epoch that they are of."""

    row_ids_R: Tensor  # int64
    epoch: Tensor  # int64 scalar
    input_ids_RT: Tensor  # int32
    position_ids_RT: Tensor  # int32: position in the document
    document_ids_RT: Tensor  # int32: −1 where there is none
    loss_mask_RT: Tensor  # uint8
    codes_RKTC: Tensor  # as stored: C codes of the codec's type for the H values of a token
    scales_RKTG: Tensor  # uint16: bits of bf16; of width 0 for a codec without scales

    @classmethod
    def allocate(
        cls,
        *,
        num_rows: int,
        num_tokens: int,
        num_layers: int,
        hidden_size: int,
        codec: str,
        device: torch.device,
    ) -> Self:
        """Rows without documents, which nothing can be learned from."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        kind, tokens = CODECS[codec], (num_rows, num_layers, num_tokens)
        rows = cls(
            row_ids_R=zeros(num_rows, dtype=torch.int64),
            epoch=zeros(dtype=torch.int64),
            input_ids_RT=zeros(num_rows, num_tokens, dtype=torch.int32),
            position_ids_RT=zeros(num_rows, num_tokens, dtype=torch.int32),
            document_ids_RT=zeros(num_rows, num_tokens, dtype=torch.int32),
            loss_mask_RT=zeros(num_rows, num_tokens, dtype=torch.uint8),
            codes_RKTC=zeros(*tokens, kind.code_width(hidden_size), dtype=CODE_DTYPES[kind.code_dtype.name]),
            scales_RKTG=zeros(*tokens, kind.scale_width(hidden_size), dtype=torch.uint16),
        )
        rows.document_ids_RT.fill_(-1)
        return rows

    def allocate_like(self, device: torch.device | str, *, pinned: bool = False) -> Self:
        """Rows of the same shapes elsewhere, all zero."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(
            **{name: torch.zeros_like(t, device=device, pin_memory=pinned) for name, t in tensors.items()}
        )

    def copy_from(self, other: Self) -> None:
        """Enqueue the copy of all rows on the current stream."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name), non_blocking=True)

    def row_buffers(self, index: int, *, num_layers: int) -> RowBuffers:
        """One row as the numpy arrays that the reader fills, with the first `num_layers` layers of codes."""

        def array(tensor: Tensor) -> np.ndarray:
            return tensor[index].numpy()

        return RowBuffers(
            input_ids=array(self.input_ids_RT),
            position_ids=array(self.position_ids_RT),
            document_ids=array(self.document_ids_RT),
            loss_mask=array(self.loss_mask_RT),
            codes=array(self.codes_RKTC)[:num_layers],
            scales=array(self.scales_RKTG)[:num_layers],
        )
