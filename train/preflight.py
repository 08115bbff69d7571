"""What is checked before a rank begins: the cache against the config, the GPU's needs, the run directory.

What needs no cache is checked before there is one, too: what training would refuse is not worth an extraction.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import torch

from shards.errors import CacheError, UsageError
from shards.manifest import Manifest
from shards.schema import HEAD_CONFIG_FILE, HEAD_FILE, missing_shards
from shards.verify import check_at_a_glance, check_file
from train.checkpoint import checkpoint_step, read_state
from train.config import RunConfig
from train.order import RowOrder
from train.rundir import begin_or_continue

KERNEL_HEAD_DIMS = (16, 32, 64, 128, 256)
FLOAT8_MULTIPLE = 16  # of every dimension of an 8-bit product


class Beginning(NamedTuple):
    """Where a run starts and ends."""

    num_steps: int
    checkpoint: Path | None  # None: at its beginning
    notes: list[str]  # what is not wrong, but may not be meant: a sentence each

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
    _check_machine(config, world_size)
    return Beginning(
        num_steps=RowOrder.of(config, manifest.plan).num_steps(config.train),
        checkpoint=begin_or_continue(run, config, manifest, resume=resume),
        notes=manifest.moved(config.target, config.data),
    )


def preflight_without_cache(config: RunConfig, run: Path, *, world_size: int, resume: bool) -> None:
    """Raise UsageError for whatever would stop the run on any cache that the config describes. Writes nothing."""
    _check_machine(config, world_size)
    begin_or_continue(run, config, None, resume=resume)


def check_files(cache: Path, checkpoint: Path | None) -> None:
    """Raise CacheError for a shard or a target's head, RunError for a checkpoint that training would stumble over.

    For the launcher: once, not in every worker. The head is hashed in full, because it is less than 4 GB, which takes
    seconds, and nothing checks it later; of the shards only sizes and small files are looked at.
    """
    if checkpoint is not None:
        read_state(checkpoint)
    manifest = Manifest.read(cache)
    for name in (HEAD_CONFIG_FILE, HEAD_FILE):
        check_file(cache, name, manifest.checksums.get(name, "none"))
    check_at_a_glance(cache, manifest)


def _check_machine(config: RunConfig, world_size: int) -> None:
    config.train.num_micro_steps(world_size)
    if torch.cuda.device_count():
        _check_kernels(config)
    if config.train.precision == "fp8":
        _check_float8(config)


def _check_float8(config: RunConfig) -> None:
    if not torch.cuda.device_count() or torch.cuda.get_device_capability(0) < (9, 0):
        raise UsageError('train.precision is "fp8", which needs a GPU of the Hopper generation or later: set "bf16"')
    sizes = {
        "target.hidden_size": config.target.hidden_size,
        "target.vocab_size": config.target.vocab_size,
        "drafter.intermediate_size": config.drafter.intermediate_size,
        "cache.row_tokens": config.cache.row_tokens,
        "train.num_anchors × drafter.block_size": config.train.num_anchors * config.drafter.block_size,
    }
    for name, size in sizes.items():
        if size % FLOAT8_MULTIPLE:
            raise UsageError(
                f'{name} is {size}: with train.precision = "fp8" it must be a multiple of {FLOAT8_MULTIPLE}; set "bf16"'
            )


def _check_kernels(config: RunConfig) -> None:
    if importlib.util.find_spec("triton") is None:
        raise UsageError("triton is not installed, and training on a GPU needs it: install torch's CUDA build")
    if config.train.attention == "kernel" and config.drafter.head_dim not in KERNEL_HEAD_DIMS:
        raise UsageError(
            f"drafter.head_dim is {config.drafter.head_dim}: the attention kernel takes {list(KERNEL_HEAD_DIMS)}; "
            'train.attention="torch" takes any'
        )
