"""Checkpoints: directories written beside and renamed into place, with `latest` pointing at the newest.

- checkpoints/step-N/model.safetensors, config.json: the drafter, as serving engines load it (bf16)
- checkpoints/step-N/state/: what an exact continuation needs: masters, moments, their basis and checksums, counters

Everything is unsharded, so a run continues on another number of ranks.
"""

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
from train.trainer import Trainer

CHECKPOINTS_DIRECTORY = "checkpoints"
LATEST_LINK = "latest"
STATE_FILE = "state/state.safetensors"
COUNTERS_FILE = "state/counters.json"
CHECKSUMS = "crc32c"  # key of the counters file: of each tensor of the state file, hex. 36 GB of state take seconds
BASIS = "basis"  # key of the state file's metadata: of the features that fc's masters and moments are for


def save_checkpoint(run: Path, config: RunConfig, trainer: Trainer) -> Path:
    """Write the checkpoint of the step that the trainer has reached, and drop old ones. Only the first rank calls."""
    values = {name: int(counter) for name, counter in trainer.step.counters._asdict().items()}
    checkpoints = run / CHECKPOINTS_DIRECTORY
    directory = checkpoints / f"step-{values['step']}"
    if directory.exists():
        return directory
    _drop(checkpoints.glob(".step-*"))  # what a crash left
    beside = checkpoints / f".{directory.name}"
    try:
        (beside / "state").mkdir(parents=True)
        export_drafter(beside, trainer.flat.masters_by_name, config, exported_config(config, trainer.head))
        state = {name: tensor.cpu() for name, tensor in trainer.flat.state().items()}
        save_file(state, beside / STATE_FILE, metadata={BASIS: basis(config.cache.codec)})
        checksums = {name: _checksum(tensor) for name, tensor in state.items()}
        write_json(beside / COUNTERS_FILE, sealed({**values, CHECKSUMS: checksums}))
        sync_tree(beside)
        os.rename(beside, directory)
        _point_latest_at(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise RunError(f"{directory} could not be written: {error}; the checkpoints before it are intact") from error
    _drop(_by_step(checkpoints)[: -config.train.keep_checkpoints])
    return directory


def latest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint, or None when the run has none. `latest` is for people: a crash may leave it behind."""
    return next(iter(reversed(_by_step(run / CHECKPOINTS_DIRECTORY))), None)


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
    older = [other for other in _by_step(checkpoint.parent) if other != checkpoint]
    if not older:
        return RunError(f"{reason}; there is no other checkpoint: begin another run with --run")
    return RunError(f"{reason}; remove {checkpoint} to continue from {older[-1].name}")


def _point_latest_at(directory: Path) -> None:
    beside = directory.parent / f".{LATEST_LINK}.tmp"
    beside.unlink(missing_ok=True)
    beside.symlink_to(directory.name)
    os.rename(beside, directory.parent / LATEST_LINK)
    sync_directory(directory.parent)


def _by_step(checkpoints: Path) -> list[Path]:
    found = {path: re.fullmatch("step-([0-9]+)", path.name) for path in checkpoints.glob("step-*") if path.is_dir()}
    return sorted((path for path, match in found.items() if match), key=lambda path: int(found[path][1]))


def _drop(directories: Iterable[Path]) -> None:
    for directory in directories:
        try:
            shutil.rmtree(directory)
        except OSError as error:
            raise RunError(f"{directory} could not be removed: {error}; the newest checkpoint is intact") from error
