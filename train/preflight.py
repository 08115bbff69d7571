"""What is checked before a rank begins: the cache against the config, the GPU's needs, the run directory."""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import torch

from shards.errors import CacheError, UsageError
from shards.manifest import Manifest
from shards.schema import missing_shards
from train.checkpoint import checkpoint_step
from train.config import RunConfig
from train.order import RowOrder
from train.rundir import begin_or_continue

KERNEL_HEAD_DIMS = (16, 32, 64, 128, 256)


class Beginning(NamedTuple):
    """Where a run starts and ends."""

    num_steps: int
    checkpoint: Path | None  # None: at its beginning

    @property
    def is_finished(self) -> bool:
        return self.checkpoint is not None and checkpoint_step(self.checkpoint) >= self.num_steps


def preflight(config: RunConfig, cache: Path, run: Path, *, world_size: int, resume: bool) -> Beginning:
    """Raise UsageError or CacheError for whatever would stop the run. Writes nothing, reads no shard."""
    manifest = Manifest.read(cache)
    manifest.check_config(config.target, config.data, config.cache, cache)
    if missing := missing_shards(cache, manifest):
        raise CacheError(
            f"{cache} lacks {len(missing)} of {manifest.plan.num_shards} shards, the first is number {missing[0]}: "
            "`make extract` makes those that are missing"
        )
    if manifest.plan.num_train_rows == 0:
        raise CacheError(f"{cache} has no rows to train on, only held-out ones: lower data.holdout_fraction")
    config.train.num_micro_steps(world_size)
    if torch.cuda.device_count():
        _check_kernels(config)
    return Beginning(
        num_steps=RowOrder.of(config, manifest.plan).num_steps(config.train),
        checkpoint=begin_or_continue(run, config, manifest.identity, resume=resume),
    )


def _check_kernels(config: RunConfig) -> None:
    if importlib.util.find_spec("triton") is None:
        raise UsageError("triton is not installed, and training on a GPU needs it: install torch's CUDA build")
    if config.drafter.head_dim not in KERNEL_HEAD_DIMS:
        raise UsageError(
            f"drafter.head_dim is {config.drafter.head_dim}: on a GPU it must be one of {list(KERNEL_HEAD_DIMS)}"
        )
