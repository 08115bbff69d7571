"""A run that begins with the weights of another drafter (`train.init_from`, `--init-from`) instead of random ones.

They come from a directory in the published layout, or from the latest checkpoint of a run, which is one, in bf16. Only
weights are taken: moments, counters and the learning rate's schedule begin anew. Nothing of it is read again when the
run is resumed.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shards.config import shown
from shards.durable import write_json
from shards.errors import UsageError
from shards.record import FileRecord
from train.config import RunConfig
from train.export import WEIGHTS_FILE, from_target_basis
from train.published import DraftCheckpoint
from train.records import latest_checkpoint
from train.rundir import writing

START_FILE = "start.json"

FIXED = ("num_layers", "target_layer_ids", "num_attention_heads", "num_key_value_heads", "head_dim")
FIXED += ("intermediate_size", "rope_theta", "rms_norm_eps", "attention_bias")
MAY_CHANGE = ("block_size", "resolved_layer_types", "sliding_window", "is_causal")  # in training on


def start_notes(config: RunConfig) -> list[str]:
    """What the drafter to start from was trained otherwise than this run will; raise UsageError if it can't be used."""
    if config.train.init_from is None:
        return []
    checkpoint = read_start(config)
    target = config.target
    fixed = _drafter_pairs(checkpoint, config, FIXED) | {
        "target.hidden_size": (checkpoint.hidden_size, target.hidden_size),
        "target.num_layers": (checkpoint.num_target_layers, target.num_layers),
        "target.vocab_size": (checkpoint.vocab_size, target.vocab_size),
    }
    for key, (start, run) in fixed.items():
        if start != run:
            raise UsageError(
                f"{checkpoint.directory} has {key} = {shown(start)}, this run has {shown(run)}: configure the drafter "
                "that --init-from names, or leave it out"
            )
    checkpoint.check_weights()
    free = _drafter_pairs(checkpoint, config, MAY_CHANGE)
    free["target.mask_token_id"] = (checkpoint.mask_token_id, target.mask_token_id)
    return [
        f"{checkpoint.directory} was trained with {key} = {shown(start)}, this run has {shown(run)}"
        for key, (start, run) in free.items()
        if start != run
    ]


def start_weights(config: RunConfig) -> dict[str, Tensor]:
    """The weights to start from as this run's masters: fp32, by parameter, for features in the basis of the cache."""
    return from_target_basis(read_start(config).load_weights(torch.device("cpu"), torch.float32), config)


def record_start(run: Path, config: RunConfig) -> None:
    """Write down which weights a run began with: their directory may change."""
    directory = read_start(config).directory
    file = FileRecord.of(directory / WEIGHTS_FILE)
    with writing(run / START_FILE):
        write_json(run / START_FILE, {"directory": str(directory.resolve()), "sha256": file.sha256})


def read_start(config: RunConfig) -> DraftCheckpoint:
    """The config of the drafter that `train.init_from` names."""
    directory = Path(str(config.train.init_from))
    return DraftCheckpoint.read(latest_checkpoint(directory) or directory)


def _drafter_pairs(checkpoint: DraftCheckpoint, config: RunConfig, keys: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    """By key of the configuration: what the drafter to start from has, what this run has."""
    return {
        f"drafter.{key.removeprefix('resolved_')}": (getattr(checkpoint.drafter, key), getattr(config.drafter, key))
        for key in keys
    }
