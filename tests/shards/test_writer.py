"""Publishing: nothing half-written is ever seen, whatever stops the writer; what breaks the format is refused."""

import dataclasses
import errno
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shards.durable import temporary_beside
from shards.errors import CacheError, RunError, UsageError
from shards.manifest import MANIFEST_FILE, Manifest
from shards.record import Quarantined, ShardRecord, count_quarantined
from shards.schema import missing_shards, published_shards
from shards.stats import cache_statistics, format_statistics
from shards.verify import verify
from shards.writer import ShardRows, mark_complete, new_cache, publish_cache, write_shard
from tests.shards.caches import CacheShape, content, make_cache, make_manifest, make_plan, make_rows, start_cache
from tests.shards.writer_process import SHAPE

ROOT = Path(__file__).parents[2]


def spawn(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.shards.writer_process", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_killed_writer_leaves_a_valid_cache_that_the_next_one_completes(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    num_events = int(spawn(whole, 0).communicate()[0])
    for stop_at in random.Random(2).sample(range(1, num_events + 1), 7):
        cache = tmp_path / f"killed at {stop_at}"
        with spawn(cache, stop_at) as writer:
            assert writer.stdout.read(1) == b"."
            writer.kill()
        if (cache / MANIFEST_FILE).exists():
            faults = [fault for part in verify(cache, Manifest.read(cache)) for fault in part.faults]
            assert all(fault.endswith("is missing") for fault in faults), faults
        make_cache(cache, SHAPE)
        assert content(cache) == content(whole)


def test_a_writer_that_is_overtaken_drops_its_shard(tmp_path: Path) -> None:
    whole, begun = tmp_path / "whole", tmp_path / "begun"
    make_cache(whole, SHAPE)
    start_cache(begun, SHAPE, make_plan(SHAPE))
    num_events = int(spawn(shutil.copytree(begun, tmp_path / "count"), 0).communicate()[0])
    for stop_at in random.Random(3).sample(range(1, num_events + 1), 4):
        cache = shutil.copytree(begun, tmp_path / f"stopped at {stop_at}")
        with spawn(cache, stop_at) as writer:
            assert writer.stdout.read(1) == b"."
            make_cache(cache, SHAPE)
            writer.communicate(b".")
        assert writer.returncode == 0
        assert content(cache) == content(whole)


def test_a_disk_that_takes_no_more_ends_in_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    plan = make_plan(SHAPE)
    manifest = start_cache(tmp_path / "cache", SHAPE, plan)
    rows = make_rows(SHAPE, manifest, plan, 0)
    before = content(tmp_path)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (rows.hidden[1].nbytes // 2, unlimited[1]))
    try:
        with pytest.raises(RunError, match=f"shard-00000 could not be written: .*{os.strerror(errno.EFBIG)}"):
            write_shard(tmp_path / "cache", manifest, 0, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert content(tmp_path) == before
    assert write_shard(tmp_path / "cache", manifest, 0, rows)


def test_a_published_shard_is_left_alone(tmp_path: Path) -> None:
    manifest = make_cache(tmp_path / "cache", SHAPE)
    before = content(tmp_path)
    rows = make_rows(SHAPE, manifest, make_plan(SHAPE), 1)
    assert not write_shard(tmp_path / "cache", manifest, 1, rows)
    assert content(tmp_path) == before


def test_bytes_do_not_depend_on_order_or_place(tmp_path: Path) -> None:
    make_cache(tmp_path / "one", SHAPE)
    plan = make_plan(SHAPE)
    manifest = start_cache(tmp_path / "deep" / "two", SHAPE, plan)
    for shard in reversed(range(manifest.plan.num_shards)):
        assert not mark_complete(tmp_path / "deep" / "two", manifest)
        assert write_shard(tmp_path / "deep" / "two", manifest, shard, make_rows(SHAPE, manifest, plan, shard))
    assert mark_complete(tmp_path / "deep" / "two", manifest)
    assert content(tmp_path / "one") == content(tmp_path / "deep" / "two")


def test_missing_and_published_shards(tmp_path: Path) -> None:
    plan = make_plan(CacheShape())
    manifest = start_cache(tmp_path, CacheShape(), plan)
    write_shard(tmp_path, manifest, 1, make_rows(CacheShape(), manifest, plan, 1))
    (tmp_path / "shard-00007").mkdir()  # beyond the plan
    assert published_shards(tmp_path, manifest) == {1}
    assert missing_shards(tmp_path, manifest) == [0, 2]


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    plan = make_plan(SHAPE)
    manifest = start_cache(tmp_path, SHAPE, plan)
    base = temporary_beside(tmp_path / "shard-00000").name.removesuffix(str(os.getpid()))
    ended = subprocess.Popen(["true"])
    ended.wait()
    own, dead, alive = (tmp_path / f"{base}{pid}" for pid in (os.getpid(), ended.pid, os.getppid()))
    for path in (own, dead, alive):
        path.mkdir()
        (path / "shard.json").write_text("half")
    assert write_shard(tmp_path, manifest, 0, make_rows(SHAPE, manifest, plan, 0))
    assert [path.exists() for path in (own, dead, alive)] == [False, False, True]


def quarantine(rows: ShardRows, document: int) -> ShardRows:
    clear_RT = rows.document_ids == document
    return dataclasses.replace(
        rows,
        loss_mask=np.where(clear_RT, 0, rows.loss_mask).astype(np.uint8),
        hidden={
            layer: np.where(clear_RT[..., None], 0, codes).astype(np.uint16) for layer, codes in rows.hidden.items()
        },
        quarantined=(Quarantined(document=document, layer=4, position=0),),
    )


def test_quarantine_is_recorded_and_left_out_of_the_statistics(tmp_path: Path) -> None:
    plan = make_plan(SHAPE)
    manifest = start_cache(tmp_path, SHAPE, plan)
    rows = make_rows(SHAPE, manifest, plan, 0)
    document = int(rows.document_ids[0, 0])
    assert write_shard(tmp_path, manifest, 0, quarantine(rows, document))
    assert count_quarantined(tmp_path, manifest) == 1
    statistics = cache_statistics(tmp_path)
    assert statistics["quarantined_documents"] == 1
    assert f"documents  {manifest.plan.num_documents}, 1 in quarantine\n" in format_statistics(statistics)
    record = ShardRecord.read(tmp_path, manifest, 0)
    assert record.quarantined == (Quarantined(document=document, layer=4, position=0),)
    measured_RT = (rows.document_ids >= 0) & (rows.document_ids != document)
    values = (rows.hidden[4][measured_RT].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert record.num_measured_tokens == measured_RT.sum()
    assert record.statistics["hidden/4"].max_abs == np.abs(values).max()
    # Two sums of n float64 squares in different order differ by a few n·2⁻⁵³ at most.
    assert record.statistics["hidden/4"].rms == pytest.approx(np.sqrt(np.mean(values**2)), rel=values.size * 2.0**-52)


def break_format(rows: ShardRows, how: str) -> ShardRows:
    padding_RT = rows.document_ids < 0
    assert padding_RT.any()
    if how == "row_ids":
        return dataclasses.replace(rows, row_ids=rows.row_ids + 1)
    if how == "layer":
        return dataclasses.replace(rows, hidden={1: rows.hidden[1]})
    if how == "dtype":
        return dataclasses.replace(rows, input_ids=rows.input_ids.astype(np.int64))
    if how == "shape":
        return dataclasses.replace(rows, hidden=rows.hidden | {4: rows.hidden[4][..., :32]})
    if how == "quarantine":
        document = int(rows.document_ids[0, 0])
        return dataclasses.replace(rows, quarantined=(Quarantined(document=document, layer=1, position=0),))
    if how in ("codes", "infinity"):
        where_RT, code = (padding_RT, 1) if how == "codes" else (~padding_RT, 0x7F80)
        codes_RTH = np.where(where_RT[..., None], code, rows.hidden[4]).astype(np.uint16)
        return dataclasses.replace(rows, hidden=rows.hidden | {4: codes_RTH})
    return dataclasses.replace(
        rows, **{how: np.where(padding_RT, 1, getattr(rows, how)).astype(getattr(rows, how).dtype)}
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("row_ids", "row 1 comes in the place of row 0"),
        ("layer", r"row 0 has the arrays .*, the cache stores .*'hidden/4'"),
        ("dtype", r"input_ids is int64 \(96,\), expected int32 \(96,\)"),
        ("shape", r"hidden/4 is uint16 \(96, 32\), expected uint16 \(96, 64\)"),
        ("quarantine", "is not 0 in every padding slot and document in quarantine"),
        ("codes", "hidden/4 of row 0 is not 0 in every padding slot"),
        ("infinity", "hidden/4 has values that are not finite"),
        ("input_ids", "input_ids of row 0 is not 0 in every padding slot"),
        ("position_ids", "position_ids of row 0 is not 0 in every padding slot"),
        ("loss_mask", "loss_mask of row 0 is not 0 in every padding slot"),
        ("source_ids", "source_ids of row 0 is not 0 in every padding slot"),
    ],
)
def test_rows_that_break_the_format_are_refused(tmp_path: Path, how: str, reason: str) -> None:
    plan = make_plan(SHAPE)
    manifest = start_cache(tmp_path, SHAPE, plan)
    rows = break_format(make_rows(SHAPE, manifest, plan, 0), how)
    before = content(tmp_path)
    with pytest.raises(ValueError, match=reason):
        write_shard(tmp_path, manifest, 0, rows)
    assert content(tmp_path) == before


@pytest.mark.parametrize("left", [("plan",), ("plan", "target")])
def test_what_a_crash_left_without_a_manifest_is_replaced(tmp_path: Path, left: tuple[str, ...]) -> None:
    make_cache(tmp_path / "whole", SHAPE)
    for name in left:
        (tmp_path / "cache" / name / "deep").mkdir(parents=True)
    make_cache(tmp_path / "cache", SHAPE)
    assert content(tmp_path / "cache") == content(tmp_path / "whole")


@pytest.mark.parametrize("theirs", [("target/rust.o",), ("thesis.tex",), ("plan/a", "shard-00000/b")])
def test_a_directory_of_something_else_is_refused_untouched(tmp_path: Path, theirs: tuple[str, ...]) -> None:
    for name in theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("theirs")
    before = content(tmp_path)
    with pytest.raises(UsageError, match="is not empty and holds no cache"):
        start_cache(tmp_path, SHAPE, make_plan(SHAPE))
    assert content(tmp_path) == before


def test_a_cache_is_not_begun_twice(tmp_path: Path) -> None:
    make_cache(tmp_path, SHAPE)
    before = content(tmp_path)
    with pytest.raises(CacheError, match="holds a cache already"):
        start_cache(tmp_path, SHAPE, make_plan(SHAPE))
    assert content(tmp_path) == before


def test_a_cache_that_another_process_began_meanwhile_is_left_alone(tmp_path: Path) -> None:
    plan = make_plan(SHAPE)

    def begin() -> None:
        with new_cache(tmp_path) as staging:
            shutil.move(shutil.copytree(whole, tmp_path / ".theirs") / MANIFEST_FILE, tmp_path)
            publish_cache(tmp_path, staging, make_manifest(SHAPE, plan))

    whole = tmp_path.with_name("whole")
    make_cache(whole, SHAPE)
    with pytest.raises(CacheError, match="holds a cache already"):
        begin()
    assert Manifest.read(tmp_path) == Manifest.read(whole)


def test_a_file_in_the_place_of_the_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("theirs")
    with pytest.raises(UsageError, match="cannot be used"):
        start_cache(tmp_path / "file", SHAPE, make_plan(SHAPE))


def test_an_error_while_the_cache_is_begun_leaves_nothing(tmp_path: Path) -> None:
    def begin() -> None:
        with new_cache(tmp_path / "cache") as staging:
            (staging / "plan" / "half").write_text("half")
            raise UsageError("the target is wrong")

    with pytest.raises(UsageError, match="the target is wrong"):
        begin()
    assert not list(tmp_path.iterdir())


def test_publishing_gives_the_manifest_with_checksums(tmp_path: Path) -> None:
    plan = make_plan(SHAPE)
    with new_cache(tmp_path / "cache") as staging:
        plan.write(staging / "plan")
        (staging / "target" / "tokenizer.json").write_text("{}")
        assert not (tmp_path / "cache" / MANIFEST_FILE).exists()
        manifest = publish_cache(tmp_path / "cache", staging, make_manifest(SHAPE, plan))
    assert manifest == Manifest.read(tmp_path / "cache")
    assert manifest.checksums.keys() == content(tmp_path / "cache").keys() - {MANIFEST_FILE}
