"""The attention kernels against fp64 attention under the dense mask, forward and every gradient.

In bf16 the kernels may be off by what plain bf16 attention is off, and a little: ‖ours − truth‖ ≤ ‖plain − truth‖ + ε.
In fp32, where the kernels use no tf32, by a few roundings of sums over ≤ 2000 terms: 5e-6 of the tensor's norm.
"""

import torch
from torch import Tensor

from benchmarks.synthetic import lay_out
from train.attention import block_mask, masked_attention
from train.attention_kernels import block_attention_kernel

EPSILON = 3e-4  # of the tensor's norm; bf16 rounds to 2e-3


def context_ranges(document_lengths: list[int], num_tokens: int, num_blocks: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ranges of random anchors of a row, ascending, then of padding blocks; starts and ends of documents are drawn."""
    document_ids_T, position_ids_T = lay_out(document_lengths, num_tokens, torch.device("cpu"))
    candidates = (document_ids_T >= 0).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    anchors = candidates[order[:num_blocks]].sort().values
    end = torch.zeros(num_blocks, dtype=torch.int32)
    start = torch.zeros(num_blocks, dtype=torch.int32)
    end[: len(anchors)] = anchors
    start[: len(anchors)] = anchors - position_ids_T[anchors]
    return start, end


def inputs(
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int,
    blocks: int,
    slots: int,
    tokens: int,
    heads: int,
    kv: int,
    dim: int,
) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(rows, blocks, slots, heads, dim), (rows, tokens, kv, dim), (rows, tokens, kv, dim)]
    shapes += [(rows, blocks, slots, kv, dim)] * 2 + [(rows, blocks, slots, heads, dim)]
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


def with_gradients(function, tensors: list[Tensor], d_output: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, d_output)]


def relative_error(value: Tensor, truth: Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm().clamp(min=1e-30)).item()


def check(
    device: torch.device, dtype: torch.dtype, documents: list[int], window: int | None, is_causal: bool, **shape: int
) -> None:
    ranges = [context_ranges(documents, shape["tokens"], shape["blocks"], seed) for seed in range(shape["rows"])]
    start, end = (torch.stack(column).to(device) for column in zip(*ranges, strict=True))
    *tensors, d_output = inputs(device, dtype, **shape)
    visibility = {"sliding_window": window, "is_causal": is_causal}
    mask = block_mask(
        context_start_RN=start,
        context_end_RN=end,
        num_context_tokens=shape["tokens"],
        block_size=shape["slots"],
        **visibility,
    )
    ours = with_gradients(
        lambda *x: block_attention_kernel(*x, start, end, window or 0, is_causal)[0], tensors, d_output
    )
    plain = with_gradients(lambda *x: masked_attention(*x, mask), tensors, d_output)
    wide = [tensor.double() for tensor in tensors]
    truth = with_gradients(lambda *x: masked_attention(*x, mask), wide, d_output.double())
    names = ("output", "query", "context key", "context value", "block key", "block value")
    for name, a, b, c in zip(names, ours, plain, truth, strict=True):
        allowed = 5e-6 if dtype == torch.float32 else relative_error(b, c) + EPSILON
        assert relative_error(a, c) <= allowed, f"{name}: {relative_error(a, c):.2e}, allowed {allowed:.2e}"
