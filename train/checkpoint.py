"""Checkpoints: directories written beside and renamed into place; `latest` points at the newest, `best` at the best.

- checkpoints/step-N/model.safetensors, config.json: the drafter, as serving engines load it (bf16)
- checkpoints/step-N/state/: what an exact continuation needs: masters, moments, their basis and checksums, counters

Everything is unsharded, so a run continues on another number of ranks.
The best by held-out acceptance length is kept however old it is.
"""

import math
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import google_crc32c
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shards.durable import sync_directory, sync_tree, write_json
from shards.errors import CacheError, RunError
from shards.manifest import check_seal, read_json, sealed
from train.config import RunConfig
from train.decode import basis
from train.export import export_drafter, exported_config
from train.records import BEST_LINK, CHECKPOINTS_DIRECTORY, LATEST_LINK, by_step
from train.trainer import Trainer

STATE_FILE = "state/state.safetensors"
COUNTERS_FILE = "state/counters.json"
CHECKSUMS = "crc32c"  # key of the counters file: of each tensor of the state file, hex. 36 GB of state take seconds
BASIS = "basis"  # key of the state file's metadata: of the features that fc's masters and moments are for


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint holds besides the large tensors: small, and no part of a device."""

    counters: dict[str, int]
    layout: dict[str, tuple[int, tuple[int, ...]]]  # of the masters: parameter → offset, shape
    served_config: dict[str, Any]
    is_best: bool  # by held-out acceptance length, so far

    @classmethod
    def of(cls, trainer: Trainer, config: RunConfig, *, is_best: bool) -> Self:
        masters = trainer.flat.masters_by_name
        return cls(
            counters={name: int(counter) for name, counter in trainer.step.counters._asdict().items()},
            layout={name: (master.storage_offset(), tuple(master.shape)) for name, master in masters.items()},
            served_config=exported_config(config, trainer.head),
            is_best=is_best,
        )

    @property
    def step(self) -> int:
        return self.counters["step"]

    def masters_by_name(self, masters: Tensor) -> dict[str, Tensor]:
        """Views of the flat masters."""
        return {
            name: masters[offset : offset + math.prod(shape)].view(shape)
            for name, (offset, shape) in self.layout.items()
        }


def write_checkpoint(run: Path, config: RunConfig, state: dict[str, Tensor], contents: Contents) -> Path:
    """Write the checkpoint of a step from its state, which is on the host, and drop old ones.

    Only one process writes to a run.
    """
    checkpoints = run / CHECKPOINTS_DIRECTORY
    directory = checkpoints / f"step-{contents.step}"
    beside = checkpoints / f".{directory.name}"
    try:
        _drop(checkpoints.glob(".step-*"))  # what a crash left
        if not directory.exists():
            (beside / "state").mkdir(parents=True)
            export_drafter(beside, contents.masters_by_name(state["masters"]), config, contents.served_config)
            save_file(state, beside / STATE_FILE, metadata={BASIS: basis(config.cache.codec)})
            checksums = {name: _checksum(tensor) for name, tensor in state.items()}
            write_json(beside / COUNTERS_FILE, sealed({**contents.counters, CHECKSUMS: checksums}))
            sync_tree(beside)
            os.rename(beside, directory)
        _point_at(directory, LATEST_LINK)
        if contents.is_best:
            _point_at(directory, BEST_LINK)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise RunError(f"{directory} could not be written: {error}; the checkpoints before it are intact") from error
    best = (checkpoints / BEST_LINK).resolve().name
    _drop(path for path in by_step(checkpoints)[: -config.train.keep_checkpoints] if path.name != best)
    return directory


def checkpoint_step(checkpoint: Path) -> int:
    return int(read_counters(checkpoint)["step"])


def read_counters(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / COUNTERS_FILE
    try:
        counters = read_json(path)
        if not isinstance(counters, dict):
            raise CacheError(f"{path} holds no object")
        check_seal(counters, path)
    except CacheError as error:
        raise _broken(checkpoint, str(error)) from None
    if checkpoint.name != f"step-{counters['step']}":
        raise _broken(checkpoint, f"{path} is that of step {counters['step']}")
    return counters


def read_state(checkpoint: Path) -> tuple[dict[str, Tensor], str | None]:
    """Masters and moments, and the basis they are in; raises RunError unless all is as it was saved."""
    path, checksums = checkpoint / STATE_FILE, read_counters(checkpoint)[CHECKSUMS]
    try:
        with safe_open(path, "pt") as file:
            found_basis = (file.metadata() or {}).get(BASIS)
        tensors = load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise _broken(checkpoint, f"{path} cannot be read: {error}") from None
    if tensors.keys() != checksums.keys():
        raise _broken(checkpoint, f"{path} has the tensors {sorted(tensors)}, expected {sorted(checksums)}")
    for name, tensor in tensors.items():
        if (found := _checksum(tensor)) != checksums[name]:
            raise _broken(checkpoint, f"{path}: the crc32c of {name} is {found}, expected {checksums[name]}")
    return tensors, found_basis


def load_checkpoint(checkpoint: Path, config: RunConfig, trainer: Trainer) -> None:
    """Restore masters, moments and counters in place, and the weights from the masters."""
    path, flat = checkpoint / STATE_FILE, trainer.flat
    tensors, found_basis = read_state(checkpoint)
    codec = config.cache.codec
    if found_basis != basis(codec):
        raise RunError(
            f"{path} has weights for features in the {found_basis} basis, and the cache's codec, {codec!r}, gives them "
            f"in the {basis(codec)} one: AdamW's state can't be carried over; begin another run"
        )
    found, expected = ({name: _layout(tensor) for name, tensor in state.items()} for state in (tensors, flat.state()))
    if found != expected:
        raise RunError(f"{path} has {found}, this drafter has {expected}: it is the state of another drafter")
    for name, tensor in flat.state().items():
        tensor.copy_(tensors[name])
    flat.refresh_weights()
    values = read_counters(checkpoint)
    for name, counter in trainer.step.counters._asdict().items():
        counter.copy_(torch.tensor(values[name]))


def _checksum(tensor: Tensor) -> str:
    return f"{google_crc32c.value(tensor.flatten().view(torch.uint8).numpy()):08x}"


def _layout(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _broken(checkpoint: Path, reason: str) -> RunError:
    """The error that says how to go on without `checkpoint`, the newest one."""
    older = [other for other in by_step(checkpoint.parent) if other != checkpoint]
    if not older:
        return RunError(f"{reason}; there is no other checkpoint: begin another run with --run")
    return RunError(f"{reason}; remove {checkpoint} to continue from {older[-1].name}")


def _point_at(directory: Path, link: str) -> None:
    beside = directory.parent / f".{link}.tmp"
    beside.unlink(missing_ok=True)
    beside.symlink_to(directory.name)
    os.rename(beside, directory.parent / link)
    sync_directory(directory.parent)


def _drop(directories: Iterable[Path]) -> None:
    for directory in directories:
        try:
            shutil.rmtree(directory)
        except OSError as error:
            raise RunError(f"{directory} could not be removed: {error}; the newest checkpoint is intact") from error
