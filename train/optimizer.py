"""AdamW over flat buffers: fp32 masters and moments, one fused expression per buffer, no decision on the host.

Every tensor of a kind lies in one buffer, so reduction, norm, clipping and update are each one operation, and a
checkpoint is three tensors. A step without weight or with a non-finite gradient changes nothing and is counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from train.graph import fused
from train.linear import GradientSum, Linear

ALIGNMENT = 128  # elements: parameters start at addresses that matrix kernels like
STATE_NAMES = ("masters", "first_moments", "second_moments")  # what a checkpoint holds in full


def flat_length(parameters: Iterable[Tensor]) -> int:
    """Elements of one flat buffer for tensors of these shapes."""
    return sum(_aligned(parameter.numel()) for parameter in parameters)


def _aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


class FlatParameters:
    """The parameters of a module laid end to end: weights in the working dtype, the rest in fp32.

    Takes over the module's parameters: each becomes a view of `weights`. In fp32 the weights are the masters.
    Gradients are summed over micro-steps in fp32; where a step is one micro-step (`accumulates=False`), they are
    kept in the working dtype, in which they are computed.
    """

    def __init__(
        self, module: nn.Module, *, dtype: torch.dtype, device: torch.device, accumulates: bool = True
    ) -> None:
        names, parameters = zip(*module.named_parameters(), strict=True)
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += _aligned(parameter.numel())
        self.masters = torch.zeros(end, dtype=torch.float32, device=device)
        self.weights = self.masters if dtype == torch.float32 else torch.zeros(end, dtype=dtype, device=device)
        self.accumulates = accumulates
        self.gradients = torch.zeros(end, dtype=torch.float32 if accumulates else dtype, device=device)
        self.first_moments = torch.zeros_like(self.masters)
        self.second_moments = torch.zeros_like(self.masters)

        def views(flat: Tensor) -> list[Tensor]:
            pairs = zip(parameters, offsets, strict=True)
            return [flat[offset : offset + p.numel()].view_as(p) for p, offset in pairs]

        self.parameters = parameters
        gradient_views = dict(zip(names, views(self.gradients), strict=True))
        self.masters_by_name = dict(zip(names, views(self.masters), strict=True))
        for parameter, master, weight in zip(
            parameters, self.masters_by_name.values(), views(self.weights), strict=True
        ):
            master.copy_(parameter.detach())
            parameter.data = weight
        self.gradient_sums = {name: GradientSum(view) for name, view in gradient_views.items()}
        self.linears = [linear for linear in module.modules() if isinstance(linear, Linear)]
        for name, linear in module.named_modules():
            if isinstance(linear, Linear):
                linear.bind(gradient_views[f"{name}.weight"])
        self.refresh_weights()

    def add_gradients(self, loss: Tensor) -> None:
        """Differentiate `loss` and add its gradients to the sums; the first of a step replaces what was there."""
        linear_sums = [gradient_sum for linear in self.linears for gradient_sum in linear.gradient_sums]
        for gradient_sum in (*self.gradient_sums.values(), *linear_sums):
            gradient_sum.is_fresh = not self.accumulates
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        for gradient_sum, gradient in zip(self.gradient_sums.values(), gradients, strict=True):
            if gradient is not None:  # else a linear has added it
                gradient_sum.add(gradient)

    @torch.no_grad()
    def begin_with(self, masters: dict[str, Tensor]) -> None:
        """Take these masters, by name, for a run at its beginning."""
        for name, master in self.masters_by_name.items():
            master.copy_(masters[name])
        self.refresh_weights()

    def refresh_weights(self) -> None:
        """Make the weights those of the masters, rounded."""
        if self.weights is not self.masters:
            self.weights.copy_(self.masters)
        self.refresh_float8()

    def refresh_float8(self) -> None:
        """Make the 8-bit weights, where there are any, those of the weights."""
        for linear in self.linears:
            if linear.float8 is not None:
                linear.refresh_float8()

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in STATE_NAMES}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up from 0, then a cosine to `final_fraction` of `lr` at the last step."""

    lr: float
    num_steps: int
    num_warmup_steps: int
    final_fraction: float

    def learning_rate(self, step: Tensor) -> Tensor:
        """Of the 0-based int64 step, fp32, on the step's device."""
        step = step.double()
        warmup = (step + 1) / max(self.num_warmup_steps, 1)
        progress = (step - self.num_warmup_steps) / max(self.num_steps - 1 - self.num_warmup_steps, 1)
        cosine = 0.5 * (1 + torch.cos(torch.pi * progress.clamp(0, 1)))
        decayed = self.final_fraction + (1 - self.final_fraction) * cosine
        return (self.lr * torch.where(step < self.num_warmup_steps, warmup, decayed)).float()


class Counters(NamedTuple):
    """int64 scalars on the device."""

    step: Tensor  # steps begun, skipped ones included: drives the schedule
    num_updates: Tensor  # steps that changed the weights: drives the bias correction
    num_bad: Tensor  # skipped because something was not finite
    num_bad_in_a_row: Tensor
    num_empty: Tensor  # skipped because no slot had weight

    @classmethod
    def zeros(cls, device: torch.device) -> "Counters":
        return cls(*torch.zeros(len(cls._fields), dtype=torch.int64, device=device).unbind())


def adamw_step(
    flat: FlatParameters,
    counters: Counters,
    loss_sum: Tensor,
    weight_sum: Tensor,
    *,
    schedule: Schedule,
    betas: tuple[float, float],
    eps: float,
    clip_norm: float,
) -> Tensor:
    """Scale the summed gradients by 1/Σw, clip to `clip_norm`, update in place; returns the norm before clipping.

    `loss_sum` and `weight_sum` are the reduced Σ w·CE and Σ w. The gradients are left as they are; the caller zeroes
    them. Reference: Loshchilov and Hutter 2019 without decay, i.e. Adam with bias correction.
    """
    norm = torch.linalg.vector_norm(flat.gradients, dtype=torch.float32) / weight_sum
    is_empty = weight_sum == 0
    is_finite = torch.isfinite(norm) & torch.isfinite(loss_sum)
    applies = is_finite & ~is_empty
    scale = torch.clamp(clip_norm / norm, max=1.0) / weight_sum

    num_updates = (counters.num_updates + 1).double()
    first_correction, second_correction = ((1 - beta**num_updates).float() for beta in betas)
    lr = torch.where(applies, schedule.learning_rate(counters.step), 0.0)
    apply_adam(
        flat.masters,
        flat.weights,
        flat.gradients,
        flat.first_moments,
        flat.second_moments,
        applies=applies,
        scale=scale,
        lr=lr,
        betas=betas,
        first_correction=first_correction,
        second_correction=second_correction,
        eps=eps,
    )
    flat.refresh_float8()

    counters.step.add_(1)
    counters.num_updates.add_(applies)
    counters.num_empty.add_(is_empty)
    is_bad = ~is_empty & ~is_finite
    counters.num_bad.add_(is_bad)
    counters.num_bad_in_a_row.add_(1).mul_(is_bad)
    return norm


@fused
def apply_adam(
    masters: Tensor,
    weights: Tensor,
    gradients: Tensor,
    first_moments: Tensor,
    second_moments: Tensor,
    *,
    applies: Tensor,
    scale: Tensor,
    lr: Tensor,
    betas: tuple[float, float],
    first_correction: Tensor,
    second_correction: Tensor,
    eps: float,
) -> None:
    """The elementwise part, over flat fp32 buffers; scalars are 0-d tensors. Where `applies` is False: no change."""
    gradients = torch.where(applies, gradients.float() * scale, 0.0)
    first_moments.lerp_(gradients, (1 - betas[0]) * applies)
    second_moments.lerp_(gradients.square(), (1 - betas[1]) * applies)
    denominator = (second_moments / second_correction).sqrt() + eps
    masters.sub_(lr / first_correction * first_moments / denominator)
    if weights.dtype != masters.dtype:
        weights.copy_(masters)
