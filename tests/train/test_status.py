"""What a run is doing, told from its files alone: begun, training, late, saving, stopped, finished."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shards.errors import UsageError
from train.status import describe, read_status

CONFIG = {
    "num_steps": 40,
    "train.rows_per_step": 6,
    "train.log_every": 10,
    "train.stall_seconds": 900,
    "cache.row_tokens": 1000,
}
LINE = {"step": 20, "loss": 3.5, "tokens_per_second": 3000.0, "data_wait_fraction": 0.0}
NOW = 2_000_000_000.0


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run at step 20, that began 1000 s ago and wrote its last line 15 s ago. A step takes 2 s, an interval 20 s."""
    (tmp_path / ".lock").write_text("process 7 on host")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_line(tmp_path, LINE, seconds_ago=15)
    os.utime(tmp_path / ".lock", (NOW - 1000, NOW - 1000))
    (tmp_path / "checkpoints/step-20").mkdir(parents=True)
    os.utime(tmp_path / "checkpoints/step-20", (NOW - 12, NOW - 12))
    (tmp_path / "checkpoints/best").symlink_to("step-10")
    monkeypatch.setattr("time.time", lambda: NOW)
    return tmp_path


@pytest.fixture
def held(run) -> Iterator[Path]:
    with open(run / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield run


def write_line(run: Path, line: dict, *, seconds_ago: float) -> None:
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    os.utime(run / "metrics.jsonl", (NOW - seconds_ago, NOW - seconds_ago))


def text(run: Path) -> str:
    return "\n".join(describe(run, read_status(run)))


def test_a_run_that_trains(held):
    assert text(held) == (
        f"{held}: training, process 7 on host\n"
        "step      20 of 40\n"
        "speed     3,000 tokens/s, 2 s a step, 40 s left\n"
        "saved     step-20, 12 s ago; the best is step-10\n"
        "waits for nothing: the last line of metrics is 15 s old"
    )


def test_a_line_that_is_late(held):
    write_line(held, LINE, seconds_ago=69)
    assert "waits for nothing" in text(held)
    write_line(held, LINE, seconds_ago=71)
    assert "waits for longer than usual: the last line of metrics is 71 s old, 20 s are usual" in text(held)
    assert "ends it after 15 min" in text(held)


def test_a_slow_disk(held):
    write_line(held, LINE | {"data_wait_fraction": 0.4}, seconds_ago=1)
    assert "waits for data, 40% of the time" in text(held)


def test_a_checkpoint_in_writing(held):
    (held / "checkpoints/.step-30").mkdir()
    assert "step-30 is being written" in text(held)
    assert read_status(held)["checkpoint_in_writing"] == "step-30"


def test_a_run_that_continues_has_not_begun_before_its_first_line(held):
    write_line(held, LINE, seconds_ago=5000)
    assert read_status(held)["state"] == "starting"
    assert "waits for its first line of metrics: it began 17 min ago" in text(held)


def test_a_run_before_its_first_line(held):
    for name in ("config.json", "metrics.jsonl"):
        (held / name).unlink()
    assert read_status(held) == {"state": "starting", "held_by": "process 7 on host", "seconds_since": 1000.0}
    assert text(held).startswith(f"{held}: starting, process 7 on host\nwaits for its first line")


def test_runs_that_nobody_holds(run):
    assert read_status(run)["state"] == "stopped"
    assert text(run).endswith("waits for you: `make train` or --resume continues")
    write_line(run, LINE | {"step": 40}, seconds_ago=15)
    assert read_status(run)["state"] == "finished"
    assert "waits for" not in text(run)


def test_what_is_no_run_is_refused(run, tmp_path):
    (run / "config.json").write_text(json.dumps(CONFIG | {"num_steps": None}))
    with pytest.raises(UsageError, match="it is not the configuration of a run"):
        read_status(run)
    with pytest.raises(UsageError, match=r"it has no config\.json"):
        read_status(tmp_path / "nothing")


def test_a_look_needs_no_torch(run):
    code = "import sys; from train.__main__ import main; main(); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "status", str(run), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["step"] == 20
