"""The run directory: its config, its metrics, and whether a run may begin, continue, or has ended.

- config.json: the resolved configuration
- metrics.jsonl: one line per log interval
- checkpoints/: see train/checkpoint.py
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shards.config import shown, to_json
from shards.durable import write_json
from shards.errors import RunError, UsageError
from shards.manifest import Manifest
from train.checkpoint import CHECKPOINTS_DIRECTORY, LATEST_LINK, latest_checkpoint
from train.config import RunConfig
from train.lock import LOCK_FILE

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
    "train.capture",
    "train.recompute",
    "train.compile_cache",
}
LENGTH = ("train.epochs", "train.max_steps")
Loss = float | int | None  # in a line of metrics: None where nothing was counted


def begin_or_continue(run: Path, config: RunConfig, manifest: Manifest | None, *, resume: bool) -> Path | None:
    """Decide where the run starts: None for its beginning, else the checkpoint to continue from. Writes nothing.

    `manifest` is the cache's; None: there is none yet, so the run is not held against it. Raises UsageError when the
    directory can't be written, holds something and `resume` is off, or holds the run of another config or cache.
    """
    _require_place(run)
    if not run.exists() or all(_is_leftover(path.name) for path in run.iterdir()):
        return None
    if not resume:
        raise UsageError(f"{run} is not empty: --resume continues the run in it, --run names another directory")
    recorded = _read_recorded(run)
    for key, value in record(config, manifest).items():
        begun = recorded.get(key)
        if key not in MAY_CHANGE and begun != value:
            why = "the learning rate's schedule spans the run, whose length is fixed: " if key in LENGTH else ""
            raise UsageError(
                f"{run} was begun with {key} {'unset' if begun is None else f'= {shown(begun)}'}, now it is "
                f"{'unset' if value is None else shown(value)}: {why}"
                "continue with what it was begun with, or name another run directory"
            )
    lines, checkpoint = read_metrics(run), latest_checkpoint(run)
    if checkpoint is None and _had_checkpoint(run, recorded, lines):
        raise UsageError(
            f"{run} has metrics up to step {lines[-1]['step'] if lines else 0} and its checkpoints are gone: put them "
            f"back into {run / CHECKPOINTS_DIRECTORY}, or begin another run with --run"
        )
    return checkpoint


def _require_place(run: Path) -> None:
    """Raise UsageError unless `run` is a directory that can be written to, or one can be made there."""
    whole = run.absolute()
    place = next(path for path in (whole, *whole.parents) if os.path.lexists(path))
    if not place.is_dir() or not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(f"{place} is not a directory that can be written to: --run names another")
    for path in (whole, *(place / name for name in whole.relative_to(place).parts)):
        try:
            path.lstat()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UsageError(f"{run} can't be made: {error.strerror}; --run names another directory") from None


def _is_leftover(name: str) -> bool:
    """Whether a crash may have left a file of this name before a run had written its first one."""
    return name == LOCK_FILE or name.startswith((f".{RUN_CONFIG_FILE}.", f".{METRICS_FILE}"))


def _had_checkpoint(run: Path, recorded: dict[str, Any], lines: list[dict[str, Any]]) -> bool:
    """Whether a checkpoint was saved; a run that was killed before its first one begins again.

    The line of a step is written before its checkpoint is.
    """
    save_every = recorded.get("train.save_every")
    is_past_first = bool(lines) and (not isinstance(save_every, int) or lines[-1]["step"] > save_every)
    return is_past_first or (run / CHECKPOINTS_DIRECTORY / LATEST_LINK).is_symlink()


def record_config(run: Path, config: RunConfig, manifest: Manifest) -> None:
    path = run / RUN_CONFIG_FILE
    with writing(path):
        run.mkdir(parents=True, exist_ok=True)
        write_json(path, record(config, manifest))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the disk does not take raises RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error.strerror}; make room or mend the disk, then --resume continues from "
            "the last checkpoint"
        ) from error


def record(config: RunConfig, manifest: Manifest | None) -> dict[str, Any]:
    """What makes a run what it is: the whole configuration, and of what its cache was made, in which rows."""
    identity = to_json(manifest.identity) | {"plan": manifest.plan_hash} if manifest else {}
    return flatten(config) | {f"identity.{key}": value for key, value in identity.items()}


def _read_recorded(run: Path) -> dict[str, Any]:
    path = run / RUN_CONFIG_FILE
    if not path.exists():
        raise UsageError(f"{run} is not empty and holds no run: it has no {RUN_CONFIG_FILE}; --run names another")
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}; --run names another directory") from None
    if not isinstance(recorded, dict):
        raise UsageError(f"{path} is not the configuration of a run; --run names another directory")
    return recorded


def flatten(config: RunConfig) -> dict[str, Any]:
    """The whole configuration as section.key → JSON value."""
    sections = {field.name: to_json(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


class MetricsLog:
    """metrics.jsonl, appended line by line; what came after the checkpoint that is continued from is dropped."""

    def __init__(self, run: Path, *, first_step: int) -> None:
        self.path = run / METRICS_FILE
        kept = [line for line in read_metrics(run) if line["step"] <= first_step]
        beside = self.path.with_name(f".{METRICS_FILE}")
        with writing(self.path):
            beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(beside, self.path)

    def append(self, line: dict[str, Any]) -> None:
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's metrics; a last line that was cut short by a crash is left out."""
    path = run / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}; --run names another directory") from None
    return [_parse_line(line, f"{path} line {i}") for i, line in enumerate(lines[:-1], start=1)]


def _parse_line(text: str, where: str) -> dict[str, Any]:
    """A line of metrics, with the two keys that are read again in their types."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict) or type(line.get("step")) is not int or not isinstance(line.get("loss", ""), Loss):
        raise UsageError(f"{where} is no line of metrics: {text[:40]!r}; remove it, or name another run directory")
    return line
