"""The order of rows: global, a pure function of (seed, epoch, number of rows), the same for any number of ranks."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch

from shards.manifest import Plan
from shards.sections import TrainConfig
from train.anchors import POSITION_BITS, mix
from train.config import RunConfig

NO_ROW = -1  # fills the last step of an epoch: a row without supervised tokens


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """Step k takes the next `rows_per_step` rows of its epoch's permutation; rank r every W-th of them."""

    num_rows: int
    rows_per_step: int
    seed: int

    @classmethod
    def of(cls, config: RunConfig, plan: Plan) -> Self:
        return cls(num_rows=plan.num_train_rows, rows_per_step=config.train.rows_per_step, seed=config.train.seed)

    def num_steps(self, settings: TrainConfig) -> int:
        """Steps of the whole run."""
        of_epochs = self.steps_per_epoch * settings.epochs
        return of_epochs if settings.max_steps is None else min(of_epochs, settings.max_steps)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_rows // self.rows_per_step)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def step_rows(self, step: int) -> list[int]:
        """The rows of one step, NO_ROW where the epoch has run out."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.rows_per_step
        rows = epoch_permutation(self.num_rows, self.seed, epoch)[start : start + self.rows_per_step]
        return rows + [NO_ROW] * (self.rows_per_step - len(rows))

    def micro_steps(self, step: int, *, rank: int, world_size: int, rows_per_micro_step: int) -> list[list[int]]:
        """What one rank reads in one step: a list of rows for each micro-step."""
        rows = self.step_rows(step)[rank::world_size]
        return [rows[i : i + rows_per_micro_step] for i in range(0, len(rows), rows_per_micro_step)]


@lru_cache(maxsize=2)
def epoch_permutation(num_rows: int, seed: int, epoch: int) -> list[int]:
    """Rows 0..num_rows−1 in the order of their hashes; the last hashed value is no position, so anchors differ."""
    hashes = mix(seed, epoch, torch.arange(num_rows), 1 << POSITION_BITS)
    return torch.argsort(hashes, stable=True).tolist()
