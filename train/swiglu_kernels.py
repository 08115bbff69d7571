"""SwiGLU in Triton: one pass over memory in each direction. Compiled from torch, the backward pass takes two."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 1024  # columns of a program


@triton.jit
def _forward_kernel(gate_up, output, width, PIECE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    exists = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=exists).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=exists).to(tl.float32)
    tl.store(output + row * width + column, (gate * tl.sigmoid(gate) * up).to(output.dtype.element_ty), mask=exists)


@triton.jit
def _gradient_kernel(gate_up, d_output, d_gate_up, width, PIECE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    exists = column < width
    at_gate = row * 2 * width + column
    gate = tl.load(gate_up + at_gate, mask=exists).to(tl.float32)
    up = tl.load(gate_up + at_gate + width, mask=exists).to(tl.float32)
    d_product = tl.load(d_output + row * width + column, mask=exists).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = d_product * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_up = d_product * gate * sigmoid
    tl.store(d_gate_up + at_gate, d_gate.to(d_gate_up.dtype.element_ty), mask=exists)
    tl.store(d_gate_up + at_gate + width, d_up.to(d_gate_up.dtype.element_ty), mask=exists)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):  # type: ignore[override]
        ctx.save_for_backward(gate_up)
        output = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        _forward_kernel[_grid(output)](gate_up, output, output.shape[-1], PIECE=PIECE)
        return output

    @staticmethod
    def backward(ctx, d_output):  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        d_output, d_gate_up = d_output.contiguous(), torch.empty_like(gate_up)
        _gradient_kernel[_grid(d_output)](gate_up, d_output, d_gate_up, d_output.shape[-1], PIECE=PIECE)
        return d_gate_up


def swiglu_kernel(gate_up: Tensor) -> Tensor:
    """Gates and values side by side, contiguous [..., 2·I] → silu(gate)·value, [..., I]; rounded once."""
    return _SwiGLU.apply(gate_up)


def _grid(output: Tensor) -> tuple[int, int]:
    width = output.shape[-1]
    return output.numel() // width, triton.cdiv(width, PIECE)
