"""What a run has written so far, for whoever wants to know: its configuration, its metrics, its checkpoints' names.

Nothing here imports torch, so that a look at a run takes no time.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shards.errors import UsageError, reason

RUN_CONFIG_FILE = "config.json"
CACHE_KEY = "cache"  # of the configuration: the cache's path
NUM_STEPS_KEY = "num_steps"
METRICS_FILE = "metrics.jsonl"
HELDOUT_ACCEPTANCE_LENGTH = "heldout_acceptance_length"
Number = float | int | None  # in a line of metrics: None where nothing was counted
CHECKPOINTS_DIRECTORY = "checkpoints"
LATEST_LINK = "latest"
BEST_LINK = "best"
NUM_ROWS_SHOWN = 8


def read_recorded(run: Path) -> dict[str, Any]:
    path = run / RUN_CONFIG_FILE
    if not path.exists():
        raise UsageError(f"{run} is not empty and holds no run: it has no {RUN_CONFIG_FILE}; --run names another")
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}; --run names another directory") from None
    if not isinstance(recorded, dict):
        raise UsageError(f"{path} is not the configuration of a run; --run names another directory")
    return recorded


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's metrics; a last line that was cut short by a crash is left out."""
    path = run / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}; --run names another directory") from None
    return [_parse_line(line, f"{path} line {i}") for i, line in enumerate(lines[:-1], start=1)]


def best_acceptance_length(lines: Iterable[dict[str, Any]]) -> float:
    """The largest held-out one; 0, which is less than any, before there is one."""
    return max((line.get(HELDOUT_ACCEPTANCE_LENGTH) or 0.0 for line in lines), default=0.0)


def _parse_line(text: str, where: str) -> dict[str, Any]:
    """A line of metrics, with the keys that are read again in their types."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    is_line = (
        isinstance(line, dict)
        and type(line.get("step")) is int
        and isinstance(line.get("loss", ""), Number)
        and isinstance(line.get(HELDOUT_ACCEPTANCE_LENGTH), Number)
    )
    if not is_line:
        raise UsageError(f"{where} is no line of metrics: {text[:40]!r}; remove it, or name another run directory")
    return line


def latest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint, or None when the run has none. `latest` is for people: a crash may leave it behind."""
    return next(iter(reversed(by_step(run / CHECKPOINTS_DIRECTORY))), None)


def by_step(checkpoints: Path) -> list[Path]:
    """The checkpoints of a directory, the oldest first."""
    found = {path: re.fullmatch("step-([0-9]+)", path.name) for path in checkpoints.glob("step-*") if path.is_dir()}
    return sorted((path for path, match in found.items() if match), key=lambda path: int(found[path][1]))


def name_rows(rows: list[int]) -> str:
    """In words, for people."""
    names = ", ".join(map(str, rows[:NUM_ROWS_SHOWN]))
    more = len(rows) - NUM_ROWS_SHOWN
    return f"row{'s' if len(rows) > 1 else ''} {names}" + (f" and {more} more" if more > 0 else "")
