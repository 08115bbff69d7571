"""What all tools that make a cache have in common: killed anywhere, they go on; room is asked for beforehand."""

import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shards import room
from shards.errors import UsageError
from shards.manifest import MANIFEST_FILE
from shards.recode import recode
from tests.shards.caches import CacheShape, content
from tests.shards.derived import ROOT, faults, make_ordered_cache, report

SHAPE = CacheShape(num_rows=6, rows_per_shard=2, layers=(1, 4))
COMMANDS = {
    "recode": ["recode", "SRC", "DEST", "--codec", "int8"],
    "slice": ["slice", "SRC", "DEST", "--sources", "texts"],
    "merge": ["merge", "DEST", "SRC", "SRC"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("derive") / "source"
    make_ordered_cache(path, SHAPE)
    return path


def command(name: str, source: Path, destination: Path) -> list[str]:
    return [{"SRC": str(source), "DEST": str(destination)}.get(part, part) for part in COMMANDS[name]]


def spawn(stop_at: int, name: str, source: Path, destination: Path) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-m", "tests.shards.tool_process", str(stop_at), str(destination)]
    return subprocess.Popen(
        [*arguments, *command(name, source, destination)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_tool_goes_on_where_it_was(source: Path, tmp_path: Path, name: str) -> None:
    before, whole = content(source), tmp_path / "whole"
    num_events = int(spawn(0, name, source, whole).communicate()[1])
    for stop_at in random.Random(name).sample(range(1, num_events + 1), 4):
        cache = tmp_path / f"killed at {stop_at}"
        with spawn(stop_at, name, source, cache) as tool:
            assert tool.stderr.read(1) == b"."
            tool.kill()
        if (cache / MANIFEST_FILE).exists():
            assert all(fault.endswith("is missing") for fault in faults(cache)), faults(cache)
        report(*command(name, source, cache))
        assert content(cache) == content(whole)
    assert content(source) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_tool_says_so_and_leaves_nothing_half_done(
    source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    num_events = int(spawn(0, "recode", source, tmp_path / "whole").communicate()[1])
    cache = tmp_path / "cache"
    with spawn(num_events // 2, "recode", source, cache) as tool:
        assert tool.stderr.read(1) == b"."
        tool.send_signal(number)
        tool.stdin.write(b".")
        tool.stdin.close()
        messages = tool.stderr.read().decode()
    assert (tool.returncode, messages.partition("\n")[0]) == (
        1,
        "interrupted: what was finished is kept, the same command goes on from it",
    )
    assert not list(cache.glob(".*"))
    report(*command("recode", source, cache))
    assert content(cache) == content(tmp_path / "whole")


def test_a_disk_without_room_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2 * SHAPE.num_rows * SHAPE.row_tokens * (SHAPE.hidden_size + 2)  # of int8 codes and scales alone
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(UsageError, match=f"bytes more and its disk has {free:,} free"):
        recode(source, tmp_path / "cache", "int8")
    assert not (tmp_path / "cache").exists()


def test_two_at_a_time_make_one_cache(source: Path, tmp_path: Path) -> None:
    """The first stops in the middle while the second makes all; then it finds its shards made."""
    num_events = int(spawn(0, "recode", source, tmp_path / "whole").communicate()[1])
    cache = tmp_path / "cache"
    with spawn(num_events * 2 // 3, "recode", source, cache) as tool:
        assert tool.stderr.read(1) == b"."
        report(*command("recode", source, cache))
        tool.communicate(b".")
    assert tool.returncode == 0
    assert content(cache) == content(tmp_path / "whole")
