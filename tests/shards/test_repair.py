"""Repair: what is faulty is moved, nothing is lost, and making what is missing gives the same cache, to the bit."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shards.manifest import Manifest
from shards.repair import ASIDE_DIRECTORY
from shards.verify import verify
from tests.shards.caches import CacheShape, content, flip_bit, make_cache
from tests.shards.derived import faults, report, run

SHAPE = CacheShape()
ARRAY = "hidden/4/c/0/0/0"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repair") / "cache"
    make_cache(path, SHAPE)
    return path


@pytest.fixture
def cache(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "cache"))


def without_aside(cache: Path) -> dict[str, bytes]:
    return {name: stored for name, stored in content(cache).items() if not name.startswith(ASIDE_DIRECTORY)}


def swap_shards(cache: Path) -> None:
    for before, after in (("shard-00000", "x"), ("shard-00001", "shard-00000"), ("x", "shard-00001")):
        os.rename(cache / before, cache / after)


def make_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


def make_link(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    path.symlink_to(elsewhere / "nowhere")


# What is done to a cache, and what is set aside then.
REPAIRABLE: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "a flipped bit of a value": (lambda c: flip_bit(c / "shard-00001" / ARRAY, 8), {"shard-00001"}),
    "a flipped bit of an index": (lambda c: flip_bit(c / "shard-00001/loss_mask/c/0/0", 8 * 210), {"shard-00001"}),
    "a flipped bit of shard.json": (lambda c: flip_bit(c / "shard-00002/shard.json", 80), {"shard-00002"}),
    "invalid UTF-8 in zarr.json": (lambda c: (c / "shard-00000/zarr.json").write_bytes(b"\xff"), {"shard-00000"}),
    "a file cut short": (lambda c: os.truncate(c / "shard-00000" / ARRAY, 9), {"shard-00000"}),
    "a file missing": (lambda c: (c / "shard-00000" / ARRAY).unlink(), {"shard-00000"}),
    "a file too many": (lambda c: (c / "shard-00000/more").write_text(""), {"shard-00000"}),
    "two shards": (
        lambda c: [flip_bit(c / f"shard-0000{i}" / ARRAY, 8) for i in (0, 2)],
        {"shard-00000", "shard-00002"},
    ),
    "swapped shards": (swap_shards, {"shard-00000", "shard-00001"}),
    "a file in the place of a shard": (lambda c: make_file(c / "shard-00001"), {"shard-00001"}),
    "a link in the place of a shard": (lambda c: make_link(c / "shard-00001", c.parent / "x"), {"shard-00001"}),
    "a link and a flipped bit": (
        lambda c: [make_link(c / "shard-00001", c.parent / "x"), flip_bit(c / "shard-00002" / ARRAY, 8)],
        {"shard-00001", "shard-00002"},
    ),
    "a pipe in a shard": (lambda c: os.mkfifo(c / "shard-00001/pipe"), {"shard-00001"}),
    "a shard of nobody": (lambda c: shutil.copytree(c / "shard-00001", c / "shard-00007"), {"shard-00007"}),
    "a stray in plan": (lambda c: (c / "plan/more.npy").write_text(""), {"plan/more.npy"}),
    "a wrong complete.json": (lambda c: (c / "complete.json").write_text("[]"), set()),
    "a shard missing": (lambda c: shutil.rmtree(c / "shard-00001"), set()),
}


@pytest.mark.parametrize("kind", REPAIRABLE)
def test_what_is_faulty_is_set_aside_and_made_again(whole: Path, cache: Path, kind: str) -> None:
    damage, bad = REPAIRABLE[kind]
    damage(cache)
    damaged = content(cache)
    assert faults(cache)
    done = report("repair", cache)
    assert done["faults"]
    assert done["not_repairable"] == []
    assert set(done["set_aside"]) == bad | {"complete.json"}
    assert all(os.path.lexists(cache / place) for place in done["set_aside"].values())
    assert sorted(content(cache).values()) == sorted(damaged.values())  # moved, not changed

    unmade = [part.of for part in verify(cache, Manifest.read(cache)) if part.num_unmade_shards]
    assert (faults(cache), unmade) == ([], [f"shard-{shard:05d}" for shard in done["missing_shards"]])
    make_cache(cache, SHAPE)  # as `make extract` does: what is missing
    assert without_aside(cache) == content(whole)
    assert report("repair", cache) == {"faults": [], "set_aside": {}, "missing_shards": [], "not_repairable": []}


def test_a_whole_cache_is_left_alone(whole: Path, cache: Path) -> None:
    done = run("repair", cache)
    assert (done.returncode, done.stdout) == (0, f"{cache} has no faults: there is nothing to repair\n")
    assert content(cache) == content(whole)


def test_the_command_tells_what_it_did_and_what_to_do(cache: Path) -> None:
    flip_bit(cache / "shard-00001" / ARRAY, 8)
    done = run("repair", cache)
    assert done.returncode == 0, done.stderr
    fault, complete, shard, advice = done.stdout.splitlines()
    assert fault.startswith("shard-00001 hidden/4 row 2: crc32c is ")
    assert complete == f"complete.json is set aside: {cache}/.set-aside/complete.json"
    assert shard == f"shard-00001 is set aside: {cache}/.set-aside/shard-00001"
    assert advice.startswith("1 shards are to be made: run the command that made the cache again")


def test_nothing_set_aside_is_replaced(cache: Path) -> None:
    for i in range(3):
        flip_bit(cache / "shard-00001" / ARRAY, 8 + i)
        done = report("repair", cache)
        suffix = f".{i + 1}" if i else ""
        assert done["set_aside"]["shard-00001"] == f".set-aside/shard-00001{suffix}"
        make_cache(cache, SHAPE)
    assert faults(cache) == []


@pytest.mark.parametrize("name", ["plan/token_ids.npy", "target/head.json", "manifest.json"])
def test_what_the_manifest_vouches_for_can_not_be_repaired(cache: Path, name: str) -> None:
    flip_bit(cache / name, 8 * 10)
    flip_bit(cache / "shard-00001" / ARRAY, 8)
    done = run("repair", cache, "--json")
    assert done.returncode == 1, done.stderr
    figures = json.loads(done.stdout)
    assert len(figures["not_repairable"]) == 1
    assert name in figures["not_repairable"][0]
    expected = set() if name == "manifest.json" else {"shard-00001", "complete.json"}
    assert set(figures["set_aside"]) == expected
    last = run("repair", cache)
    assert last.returncode == 1
    assert last.stdout.splitlines()[-1].startswith("1 faults can't be repaired, for the manifest vouches")


def test_an_unfinished_cache_keeps_what_it_has(cache: Path) -> None:
    shutil.rmtree(cache / "shard-00000")
    (cache / "complete.json").unlink()
    before = content(cache)
    assert report("repair", cache)["missing_shards"] == [0]
    assert content(cache) == before


def test_a_cache_that_can_not_be_written_to(cache: Path) -> None:
    (cache / ASIDE_DIRECTORY).write_text("")  # root may write anywhere, but not below a file
    flip_bit(cache / "shard-00001" / ARRAY, 8)
    done = run("repair", cache)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {cache}/complete.json could not be set aside: ")
    assert "Traceback" not in done.stderr
    assert Manifest.read(cache).plan.num_shards == 3


def test_what_is_no_cache_is_refused(tmp_path: Path) -> None:
    done = run("repair", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path} is not a cache: ")
