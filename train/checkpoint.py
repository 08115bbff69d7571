"""Checkpoints: directories written beside and renamed into place, with `latest` pointing at the newest.

- checkpoints/step-N/model.safetensors, config.json: the drafter, as serving engines load it (bf16)
- checkpoints/step-N/state/: what an exact continuation needs: masters, moments, their basis, counters

Everything is unsharded, so a run continues on another number of ranks.
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from shards.durable import sync_directory, sync_tree, write_json
from shards.errors import RunError
from train.config import RunConfig
from train.decode import basis
from train.export import export_drafter
from train.trainer import Trainer

CHECKPOINTS_DIRECTORY = "checkpoints"
LATEST_LINK = "latest"
STATE_FILE = "state/state.safetensors"
COUNTERS_FILE = "state/counters.json"
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
        export_drafter(beside, trainer.flat.masters_by_name, config, trainer.head)
        state = {name: tensor.cpu() for name, tensor in trainer.flat.state().items()}
        save_file(state, beside / STATE_FILE, metadata={BASIS: basis(config.cache.codec)})
        write_json(beside / COUNTERS_FILE, values)
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
    try:
        return json.loads((checkpoint / COUNTERS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{checkpoint / COUNTERS_FILE} cannot be read: {error}") from error


def load_checkpoint(checkpoint: Path, config: RunConfig, trainer: Trainer) -> None:
    """Restore masters, moments and counters in place, and the weights from the masters."""
    path, flat = checkpoint / STATE_FILE, trainer.flat
    try:
        with safe_open(path, "pt") as file:
            found_basis = (file.metadata() or {}).get(BASIS)
        tensors = load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    codec = config.cache.codec
    if found_basis != basis(codec):
        raise RunError(
            f"{path} has weights for features in the {found_basis} basis, and the cache's codec, {codec!r}, gives them "
            f"in the {basis(codec)} one: AdamW's state can't be carried over; begin another run"
        )
    for name, tensor in flat.state().items():
        if tensors[name].shape != tensor.shape:
            raise RunError(f"{path} has {name} of {tensors[name].numel()} values, this drafter has {tensor.numel()}")
        tensor.copy_(tensors[name])
    flat.refresh_weights()
    values = read_counters(checkpoint)
    for name, counter in trainer.step.counters._asdict().items():
        counter.copy_(torch.tensor(values[name]))


def _point_latest_at(directory: Path) -> None:
    beside = directory.parent / f".{LATEST_LINK}.tmp"
    beside.unlink(missing_ok=True)
    beside.symlink_to(directory.name)
    os.rename(beside, directory.parent / LATEST_LINK)
    sync_directory(directory.parent)


def _by_step(checkpoints: Path) -> list[Path]:
    return sorted(checkpoints.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def _drop(directories: Iterable[Path]) -> None:
    for directory in directories:
        shutil.rmtree(directory)
