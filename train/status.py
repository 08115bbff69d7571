"""Idle or locked up? What a run is doing, from the files that it writes anyway: its lock, metrics and checkpoints."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shards.errors import UsageError
from train.lock import LOCK_FILE, holder
from train.records import (
    BEST_LINK,
    CHECKPOINTS_DIRECTORY,
    METRICS_FILE,
    NUM_STEPS_KEY,
    RUN_CONFIG_FILE,
    latest_checkpoint,
    read_metrics,
    read_recorded,
)

NUMBERS = (NUM_STEPS_KEY, "train.rows_per_step", "cache.row_tokens", "train.log_every", "train.stall_seconds")
LATE = 3  # a line is late after so many times the usual
SLACK_S = 10.0  # and so long, which the smallest steps' lines may take
MUCH_WAIT = 0.05  # of the time on data: worth a word


def read_status(run: Path) -> dict[str, Any]:
    """The keys that `--json` prints, None where there is nothing to say. Raises UsageError if `run` is no run."""
    held_by = holder(run)
    lines = read_metrics(run)
    if held_by and not lines:  # config.json is written with the first line
        return {"state": "starting", "held_by": held_by, "seconds_since": _age(run / LOCK_FILE)}
    config = _read_numbers(run)
    last = lines[-1] if lines else {"step": 0}
    num_steps = config[NUM_STEPS_KEY]
    has_begun = bool(lines) and (run / METRICS_FILE).stat().st_mtime >= (run / LOCK_FILE).stat().st_mtime
    state = "finished" if last["step"] == num_steps else "stopped"
    if held_by:
        state = "training" if has_begun else "starting"
    slots, speed = config["train.rows_per_step"] * config["cache.row_tokens"], last.get("tokens_per_second")
    seconds_per_step = slots / speed if speed else None
    return {
        "state": state,
        "held_by": held_by,
        "seconds_since": _age(run / (METRICS_FILE if has_begun else LOCK_FILE)),  # the last line, or the start
        "usual_seconds": seconds_per_step and seconds_per_step * config["train.log_every"],  # between lines
        "step": last["step"],
        "num_steps": num_steps,
        "loss": last.get("loss"),
        "seconds_per_step": seconds_per_step,
        "tokens_per_second": speed,
        "data_wait_fraction": last.get("data_wait_fraction"),
        "seconds_left": seconds_per_step and seconds_per_step * (num_steps - last["step"]),
        "stall_seconds": config["train.stall_seconds"],
        **_checkpoints(run),
    }


def _read_numbers(run: Path) -> dict[str, int]:
    """What is needed of the configuration."""
    recorded = read_recorded(run)
    numbers = {key: recorded.get(key) for key in NUMBERS}
    for key, value in numbers.items():
        if not isinstance(value, int):
            raise UsageError(f"{run / RUN_CONFIG_FILE} has {key} = {value}: it is not the configuration of a run")
    return numbers


def describe(run: Path, status: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    yield f"{run}: {status['state']}" + (f", {status['held_by']}" if status["held_by"] else "")
    if "step" in status:
        yield f"step      {status['step']:,} of {status['num_steps']:,}"
        if status["seconds_per_step"]:
            left = f", {_duration(status['seconds_left'])} left" if status["state"] == "training" else ""
            speed = f"{status['tokens_per_second']:,.0f} tokens/s, {status['seconds_per_step']:.3g} s a step"
            yield f"speed     {speed}{left}"
        yield f"saved     {_describe_checkpoints(status)}"
    if status["held_by"]:
        yield f"waits for {_waits_for(status)}"
    elif status["state"] == "stopped":
        yield "waits for you: `make train` or --resume continues"


def _checkpoints(run: Path) -> dict[str, Any]:
    checkpoints = run / CHECKPOINTS_DIRECTORY
    latest, best = latest_checkpoint(run), checkpoints / BEST_LINK
    writing = next(iter(checkpoints.glob(".step-*")), None)
    return {
        "checkpoint": latest and latest.name,
        "checkpoint_seconds_since": latest and _age(latest),
        "best_checkpoint": best.readlink().name if best.is_symlink() else None,
        "checkpoint_in_writing": writing and writing.name.removeprefix("."),
    }


def _describe_checkpoints(status: dict[str, Any]) -> str:
    parts = ["nothing yet"]
    if status["checkpoint"]:
        parts = [f"{status['checkpoint']}, {_duration(status['checkpoint_seconds_since'])} ago"]
    if status["best_checkpoint"]:
        parts.append(f"the best is {status['best_checkpoint']}")
    if status["checkpoint_in_writing"]:
        half = "is being written" if status["held_by"] else "was left half written"
        parts.append(f"{status['checkpoint_in_writing']} {half}")
    return "; ".join(parts)


def _waits_for(status: dict[str, Any]) -> str:
    since = _duration(status["seconds_since"])
    if status["state"] == "starting":
        return f"its first line of metrics: it began {since} ago; on a GPU a new shape compiles for a minute or two"
    usual = status["usual_seconds"]
    if usual is not None and status["seconds_since"] > LATE * usual + SLACK_S:
        return (
            f"longer than usual: the last line of metrics is {since} old, {_duration(usual)} are usual; it evaluates, "
            f"saves, waits for a disk or a rank, or hangs, which ends it after {_duration(status['stall_seconds'])}"
        )
    if (status["data_wait_fraction"] or 0) > MUCH_WAIT:
        return f"data, {status['data_wait_fraction']:.0%} of the time: the disk with the cache is too slow"
    return f"nothing: the last line of metrics is {since} old"


def _age(path: Path) -> float:
    return max(0.0, time.time() - path.stat().st_mtime)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
