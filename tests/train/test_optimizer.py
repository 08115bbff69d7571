"""AdamW over flat buffers against the scalar fp64 oracle; steps that must change nothing; the schedule."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.reference import optimizer as reference
from train.optimizer import Counters, FlatParameters, Schedule, adamw_step

CPU = torch.device("cpu")
SCHEDULE = {"lr": 1e-2, "num_steps": 20, "num_warmup_steps": 4, "final_fraction": 0.1}
SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8, "clip_norm": 1.0}
STATE = ("masters", "first_moments", "second_moments", "weights")


class Module(nn.Module):
    """Parameters whose sizes are no multiples of the alignment."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(5, 7, generator=generator))
        self.norm = nn.Parameter(torch.ones(130))
        self.scalar = nn.Parameter(torch.randn(1, generator=generator))


def flat_parameters(dtype: torch.dtype = torch.float32) -> FlatParameters:
    return FlatParameters(Module(), dtype=dtype, device=CPU)


def random_gradient_sums(step: int, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [scale * torch.randn(shape, generator=generator) for shape in ((5, 7), (130,), (1,))]


def step(
    flat: FlatParameters, counters: Counters, gradients: list[Tensor], *, weight_sum: float, loss_sum=1.0
) -> float:
    """One step on the given gradient sums; returns the norm before clipping."""
    for gradient_sum, gradient in zip(flat.gradient_sums.values(), gradients, strict=True):
        gradient_sum.view.copy_(gradient)
    sums = torch.tensor(loss_sum), torch.tensor(weight_sum)
    norm = adamw_step(flat, counters, *sums, schedule=Schedule(**SCHEDULE), **SETTINGS)
    flat.gradients.zero_()
    return float(norm)


def values(tensors: list[Tensor]) -> list[float]:
    return [value for tensor in tensors for value in tensor.flatten().tolist()]


def test_twenty_steps_equal_the_oracle():
    """Every third step is clipped. After 20 updates of ≤ 1e-2 from values near 1, fp32 leaves errors below 1e-5."""
    flat, counters = flat_parameters(), Counters.zeros(CPU)
    oracle = reference.AdamW(weights=values(flat.parameters), **SETTINGS)
    for k in range(20):
        weight_sum = 10.0 + 3 * k
        gradients = random_gradient_sums(k, 40.0 if k % 3 == 0 else 0.3)
        norm = step(flat, counters, gradients, weight_sum=weight_sum)
        lr = reference.learning_rate(k, **SCHEDULE)
        expected_norm = oracle.step(values(gradients), weight_sum=weight_sum, lr=lr)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        assert (norm > 1.0) == (k % 3 == 0), "both kinds of step are exercised"
        torch.testing.assert_close(values(flat.parameters), oracle.weights, atol=1e-5, rtol=0)
    assert counters.step == counters.num_updates == 20
    assert counters.num_bad == counters.num_empty == 0


@pytest.mark.parametrize(
    ("gradient", "loss_sum", "weight_sum", "counted"),
    [
        (math.nan, 1.0, 5.0, "num_bad"),
        (math.inf, 1.0, 5.0, "num_bad"),
        (-math.inf, 1.0, 5.0, "num_bad"),
        (0.5, math.nan, 5.0, "num_bad"),
        (0.5, math.inf, 5.0, "num_bad"),
        (0.0, 0.0, 0.0, "num_empty"),
        (math.nan, math.nan, 0.0, "num_empty"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_cannot_be_taken_changes_nothing_and_is_counted(gradient, loss_sum, weight_sum, counted, dtype):
    flat, counters = flat_parameters(dtype), Counters.zeros(CPU)
    for k in range(2):
        step(flat, counters, random_gradient_sums(k, 1.0), weight_sum=3.0)
    before = {name: getattr(flat, name).clone() for name in STATE}
    gradients = random_gradient_sums(2, 1.0 if weight_sum else 0.0)
    gradients[0][1, 2] = gradient
    step(flat, counters, gradients, weight_sum=weight_sum, loss_sum=loss_sum)
    for name in STATE:
        assert torch.equal(getattr(flat, name), before[name]), name
    expected = {"step": 3, "num_updates": 2, "num_bad": 0, "num_bad_in_a_row": 0, "num_empty": 0, counted: 1}
    expected["num_bad_in_a_row"] = expected["num_bad"]
    assert {name: int(value) for name, value in counters._asdict().items()} == expected


def test_a_first_step_that_cannot_be_taken_changes_nothing():
    flat, counters = flat_parameters(), Counters.zeros(CPU)
    before = flat.masters.clone()
    step(flat, counters, random_gradient_sums(0, 0.0), weight_sum=0.0, loss_sum=0.0)
    step(flat, counters, random_gradient_sums(0, math.nan), weight_sum=1.0)
    assert torch.equal(flat.masters, before)
    assert (flat.first_moments == 0).all()
    assert (flat.second_moments == 0).all()


def test_training_goes_on_after_a_skipped_step():
    """The bias correction counts updates, the schedule counts steps."""
    flat, counters = flat_parameters(), Counters.zeros(CPU)
    oracle = reference.AdamW(weights=values(flat.parameters), **SETTINGS)
    for k in range(8):
        gradients = random_gradient_sums(k, math.nan if k in (0, 3, 4) else 1.0)
        step(flat, counters, gradients, weight_sum=2.0)
        oracle.step(values(gradients), weight_sum=2.0, lr=reference.learning_rate(k, **SCHEDULE))
    torch.testing.assert_close(values(flat.parameters), oracle.weights, atol=1e-5, rtol=0)
    assert (counters.step, counters.num_updates, counters.num_bad) == (8, 5, 3)


def test_bad_steps_in_a_row_start_again_after_a_good_one():
    flat, counters = flat_parameters(), Counters.zeros(CPU)
    in_a_row = []
    for scale in (math.nan, math.nan, 1.0, math.nan):
        step(flat, counters, random_gradient_sums(0, scale), weight_sum=1.0)
        in_a_row.append(int(counters.num_bad_in_a_row))
    assert in_a_row == [1, 2, 0, 1]


def test_a_gradient_of_zero_is_a_step():
    flat, counters = flat_parameters(), Counters.zeros(CPU)
    before = flat.masters.clone()
    assert step(flat, counters, random_gradient_sums(0, 0.0), weight_sum=2.0) == 0.0
    assert torch.equal(flat.masters, before)
    assert counters.num_updates == 1


def test_masters_keep_what_bf16_would_lose():
    """200 updates of 1e-4 each move a norm of 1.0, whose neighbours in bf16 are 2^-8 and 2^-7 away."""
    flat, counters = flat_parameters(torch.bfloat16), Counters.zeros(CPU)
    schedule = Schedule(lr=1e-4, num_steps=200, num_warmup_steps=0, final_fraction=1.0)
    for _ in range(200):
        flat.gradients.fill_(1.0)
        adamw_step(flat, counters, torch.tensor(1.0), torch.tensor(1.0), schedule=schedule, **SETTINGS)
    assert {tensor.dtype for tensor in flat.state().values()} == {torch.float32}
    norm = flat.parameters[1]
    assert norm.dtype == torch.bfloat16
    torch.testing.assert_close(norm, torch.full_like(norm, 1 - 200 * 1e-4), atol=2**-8, rtol=0)
    assert torch.equal(flat.weights, flat.masters.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_views_of_the_flat_weights(dtype):
    module = Module()
    before = [p.detach().clone() for p in module.parameters()]
    flat = FlatParameters(module, dtype=dtype, device=CPU)
    for parameter, value in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, value.to(dtype))
        assert parameter.untyped_storage().data_ptr() == flat.weights.untyped_storage().data_ptr()
    flat.masters.fill_(0.25)
    flat.refresh_weights()
    assert all((parameter == 0.25).all() for parameter in module.parameters())


@pytest.mark.parametrize(
    "schedule",
    [
        SCHEDULE,
        {"lr": 6e-4, "num_steps": 1000, "num_warmup_steps": 40, "final_fraction": 0.1},
        {"lr": 1.0, "num_steps": 10, "num_warmup_steps": 0, "final_fraction": 0.0},
        {"lr": 1.0, "num_steps": 1, "num_warmup_steps": 0, "final_fraction": 0.1},
        {"lr": 1.0, "num_steps": 3, "num_warmup_steps": 3, "final_fraction": 0.1},
    ],
)
def test_schedule_equals_the_oracle(schedule):
    steps = range(schedule["num_steps"])
    own = [float(Schedule(**schedule).learning_rate(torch.tensor(k))) for k in steps]
    assert own == pytest.approx([reference.learning_rate(k, **schedule) for k in steps], rel=1e-6, abs=1e-9)


def test_schedule_warms_up_peaks_and_ends_where_it_says():
    schedule = Schedule(lr=6e-4, num_steps=100, num_warmup_steps=4, final_fraction=0.1)
    rates = [float(schedule.learning_rate(torch.tensor(k))) for k in range(100)]
    assert rates[:5] == pytest.approx([1.5e-4, 3e-4, 4.5e-4, 6e-4, 6e-4])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[99] == pytest.approx(6e-5)
