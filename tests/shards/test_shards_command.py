"""`python -m shards` as a user runs it."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from extract.lock import sole_extraction
from shards.manifest import Manifest
from shards.plot import draw_left_out, draw_sources, draw_states
from shards.record import Quarantined, ShardRecord
from shards.stats import cache_statistics
from shards.writer import write_shard
from tests.shards.caches import CacheShape, content, flip_bit, make_cache, make_plan, make_rows, start_cache

ROOT = Path(__file__).parents[2]
SHAPE = CacheShape()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("command") / "cache"
    make_cache(path, SHAPE)
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shards", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_stats_counts_what_is_there(cache: Path) -> None:
    done = run("stats", cache, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    plan, sizes = make_plan(SHAPE), {name: len(stored) for name, stored in content(cache).items()}
    num_bytes = sum(size for name, size in sizes.items() if name.startswith("shard-"))
    layers = found.pop("layers")
    assert found == {
        "target": "models/tiny",
        "hidden_size": 64,
        "target_layer_ids": [1, 4, 6],
        "codec": "bf16",
        "shards": 3,
        "planned_shards": 3,
        "state": "complete",
        "rows": 5,
        "row_tokens": 96,
        "documents": len(plan.document_row),
        "quarantined_documents": 0,
        "tokens": len(plan.token_ids),
        "supervised_tokens": int(plan.loss_mask.sum()),
        "fill": len(plan.token_ids) / (5 * 96),
        "bytes": num_bytes,
        "bytes_per_slot": num_bytes / (5 * 96),
        "bytes_per_token": num_bytes / len(plan.token_ids),
        "target_bytes": sum(size for name, size in sizes.items() if name.startswith("target/")),
        "plan_bytes": sum(size for name, size in sizes.items() if name.startswith("plan/")),
        "sources": {
            name: int(plan.document_tokens[plan.document_source == source].sum())
            for source, name in enumerate(["chats", "texts"])
        },
    }
    assert list(layers) == ["1", "4", "6"]
    for layer, figures in layers.items():
        shards = [make_rows(SHAPE, Manifest.read(cache), plan, shard) for shard in range(3)]
        codes = np.concatenate([rows.hidden[int(layer)][rows.document_ids >= 0] for rows in shards])
        values = (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        assert figures["max_abs"] == np.abs(values).max()
        # Two sums of n float64 squares in different order differ by a few n·2⁻⁵³ at most.
        assert figures["rms"] == pytest.approx(np.sqrt(np.mean(values**2)), rel=values.size * 2.0**-52)


def test_stats_of_an_unfinished_cache_is_of_its_shards(tmp_path: Path) -> None:
    plan = make_plan(SHAPE)
    manifest = start_cache(tmp_path, SHAPE, plan)
    empty = cache_statistics(tmp_path)
    assert (empty["shards"], empty["bytes"], empty["bytes_per_slot"], empty["bytes_per_token"]) == (0, 0, 0.0, 0.0)
    assert empty["layers"]["4"] == {"rms": 0.0, "max_abs": 0.0}
    write_shard(tmp_path, manifest, 2, make_rows(SHAPE, manifest, plan, 2))
    one = cache_statistics(tmp_path)
    assert one["rows"] == 5
    assert one["bytes_per_slot"] == one["bytes"] / 96
    assert one["bytes_per_token"] == one["bytes"] / plan.document_tokens[plan.document_row == 4].sum()


def test_stats_prints_a_table(cache: Path) -> None:
    done = run("stats", cache)
    assert (done.returncode, done.stderr) == (0, "")
    assert "shards     3 of 3\n" in done.stdout
    assert "rows       5 of 96 tokens, " in done.stdout
    assert f"documents  {len(make_plan(SHAPE).document_row)}\n" in done.stdout
    assert "layer 4    rms " in done.stdout


def test_verify_of_a_whole_cache(cache: Path) -> None:
    num_files = len(content(cache))
    for options, unread in (([], ", values unread (--deep reads them)"), (["--deep"], "")):
        done = run("verify", cache, *options)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"3 shards, {num_files} files verified: no faults{unread}\n"
        found = json.loads(run("verify", cache, "--json", *options).stdout)
        assert found == {"state": "complete", "shards": 3, "missing_shards": 0, "files": num_files, "faults": []}


INCOMPLETE = {
    "incomplete": "the command that makes the cache (`make extract`) goes on from them",
    "extracting": "an extraction is at work on the others",
}


@pytest.mark.parametrize("state", INCOMPLETE)
def test_an_incomplete_cache_says_so_and_is_not_faulty(tmp_path: Path, state: str) -> None:
    """Nor is it whole: a script that goes on after `verify` does not go on."""
    plan = make_plan(SHAPE)
    manifest = start_cache(tmp_path, SHAPE, plan)
    assert not any(line.startswith(("bytes ", "layer ")) for line in run("stats", tmp_path).stdout.splitlines())
    write_shard(tmp_path, manifest, 2, make_rows(SHAPE, manifest, plan, 2))
    said = f"incomplete: 1 of 3 shards are there; {INCOMPLETE[state]}"
    with sole_extraction(tmp_path) if state == "extracting" else contextlib.nullcontext():
        stats, verify = run("stats", tmp_path), run("verify", tmp_path)
        assert (stats.returncode, stats.stderr, stats.stdout.splitlines()[0]) == (0, "", said)
        assert (verify.returncode, verify.stderr, verify.stdout.splitlines()[0]) == (1, "", said)
        assert "files verified: no faults" in verify.stdout
        assert [json.loads(run(name, tmp_path, "--json").stdout)["state"] for name in ("stats", "ls")] == [state] * 2
        found = json.loads(run("verify", tmp_path, "--json").stdout)
        del found["files"]
        assert found == {"state": state, "shards": 1, "missing_shards": 2, "faults": []}


def test_a_shard_that_was_there_is_a_fault(tmp_path: Path) -> None:
    """All were, as complete.json says."""
    make_cache(tmp_path, SHAPE)
    shutil.rmtree(tmp_path / "shard-00001")
    found = run("verify", tmp_path)
    assert (found.returncode, found.stdout.splitlines()[0]) == (1, "shard-00001 is missing")


def test_verify_prints_a_line_for_each_fault(tmp_path: Path) -> None:
    make_cache(tmp_path, SHAPE)
    flip_bit(tmp_path / "shard-00001/hidden/4/c/0/0/0", 8)
    flip_bit(tmp_path / "target/head.json", 8)
    done = run("verify", tmp_path, "--deep")
    target, shard, closing = done.stdout.splitlines()
    assert done.returncode == 1
    assert target.startswith("target/head.json: sha256 is ")
    assert shard.startswith("shard-00001 hidden/4 row 2: crc32c is ")
    assert closing.startswith("3 shards, ")
    assert closing.endswith(" files verified: 2 faults")
    assert json.loads(run("verify", tmp_path, "--json", "--deep").stdout)["faults"] == [target, shard]
    assert json.loads(run("verify", tmp_path, "--json").stdout)["faults"] == [target]


PNG = b"\x89PNG\r\n\x1a\n"


def test_stats_are_drawn(tmp_path: Path) -> None:
    shape = CacheShape(final_hidden=True)
    plan = make_plan(shape)
    manifest = start_cache(tmp_path / "cache", shape, plan)
    for expected in ("empty", "one shard"):  # a cache without shards has no rms to draw on a logarithmic axis
        done = run("stats", tmp_path / "cache", "--plot", tmp_path / f"{expected}.png")
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / f"{expected}.png").read_bytes().startswith(PNG)
        write_shard(tmp_path / "cache", manifest, 0, make_rows(shape, manifest, plan, 0))


def drawn(draw: Callable[..., None], *arguments: object, **options: object) -> dict[str, list[float]]:
    """The lengths of the bars that `draw` draws, in order, by the label of their kind."""
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    draw(axes, *arguments, **options)
    upright = axes.get_xlabel() == ""
    return {
        bars.get_label(): [bar.get_height() if upright else bar.get_width() for bar in bars] for bars in axes.containers
    }


def test_the_picture_shows_the_figures(cache: Path) -> None:
    manifest, plan = Manifest.read(cache), make_plan(SHAPE)
    statistics = cache_statistics(cache)
    layers = list(statistics["layers"].values())
    records = [ShardRecord.read(cache, manifest, shard) for shard in range(3)]
    rms = drawn(draw_states, manifest, records, is_outlier=False)
    assert list(rms.values()) == [[of["rms"] for of in layers]]
    outliers = drawn(draw_states, manifest, records, is_outlier=True)
    assert list(outliers.values()) == [[of["max_abs"] / of["rms"] for of in layers]]
    by_split = drawn(draw_sources, manifest, plan)
    assert by_split.keys() == {"training", "held out"}
    assert np.sum(list(by_split.values()), axis=0).tolist() == list(statistics["sources"].values())
    assert sum(by_split["held out"]) == plan.document_tokens[plan.document_row == 4].sum()
    entry = Quarantined(document=0, layer=4, position=0)
    records[1] = dataclasses.replace(records[1], quarantined=(entry, entry))
    assert list(drawn(draw_left_out, manifest, records).values()) == [[1, 2, 2]]  # mask token, truncated, quarantine


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("there.png", "there is such a file already"),
        ("picture.svg", "must end with .png"),
        ("nowhere/picture.png", "there is no directory"),
    ],
)
def test_a_picture_that_cannot_be_made_is_a_usage_error(cache: Path, tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "there.png").write_text("theirs")
    done = run("stats", cache, "--plot", tmp_path / name)
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr
    assert content(tmp_path) == {"there.png": b"theirs"}


def test_verify_of_a_damaged_manifest_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{")
    done = run("verify", tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "manifest.json cannot be read" in done.stdout


@pytest.mark.parametrize("command", ["stats", "verify"])
@pytest.mark.parametrize("make", ["nothing", "directory", "file"])
def test_what_is_no_cache_is_a_usage_error(tmp_path: Path, command: str, make: str) -> None:
    path = tmp_path / "cache"
    if make == "directory":
        path.mkdir()
    if make == "file":
        path.write_text("")
    done = run(command, path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {path} is not a cache: ")
    assert done.stderr.count("\n") == 1
