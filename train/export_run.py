"""`python -m train export RUN DEST`: the drafter of a run as a directory to give away, with a model card.

A checkpoint of the run is loadable as it is. This takes its two files (or makes fp32 weights from its masters) without
the training state, reads them back, and writes beside them what they are.
"""

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from shards.durable import sync_directory, sync_tree, temporary_beside
from shards.errors import RunError, UsageError
from train.card import CARD_FILE, model_card
from train.checkpoint import COUNTERS_FILE, checkpoint_step, read_state
from train.decode import unrotate_columns
from train.drafter import Drafter, split_projections
from train.export import CONFIG_FILE, FC_WEIGHT, WEIGHTS_FILE
from train.optimizer import FlatParameters
from train.published import DraftCheckpoint
from train.records import CHECKPOINTS_DIRECTORY, latest_checkpoint, read_metrics, read_recorded

DTYPES = ("bf16", "fp32")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m train export", description="Write the drafter of a run, with a model card, to a new directory."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run, of which the latest is taken, or a checkpoint")
    parser.add_argument("dest", type=Path, metavar="DEST", help="the directory to make")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the weights (default: %(default)s)")
    return parser.parse_args(arguments)


def export_run(arguments: argparse.Namespace) -> None:
    """Raise UsageError when there is nothing to export or DEST is taken, RunError when the disk fails."""
    checkpoint, dest = _find_checkpoint(arguments.run), arguments.dest
    if os.path.lexists(dest):
        raise UsageError(f"{dest} is there already: name a directory to make")
    if not dest.absolute().parent.is_dir():
        raise UsageError(f"{dest} can't be made: {dest.absolute().parent} is no directory")
    drafter = DraftCheckpoint.read(checkpoint)
    drafter.check_weights()
    run = checkpoint.parents[1]
    card = model_card(run, read_recorded(run), read_metrics(run), step=checkpoint_step(checkpoint))
    beside = temporary_beside(dest)
    try:
        beside.mkdir()
        if arguments.dtype == "bf16":
            for name in (WEIGHTS_FILE, CONFIG_FILE):
                shutil.copy(checkpoint / name, beside / name)
        else:
            _write_fp32(beside, checkpoint, drafter)
        (beside / CARD_FILE).write_text(card, encoding="utf-8")
        DraftCheckpoint.read(beside).check_weights()
        sync_tree(beside)
        os.rename(beside, dest)
        sync_directory(dest.absolute().parent)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{dest} could not be written: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    print(f"{dest}: the drafter of step {checkpoint_step(checkpoint)} of {run}, in {arguments.dtype}")


def _find_checkpoint(path: Path) -> Path:
    if (path / COUNTERS_FILE).is_file():
        return path.resolve()
    checkpoint = latest_checkpoint(path)
    if checkpoint is None:
        raise UsageError(f"{path} is no run with a checkpoint: it has no {CHECKPOINTS_DIRECTORY}/step-N")
    return checkpoint


def _write_fp32(directory: Path, checkpoint: Path, drafter: DraftCheckpoint) -> None:
    config: dict[str, Any] = json.loads((checkpoint / CONFIG_FILE).read_text(encoding="utf-8"))
    (directory / CONFIG_FILE).write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in _masters(checkpoint, drafter).items()}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})


def _masters(checkpoint: Path, drafter: DraftCheckpoint) -> dict[str, Tensor]:
    """The masters by published name, in the target's basis."""
    state, basis = read_state(checkpoint)
    module = Drafter(drafter.drafter, drafter.hidden_size)
    flat = FlatParameters(module, dtype=torch.float32, device=torch.device("cpu"))
    flat.masters.copy_(state["masters"])
    masters = flat.masters_by_name
    if basis == "rotated":
        masters[FC_WEIGHT] = unrotate_columns(masters[FC_WEIGHT], drafter.hidden_size)
    return split_projections(masters, drafter.drafter)
