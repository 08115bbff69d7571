"""The run directory: its config, its metrics, and whether a run may begin, continue, or has ended.

- config.json: the resolved configuration
- metrics.jsonl: one line per log interval
- checkpoints/: see train/checkpoint.py
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from shards.config import to_json
from shards.errors import UsageError
from shards.manifest import write_json
from train.checkpoint import checkpoint_step, latest_checkpoint
from train.config import RunConfig

RUN_CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
# What may differ between a run and its continuation: nothing here changes what is learned.
MAY_CHANGE = {
    "target.path",
    "data.files",
    "train.gpus",
    "train.rows_per_micro_step",
    "train.log_every",
    "train.eval_every",
    "train.save_every",
    "train.keep_checkpoints",
    "train.max_bad_steps",
}


def begin_or_continue(run: Path, config: RunConfig, *, resume: bool) -> Path | None:
    """Decide where the run starts: None for its beginning, else the checkpoint to continue from. Writes nothing.

    Raises UsageError when the directory holds something and `resume` is off, or holds a run of another config.
    """
    if not run.exists() or not any(run.iterdir()):
        return None
    if not resume:
        raise UsageError(f"{run} is not empty: --resume continues the run in it, --run names another directory")
    recorded_in = run / RUN_CONFIG_FILE
    if not recorded_in.exists():
        raise UsageError(f"{run} is not empty and holds no run: it has no {RUN_CONFIG_FILE}; --run names another")
    recorded, wanted = json.loads(recorded_in.read_text(encoding="utf-8")), flatten(config)
    for key, value in wanted.items():
        if key not in MAY_CHANGE and recorded.get(key) != value:
            raise UsageError(
                f"{run} was begun with {key} = {recorded.get(key)!r}, the config says {value!r}: "
                "continue with the config it was begun with, or name another run directory"
            )
    return latest_checkpoint(run)


def record_config(run: Path, config: RunConfig) -> None:
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / RUN_CONFIG_FILE, flatten(config))


def flatten(config: RunConfig) -> dict[str, Any]:
    """The whole configuration as section.key → JSON value."""
    sections = {field.name: to_json(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


def finished_step(run: Path) -> int | None:
    """The step of the newest checkpoint, or None when there is none."""
    checkpoint = latest_checkpoint(run)
    return None if checkpoint is None else checkpoint_step(checkpoint)


class MetricsLog:
    """metrics.jsonl, appended line by line; what came after the checkpoint that is continued from is dropped."""

    def __init__(self, run: Path, *, first_step: int) -> None:
        self.path = run / METRICS_FILE
        kept = [line for line in read_metrics(run) if line["step"] <= first_step]
        beside = self.path.with_name(f".{METRICS_FILE}")
        beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(beside, self.path)

    def append(self, line: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's metrics; a last line that was cut short by a crash is left out."""
    path = run / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]
