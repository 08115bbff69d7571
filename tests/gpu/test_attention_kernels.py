"""The attention kernels on a GPU, at the shapes of real drafters (tests/kernels/attention.py has the comparison)."""

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    from tests.kernels.attention import check, context_ranges, inputs, with_gradients
    from train.attention import block_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda", 0)
DOCUMENTS = {
    "one": [1024],
    "several and padding": [100, 300, 5, 1, 518],
    "one token each": [1] * 1024,
    "hundreds": [4] * 256,
    "nearly empty": [3],
    "none": [],
}


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize(("window", "is_causal"), [(None, False), (None, True), (100, True), (7, False)])
def test_packings(documents: list[int], window: int | None, is_causal: bool) -> None:
    shape = {"rows": 2, "blocks": 48, "slots": 16, "tokens": 1024, "heads": 8, "kv": 2, "dim": 128}
    check(DEVICE, torch.bfloat16, documents, window, is_causal, **shape)


@pytest.mark.parametrize(
    ("dim", "heads", "kv", "slots"),
    [(64, 9, 3, 7), (64, 4, 4, 2), (128, 8, 1, 32), (128, 6, 2, 10), (256, 8, 1, 16), (256, 4, 2, 32)],
)
def test_shapes(dim: int, heads: int, kv: int, slots: int) -> None:
    shape = {"rows": 1, "blocks": 20, "slots": slots, "tokens": 512, "heads": heads, "kv": kv, "dim": dim}
    check(DEVICE, torch.bfloat16, [200, 312], 64, True, **shape)


@pytest.mark.parametrize("dim", [64, 128])
def test_fp32(dim: int) -> None:
    shape = {"rows": 1, "blocks": 20, "slots": 8, "tokens": 512, "heads": 4, "kv": 2, "dim": dim}
    check(DEVICE, torch.float32, [200, 312], None, False, **shape)


def test_two_runs_are_equal_to_the_bit() -> None:
    shape = {"rows": 2, "blocks": 256, "slots": 16, "tokens": 2048, "heads": 8, "kv": 2, "dim": 128}
    *tensors, d_output = inputs(DEVICE, torch.bfloat16, **shape)
    ranges = [context_ranges([2000], 2048, 256, seed) for seed in range(2)]
    start, end = (torch.stack(column).to(DEVICE) for column in zip(*ranges, strict=True))

    def run() -> list[Tensor]:
        return with_gradients(
            lambda *x: block_attention(*x, start, end, sliding_window=None, is_causal=False), tensors, d_output
        )

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))
