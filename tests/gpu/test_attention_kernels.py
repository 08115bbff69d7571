"""The attention kernels against fp64 attention under the dense mask, forward and every gradient.

In bf16 the kernels may be off by what plain bf16 attention is off, and a little: ‖ours − truth‖ ≤ ‖plain − truth‖ + ε.
In fp32, where the kernels use no tf32, by a few roundings of sums over ≤ 2000 terms: 5e-6 of the tensor's norm.
"""

import pytest
import torch
from torch import Tensor

from benchmarks.synthetic import lay_out
from train.attention import block_attention, block_mask, masked_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

EPSILON = 3e-4  # of the tensor's norm; bf16 rounds to 2e-3
DEVICE = torch.device("cuda", 0)
DOCUMENTS = {
    "one": [1024],
    "several and padding": [100, 300, 5, 1, 518],
    "one token each": [1] * 1024,
    "hundreds": [4] * 256,
    "nearly empty": [3],
    "none": [],
}


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


def inputs(dtype: torch.dtype, *, rows: int, blocks: int, slots: int, tokens: int, heads: int, kv: int, dim: int):
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(rows, blocks, slots, heads, dim), (rows, tokens, kv, dim), (rows, tokens, kv, dim)]
    shapes += [(rows, blocks, slots, kv, dim)] * 2 + [(rows, blocks, slots, heads, dim)]
    return [torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes]


def with_gradients(function, tensors: list[Tensor], d_output: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, d_output)]


def relative_error(value: Tensor, truth: Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm().clamp(min=1e-30)).item()


def check(dtype: torch.dtype, documents: list[int], window: int | None, is_causal: bool, **shape: int) -> None:
    ranges = [context_ranges(documents, shape["tokens"], shape["blocks"], seed) for seed in range(shape["rows"])]
    start, end = (torch.stack(column).to(DEVICE) for column in zip(*ranges, strict=True))
    *tensors, d_output = inputs(dtype, **shape)
    visibility = {"sliding_window": window, "is_causal": is_causal}
    mask = block_mask(
        context_start_RN=start,
        context_end_RN=end,
        num_context_tokens=shape["tokens"],
        block_size=shape["slots"],
        **visibility,
    )
    ours = with_gradients(lambda *x: block_attention(*x, start, end, **visibility), tensors, d_output)
    plain = with_gradients(lambda *x: masked_attention(*x, mask), tensors, d_output)
    wide = [tensor.double() for tensor in tensors]
    truth = with_gradients(lambda *x: masked_attention(*x, mask), wide, d_output.double())
    names = ("output", "query", "context key", "context value", "block key", "block value")
    for name, a, b, c in zip(names, ours, plain, truth, strict=True):
        allowed = 5e-6 if dtype == torch.float32 else relative_error(b, c) + EPSILON
        assert relative_error(a, c) <= allowed, f"{name}: {relative_error(a, c):.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize(("window", "is_causal"), [(None, False), (None, True), (100, True), (7, False)])
def test_packings(documents: list[int], window: int | None, is_causal: bool) -> None:
    check(
        torch.bfloat16, documents, window, is_causal, rows=2, blocks=48, slots=16, tokens=1024, heads=8, kv=2, dim=128
    )


@pytest.mark.parametrize(
    ("dim", "heads", "kv", "slots"),
    [(64, 9, 3, 7), (64, 4, 4, 2), (128, 8, 1, 32), (128, 6, 2, 10), (256, 8, 1, 16), (256, 4, 2, 32)],
)
def test_shapes(dim: int, heads: int, kv: int, slots: int) -> None:
    check(torch.bfloat16, [200, 312], 64, True, rows=1, blocks=20, slots=slots, tokens=512, heads=heads, kv=kv, dim=dim)


@pytest.mark.parametrize("dim", [64, 128])
def test_fp32(dim: int) -> None:
    check(torch.float32, [200, 312], None, False, rows=1, blocks=20, slots=8, tokens=512, heads=4, kv=2, dim=dim)


def test_two_runs_are_equal_to_the_bit() -> None:
    shape = {"rows": 2, "blocks": 256, "slots": 16, "tokens": 2048, "heads": 8, "kv": 2, "dim": 128}
    *tensors, d_output = inputs(torch.bfloat16, **shape)
    ranges = [context_ranges([2000], 2048, 256, seed) for seed in range(2)]
    start, end = (torch.stack(column).to(DEVICE) for column in zip(*ranges, strict=True))

    def run() -> list[Tensor]:
        return with_gradients(
            lambda *x: block_attention(*x, start, end, sliding_window=None, is_causal=False), tensors, d_output
        )

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))
