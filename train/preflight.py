"""What is checked before a worker starts: the cache against the config, the GPUs, the run directory."""

import importlib.util
from pathlib import Path

import torch

from shards.errors import CacheError, UsageError
from shards.manifest import Manifest
from shards.schema import missing_shards
from train.config import RunConfig
from train.order import RowOrder
from train.rundir import begin_or_continue


def preflight(config: RunConfig, cache: Path, run: Path, *, resume: bool) -> int:
    """Raise UsageError or CacheError for whatever would stop the run; returns its number of steps. Writes nothing."""
    manifest = Manifest.read(cache)
    manifest.check_config(config.target, config.data, config.cache, cache)
    missing = missing_shards(cache, manifest)
    if missing:
        raise CacheError(
            f"{cache} lacks {len(missing)} of {manifest.plan.num_shards} shards, the first is number {min(missing)}: "
            "`make extract` makes those that are missing"
        )
    if manifest.plan.num_train_rows == 0:
        raise CacheError(f"{cache} has no rows to train on, only held-out ones: lower data.holdout_fraction")
    config.train.num_micro_steps(count_processes(config))
    config.gamma  # noqa: B018 - raises when the block size has no default
    begin_or_continue(run, config, resume=resume)
    return RowOrder.of(config, manifest.plan).num_steps(config.train)


def count_processes(config: RunConfig) -> int:
    """Workers on this machine: one for each GPU of train.gpus, or each visible one, or one on the CPU."""
    num_visible = torch.cuda.device_count()
    if num_visible == 0:
        if config.train.gpus is not None:
            raise UsageError(f"train.gpus names GPUs {list(config.train.gpus)}: this machine shows none")
        return 1
    if importlib.util.find_spec("triton") is None:
        raise UsageError("triton is not installed, and training on a GPU needs it: install torch's CUDA build")
    if config.train.gpus is None:
        return num_visible
    absent = [gpu for gpu in config.train.gpus if gpu >= num_visible]
    if absent:
        raise UsageError(f"train.gpus names GPUs {absent}: this machine shows {num_visible}, 0..{num_visible - 1}")
    return len(config.train.gpus)
