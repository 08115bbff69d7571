"""The kernels in Triton's interpreter, on the CPU and at small sizes: `make test-kernels`, which installs triton."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: `make test-kernels` does that")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels are interpreted by `make test-kernels` only", allow_module_level=True)

from train.swiglu_kernels import swiglu_kernel

from tests.kernels.attention import check
from train.float8 import Float8
from train.head import loss_and_gradient
from train.head_kernels import loss_and_float8_gradient, loss_and_gradient_kernel

CPU = torch.device("cpu")
DOCUMENTS = {
    "one": [512],
    "two and padding": [300, 180],
    "one token each": [1] * 512,
    "many": [16] * 32,
    "nearly empty": [3],
    "none": [],
}
SCALINGS = [(1.0, None), (3.0, 30.0), (0.25, 5.0)]  # multiplier and softcap


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize(("window", "is_causal"), [(None, False), (150, True), (5, False)])
def test_attention_of_packings(documents: list[int], window: int | None, is_causal: bool) -> None:
    shape = {"rows": 1, "blocks": 24, "slots": 8, "tokens": 512, "heads": 4, "kv": 2, "dim": 16}
    check(CPU, torch.float32, documents, window, is_causal, **shape)


@pytest.mark.parametrize(
    ("dim", "heads", "kv", "slots"), [(16, 9, 3, 7), (32, 2, 2, 2), (16, 8, 1, 32), (64, 6, 2, 10), (256, 2, 1, 4)]
)
def test_attention_of_shapes(dim: int, heads: int, kv: int, slots: int) -> None:
    shape = {"rows": 2, "blocks": 9, "slots": slots, "tokens": 200, "heads": heads, "kv": kv, "dim": dim}
    check(CPU, torch.float32, [120, 70], 64, True, **shape)


def head_problem(num_rows: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, labels and weights. Of the first row's two largest logits, which are equal, the label is the later."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(num_rows, vocab_size, generator=generator)
    labels = torch.randint(vocab_size, (num_rows,), generator=generator)
    logits[0, 3] = logits[0, 7] = logits[0].max() + 1
    labels[0] = 7
    labels[1] = logits[1].argmax()
    return logits, labels, torch.rand(num_rows, generator=generator)


@pytest.mark.parametrize(("multiplier", "softcap"), SCALINGS)
@pytest.mark.parametrize("vocab_size", [112, 8192, 9008])
def test_head_loss(vocab_size: int, multiplier: float, softcap: float | None) -> None:
    """Against plain torch, which tests/train/test_head.py holds to fp64; exponents of ≤ 30 leave some 30 roundings."""
    logits, labels, weights = head_problem(5, vocab_size)
    expected = loss_and_gradient(logits.clone(), labels, weights, multiplier, softcap, True)
    found = loss_and_gradient_kernel(logits.clone(), labels, weights, multiplier, softcap, True)
    assert found[1].tolist() == expected[1].tolist()
    assert found[1][:2].tolist() == [False, True]
    for ours, theirs in ((found[0], expected[0]), (found[2], expected[2])):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("multiplier", "softcap"), SCALINGS)
def test_head_gradient_in_8_bits(multiplier: float, softcap: float | None) -> None:
    logits, labels, weights = head_problem(5, 9008)
    loss, _, expected = loss_and_gradient(logits.clone(), labels, weights, multiplier, softcap, True)
    own_loss, _, gradient, coefficient = loss_and_float8_gradient(logits, labels, weights, multiplier, softcap)
    found = gradient.values_MK.float() * gradient.scales_M1
    found[torch.arange(5), labels] -= coefficient
    torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=1e-5)
    assert torch.linalg.vector_norm(found - expected) < 0.03 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("shape", [(128, 64), (80, 208), (16, 16)])
def test_scales_of_8_bits(shape: tuple[int, int]) -> None:
    """Not the values: the interpreter rounds wrong where a mantissa carries. A GPU is held to torch's cast."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, shape[0])[:, None]
    x[3], x[:, 5] = 0, 0
    float8 = Float8.of(x)
    for (_, scales), matrix in ((float8.rows, x), (float8.columns, x.t())):
        largest = matrix.abs().amax(1, keepdim=True)
        torch.testing.assert_close(scales, torch.where(largest > 0, largest / 448, 1.0), rtol=1e-7, atol=0)


@pytest.mark.parametrize("shape", [(3, 2 * 16), (2, 5, 2 * 1024), (7, 2 * 1500)])
def test_swiglu(shape: tuple[int, ...]) -> None:
    """Against fp64, by its formula; large gates too, where the sigmoid is 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    gate_up = 30 * torch.randn(shape, generator=generator)
    d_output = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator)
    ours, truth = gate_up.clone().requires_grad_(), gate_up.double().requires_grad_()
    gate, up = truth.chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up
    found = swiglu_kernel(ours)
    found.backward(d_output)
    expected.backward(d_output.double())
    for value, true_value in ((found, expected), (ours.grad, truth.grad)):
        torch.testing.assert_close(value.double(), true_value, rtol=1e-5, atol=1e-4)
