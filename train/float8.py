"""Matrices in 8-bit floating point (e4m3), for products at twice the rate of bf16.

A matrix is kept twice, as it lies and transposed, because the products of a linear layer need both: rows of x and W
in the forward pass, of d_output and Wᵀ for the input's gradient, of d_outputᵀ and xᵀ for the weight's. Every row of
either has a scale of its own, its largest magnitude over e4m3's 448, so that an outlier costs its row alone. All is
computed on the device; e4m3 rounds to 2⁻⁴ of a value, and sums are fp32.
"""

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3_MAX = 448.0


class Float8:
    """values · scales ≈ a matrix [M, I], and transposed."""

    def __init__(self, values_MI: Tensor, scales_M1: Tensor, values_IM: Tensor, scales_I1: Tensor) -> None:
        self.values_MI, self.scales_M1 = values_MI, scales_M1
        self.values_IM, self.scales_I1 = values_IM, scales_I1

    @classmethod
    def of(cls, matrix_MI: Tensor) -> Self:
        rows, columns = matrix_MI.shape
        device = matrix_MI.device
        float8 = cls(
            torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(rows, 1, dtype=torch.float32, device=device),
            torch.empty(columns, rows, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(columns, 1, dtype=torch.float32, device=device),
        )
        float8.refresh(matrix_MI)
        return float8

    def refresh(self, matrix_MI: Tensor) -> None:
        """Take over the values of a matrix of the same shape, whose rows are contiguous."""
        rows, columns = matrix_MI.shape
        largest = torch.zeros(rows + columns, dtype=torch.int32, device=matrix_MI.device)  # bits of fp32 ≥ 0
        matrix = (matrix_MI, matrix_MI.stride(0), rows, columns, largest)
        _largest_kernel[triton.cdiv(rows, 128), triton.cdiv(columns, 128)](*matrix, TILE=128, num_warps=4)
        _cast_kernel[triton.cdiv(rows, 64), triton.cdiv(columns, 64)](
            *matrix, self.values_MI, self.scales_M1, self.values_IM, self.scales_I1, E4M3_MAX, TILE=64, num_warps=4
        )

    @property
    def rows(self) -> "Scaled":
        return Scaled(self.values_MI, self.scales_M1)

    @property
    def columns(self) -> "Scaled":
        """The rows of the transpose."""
        return Scaled(self.values_IM, self.scales_I1)


class Scaled(NamedTuple):
    """Rows of e4m3 values, each times its scale."""

    values_MK: Tensor
    scales_M1: Tensor

    def part(self, first: int, end: int | None = None) -> "Scaled":
        return Scaled(self.values_MK[first:end], self.scales_M1[first:end])

    def without_columns_before(self, first: int) -> "Scaled":
        return Scaled(self.values_MK[:, first:], self.scales_M1)


def multiply(a: Scaled, b: Scaled, *, is_fast: bool, **out: Tensor) -> Tensor:
    """A·Bᵀ in bf16, [M, K] and [N, K] to [M, N].

    `is_fast` lets the tensor cores sum with 14 bits: for outputs, not for gradients.
    """
    return torch._scaled_mm(
        a.values_MK,
        b.values_MK.t(),
        a.scales_M1,
        b.scales_M1.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=is_fast,
        **out,
    )


@triton.jit
def _load_tile(matrix, stride, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None].to(tl.int64) * stride + column[None, :]
    return tl.load(matrix + at, mask=exists, other=0.0).to(tl.float32), row, column, exists


@triton.jit
def _largest_kernel(matrix, stride, rows, columns, largest, TILE: tl.constexpr):
    """The largest magnitude of every row, then of every column. A maximum is the same in any order."""
    x, row, column, _ = _load_tile(matrix, stride, rows, columns, TILE)
    magnitude = tl.where(x == x, tl.abs(x), float("inf"))  # what is not a number makes its scale infinite
    tl.atomic_max(largest + row, tl.max(magnitude, 1).to(tl.int32, bitcast=True), mask=row < rows)
    tl.atomic_max(largest + rows + column, tl.max(magnitude, 0).to(tl.int32, bitcast=True), mask=column < columns)


@triton.jit
def _cast_kernel(
    matrix, stride, rows, columns, largest, by_row, row_scales, by_column, column_scales, limit,
    TILE: tl.constexpr,
):  # fmt: skip
    x, row, column, exists = _load_tile(matrix, stride, rows, columns, TILE)
    row_largest = tl.load(largest + row, mask=row < rows, other=0).to(tl.float32, bitcast=True)
    column_largest = tl.load(largest + rows + column, mask=column < columns, other=0).to(tl.float32, bitcast=True)
    row_scale = tl.where(row_largest > 0, row_largest / limit, 1.0)
    column_scale = tl.where(column_largest > 0, column_largest / limit, 1.0)
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(by_row + at, (x / row_scale[:, None]).to(by_row.dtype.element_ty), mask=exists)
    at = column[:, None].to(tl.int64) * rows + row[None, :]
    transposed = tl.trans(x / column_scale[None, :])
    tl.store(by_column + at, transposed.to(by_column.dtype.element_ty), mask=tl.trans(exists))
    if tl.program_id(1) == 0:
        tl.store(row_scales + row, row_scale, mask=row < rows)
    if tl.program_id(0) == 0:
        tl.store(column_scales + column, column_scale, mask=column < columns)
