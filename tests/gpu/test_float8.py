"""8-bit products on a GPU: the cast against torch's own, products and gradients against fp64, a step against bf16's."""

import pytest
import torch
from torch import Tensor

from benchmarks.step import check_replay_equals_eager
from benchmarks.synthetic import fill_rows
from tests.gpu.test_captured_step import VOCAB_SIZE, fresh_trainer, small_config
from train.head import head_loss
from train.linear import Linear
from train.runtime import compute_on_one_thread_deterministically

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda", 0)
RELATIVE_ERROR = 0.05  # of a product: two factors, each rounded by up to 2⁻⁴, 2⁻⁵·⁸ in the root mean square


@pytest.fixture(autouse=True)
def one_thread() -> None:
    compute_on_one_thread_deterministically()


def outlying(*shape: int, seed: int = 0) -> Tensor:
    """Normal values whose rows and columns differ by a factor of 10^5, with a row and a column of zeros."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=DEVICE)
    x *= torch.logspace(-3, 2, shape[0], device=DEVICE)[:, None]
    x[3], x[:, 5] = 0, 0
    return x.bfloat16()


def relative_error(found: Tensor, truth: Tensor) -> float:
    return (torch.linalg.vector_norm(found.double() - truth) / torch.linalg.vector_norm(truth)).item()


@pytest.mark.parametrize("shape", [(128, 64), (80, 208), (16, 1024)])
def test_every_row_is_cast_as_torch_casts_it(shape):
    from train.float8 import Float8

    x = outlying(*shape)
    float8 = Float8.of(x)
    for (values, scales), matrix in ((float8.rows, x), (float8.columns, x.t())):
        largest = matrix.float().abs().amax(1, keepdim=True)
        expected = torch.where(largest > 0, largest / 448, 1.0)
        torch.testing.assert_close(scales, expected, rtol=1e-6, atol=0)
        cast = (matrix.float() / scales).to(torch.float8_e4m3fn).float()
        differs = values.float() != cast  # only where a quotient lies on the border of two values
        assert differs.float().mean() < 0.01
        assert ((values.float() - cast).abs() <= cast.abs() / 8 + 2.0**-9).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value):
    from train.float8 import Float8, multiply

    x = outlying(32, 64)
    x[7, 9] = value
    product = multiply(Float8.of(x).rows, Float8.of(outlying(16, 64)).rows, is_fast=True)
    assert not torch.isfinite(product[7]).any()
    assert torch.isfinite(product[:7]).all()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["kept", "summed"])
def test_a_linears_products_are_those_of_fp64(first, dtype):
    linear = Linear(192, 64, 32, 32).to(DEVICE, torch.bfloat16)
    generator = torch.Generator(DEVICE).manual_seed(1)
    linear.weight.data = torch.randn(128, 192, generator=generator, device=DEVICE).bfloat16()
    gradient = torch.ones(128, 192, dtype=dtype, device=DEVICE)
    linear.bind(gradient)
    for gradient_sum in linear.gradient_sums:
        gradient_sum.is_fresh = dtype == torch.bfloat16
    linear.refresh_float8()
    x = torch.randn(2, 128, 192, generator=generator, device=DEVICE).bfloat16().requires_grad_()
    output = linear(x, first=first)
    d_output = torch.randn(output.shape, generator=generator, device=DEVICE).bfloat16()
    dx, none = torch.autograd.grad(output, (x, linear.weight), d_output, allow_unused=True)

    assert none is None
    skipped = 64 * first
    wide_x, weight, wide_d = x.double().flatten(0, 1), linear.weight.double()[skipped:], d_output.double().flatten(0, 1)
    assert relative_error(output.flatten(0, 1), wide_x @ weight.t()) < RELATIVE_ERROR
    assert relative_error(dx.flatten(0, 1), wide_d @ weight) < RELATIVE_ERROR
    start = 0 if dtype == torch.bfloat16 else 1
    assert relative_error(gradient[skipped:] - start, wide_d.t() @ wide_x) < RELATIVE_ERROR
    assert (gradient[:skipped] == 1).all()


def test_replay_equals_eager_to_the_bit() -> None:
    trainer = fresh_trainer(small_config(precision="fp8"), DEVICE)
    fill_rows(trainer.rows, [[300, 17, 512, 150]], VOCAB_SIZE, seed=1)
    check_replay_equals_eager(trainer)


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_the_heads_gradient_is_that_of_fp64(softcap):
    from train.float8 import Float8

    generator = torch.Generator(DEVICE).manual_seed(2)
    hidden = torch.randn(48, 64, generator=generator, device=DEVICE).bfloat16().requires_grad_()
    head = torch.randn(1008, 64, generator=generator, device=DEVICE).mul(0.3).bfloat16()
    labels = torch.randint(0, 1008, (48,), generator=generator, device=DEVICE)
    weights = torch.rand(48, generator=generator, device=DEVICE)
    weights[::3] = 0
    options = {"output_multiplier": 1.5, "final_logit_softcapping": softcap}
    result = head_loss(hidden, labels, weights, head, lm_head_float8=Float8.of(head), **options)
    [gradient] = torch.autograd.grad(result.weighted_sum, hidden)

    wide = hidden.detach().double().requires_grad_()
    logits = 1.5 * wide @ head.double().t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = (weights.double() * torch.nn.functional.cross_entropy(logits, labels, reduction="none")).sum()
    [expected] = torch.autograd.grad(loss, wide)
    assert result.weighted_sum.item() == pytest.approx(loss.item(), rel=0.01)
    assert relative_error(gradient, expected) < RELATIVE_ERROR


def test_steps_follow_those_in_bf16():
    losses = {}
    for precision in ("bf16", "fp8"):
        trainer = fresh_trainer(small_config(precision=precision), DEVICE)
        fill_rows(trainer.rows, [[700, 200, 100]], VOCAB_SIZE, seed=1)
        for _ in range(5):
            trainer.step.micro_step(0)
        losses[precision] = trainer.step.metrics.sums[0].item() / trainer.step.metrics.sums[1].item()
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.02)
