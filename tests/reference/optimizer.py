"""AdamW without decay, clipping and the schedule, one scalar at a time in float64."""

import math
from dataclasses import dataclass, field


def learning_rate(step: int, *, lr: float, num_steps: int, num_warmup_steps: int, final_fraction: float) -> float:
    """Of the 0-based step: linear up to `lr`, reached at the last warm-up step; then a cosine that ends at the last."""
    if step < num_warmup_steps:
        return lr * (step + 1) / num_warmup_steps
    last = num_steps - 1
    progress = (step - num_warmup_steps) / (last - num_warmup_steps) if last > num_warmup_steps else 0.0
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return lr * (final_fraction + (1 - final_fraction) * cosine)


@dataclass
class AdamW:
    """State of one run. `step` takes the unnormalised gradient sums of the global step."""

    weights: list[float]
    betas: tuple[float, float]
    eps: float
    clip_norm: float
    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    num_updates: int = 0

    def __post_init__(self) -> None:
        self.first = [0.0] * len(self.weights)
        self.second = [0.0] * len(self.weights)

    def step(self, gradient_sums: list[float], *, weight_sum: float, lr: float) -> float | None:
        """Update in place; returns the norm before clipping, or None for a step that must change nothing."""
        if weight_sum == 0 or not all(map(math.isfinite, gradient_sums)):
            return None
        gradients = [value / weight_sum for value in gradient_sums]
        norm = math.sqrt(sum(value * value for value in gradients))
        if norm > self.clip_norm:
            gradients = [value * self.clip_norm / norm for value in gradients]
        self.num_updates += 1
        for i, gradient in enumerate(gradients):
            self.first[i] = self.betas[0] * self.first[i] + (1 - self.betas[0]) * gradient
            self.second[i] = self.betas[1] * self.second[i] + (1 - self.betas[1]) * gradient**2
            first = self.first[i] / (1 - self.betas[0] ** self.num_updates)
            second = self.second[i] / (1 - self.betas[1] ** self.num_updates)
            self.weights[i] -= lr * first / (math.sqrt(second) + self.eps)
        return norm
