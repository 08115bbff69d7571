"""Rows reach the disk through a process of their own: whole, in order, never further ahead than there is memory."""

import itertools
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from extract.progress import Progress
from extract.sizes import shards_bytes
from extract.storing import NUM_SLOTS, Storing
from shards.errors import RunError
from shards.manifest import Manifest
from shards.reader import CacheReader
from shards.schema import PLAN_DIRECTORY, PlanArrays, missing_shards, shard_arrays
from tests.extract.tiny import files_of


@pytest.fixture
def cache(project: Path, tmp_path: Path) -> Path:
    """A complete cache and what it was made of beside it: the shards of one are missing in the other."""
    shutil.copytree(project / "cache", tmp_path / "cache", ignore=shutil.ignore_patterns("shard-*"))
    return tmp_path / "cache"


class Row(NamedTuple):
    shard: int
    arrays: dict[str, np.ndarray]


def rows_of(complete: Path) -> Iterator[Row]:
    manifest = Manifest.read(complete)
    with CacheReader(complete) as reader:
        for shard in range(manifest.plan.num_shards):
            names = [name for name in shard_arrays(manifest, shard) if name != "row_ids"]
            for row in manifest.plan.shard_rows(shard):
                yield Row(shard, {"row_ids": np.array(row)} | reader.read_arrays(row, names))


def store(storing: Storing, rows: Iterable[Row]) -> None:
    for row in rows:
        for name, values in storing.take().items():
            values[...] = row.arrays[name]
        storing.submit(())


def store_all(storing: Storing, rows: Iterable[Row]) -> None:
    store(storing, rows)
    storing.finish()


def test_what_is_submitted_is_stored(project: Path, cache: Path) -> None:
    manifest = Manifest.read(cache)
    with Storing(cache, manifest, range(manifest.plan.num_shards)) as storing:
        store_all(storing, rows_of(project / "cache"))
    assert files_of(cache) == files_of(project / "cache")


def test_memory_is_full_when_the_writer_stands_still(project: Path, cache: Path) -> None:
    manifest, rows = Manifest.read(cache), list(rows_of(project / "cache"))
    assert len(rows) > NUM_SLOTS
    with Storing(cache, manifest, range(manifest.plan.num_shards)) as storing:
        os.kill(storing.writer, signal.SIGSTOP)
        for row in rows[:NUM_SLOTS]:
            assert not storing.is_full
            store(storing, [row])
        assert storing.is_full
        assert storing.waited_s == 0
        os.kill(storing.writer, signal.SIGCONT)
        store_all(storing, rows[NUM_SLOTS:])
    assert storing.waited_s > 0
    assert files_of(cache) == files_of(project / "cache")


def test_a_worker_that_gives_up_leaves_no_part_of_a_shard(project: Path, cache: Path) -> None:
    manifest, before = Manifest.read(cache), files_of(cache)
    with Storing(cache, manifest, range(manifest.plan.num_shards)) as storing:
        store(storing, itertools.islice(rows_of(project / "cache"), 1))
    assert files_of(cache) == before


def test_a_writer_that_is_killed_is_one_sentence(project: Path, cache: Path) -> None:
    manifest = Manifest.read(cache)
    with Storing(cache, manifest, range(manifest.plan.num_shards)) as storing:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):  # of which it ignores the first two
            os.kill(storing.writer, number)
        with pytest.raises(RunError, match=rf"its writer, process {storing.writer}, was ended \(SIGKILL\)"):
            store_all(storing, rows_of(project / "cache"))


def test_what_breaks_the_format_is_not_published(project: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    manifest, row = Manifest.read(cache), next(rows_of(project / "cache"))
    with Storing(cache, manifest, [0]) as storing, pytest.raises(RunError, match=r"was ended \(exit code 1\)"):
        store_all(storing, [row, row])  # the first in the place of the second
    assert "ValueError: row 0 comes in the place of row 1" in capfd.readouterr().err
    assert missing_shards(cache, manifest) == list(range(manifest.plan.num_shards))


def test_a_disk_that_fills_up_stops_the_run_after_a_whole_shard(
    project: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from the writer, which is forked from here, there is room for two shards, but not for three."""
    manifest = Manifest.read(cache)
    assert manifest.plan.num_shards > 3
    shard_bytes = shards_bytes(manifest.target, manifest.cache, manifest.plan, [0])

    def free(directory: Path) -> int:
        return shard_bytes * (3 - len(list(directory.glob("shard-*")))) - 1

    monkeypatch.setattr("extract.storing.free_bytes", free)
    with (
        Storing(cache, manifest, range(manifest.plan.num_shards)) as storing,
        pytest.raises(RunError, match=f"has {shard_bytes - 1:,} bytes free, .* stopped after a whole shard"),
    ):
        store_all(storing, rows_of(project / "cache"))
    assert missing_shards(cache, manifest) == list(range(2, manifest.plan.num_shards))
    assert not list(cache.glob(".shard-*"))


def test_a_disk_that_is_too_slow_is_told(project: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, plan = Manifest.read(cache), PlanArrays.read(cache / PLAN_DIRECTORY)
    for waited_s, told in ((0.0, False), (1.0, True)):
        with Progress(cache, manifest, plan, is_shown=True) as progress:
            progress.update(0, 1, waited_s=waited_s)
        assert (", the target waits for the disk " in capsys.readouterr().out) == told
