"""Merging: all documents of all sources, to the bit; caches of different things are refused, naming the difference."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shards.config import DataConfig, to_json
from shards.manifest import Identity, Manifest
from shards.merge import merge
from shards.record import ShardRecord
from shards.writer import mark_complete, write_shard
from tests.shards.caches import CacheShape, content, make_manifest, make_rows, start_cache
from tests.shards.derived import (
    faults,
    history,
    make_ordered_cache,
    ordered_plan,
    refusal,
    report,
    run,
    stored_documents,
)

FIRST = CacheShape(num_rows=5, codec="int8", seed=1)
SECOND = CacheShape(num_rows=4, codec="int8", seed=2)
IDENTITY = to_json(make_manifest(FIRST, ordered_plan(FIRST)).identity)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("merge")
    make_ordered_cache(directory / "first", FIRST)
    make_ordered_cache(directory / "second", SECOND, quarantined=(1,))
    return directory / "first", directory / "second"


def make_with(path: Path, shape: CacheShape, **sections: object) -> None:
    """A whole cache with other values in some sections of its manifest."""
    plan = ordered_plan(shape)
    manifest = start_cache(path, shape, plan, replace(make_manifest(shape, plan), **sections))
    for shard in range(manifest.plan.num_shards):
        write_shard(path, manifest, shard, make_rows(shape, manifest, plan, shard))
    mark_complete(path, manifest)


def test_rows_follow_one_another_training_first(caches: tuple[Path, Path], tmp_path: Path) -> None:
    made = report("merge", tmp_path / "all", *caches)
    assert faults(tmp_path / "all") == []
    plans = [Manifest.read(cache).plan for cache in caches]
    assert made["rows"] == 9
    assert made["train_rows"] == 7
    assert made["documents"] == sum(plan.num_documents for plan in plans)
    assert made["quarantined_documents"] == 1

    # Rows of the first, the second, then what both hold out: each row's tokens as the plan of its source has them.
    order = [(FIRST, row) for row in range(4)] + [(SECOND, row) for row in range(3)] + [(FIRST, 4), (SECOND, 3)]
    columns = {name: np.load(tmp_path / f"all/plan/{name}.npy") for name in ("document_row", "document_tokens")}
    offsets = np.concatenate([[0], np.cumsum(columns["document_tokens"])])
    token_ids = np.load(tmp_path / "all/plan/token_ids.npy")
    for new_row, (shape, row) in enumerate(order):
        own = np.flatnonzero(columns["document_row"] == new_row)
        plan = ordered_plan(shape)
        expected = plan.row_arrays(row, shape.row_tokens)
        found = token_ids[offsets[own[0]] : offsets[own[-1] + 1]]
        np.testing.assert_array_equal(found, expected.input_ids[expected.document_ids >= 0])


def test_parts_go_where_their_order_says(tmp_path: Path) -> None:
    make_ordered_cache(tmp_path / "whole", FIRST)
    report("slice", tmp_path / "whole", tmp_path / "a", "--rows", "0:2")
    report("slice", tmp_path / "whole", tmp_path / "b", "--rows", "2:5")  # the last row is held out
    report("merge", tmp_path / "merged", tmp_path / "b", tmp_path / "a")
    assert faults(tmp_path / "merged") == []
    expected, found = stored_documents(tmp_path / "whole"), stored_documents(tmp_path / "merged")
    assert found.keys() == expected.keys()
    for record, document in found.items():
        assert document.row == [2, 3, 0, 1, 4].index(expected[record].row)
        assert document.source == expected[record].source
        for name, values in document.states.items():
            np.testing.assert_array_equal(values, expected[record].states[name])


def test_documents_in_quarantine_stay_there(caches: tuple[Path, Path], tmp_path: Path) -> None:
    merge(tmp_path / "all", caches, different_data=False)
    records = [ShardRecord.read(tmp_path / "all", Manifest.read(tmp_path / "all"), shard) for shard in range(5)]
    (entry,) = (entry for record in records for entry in record.quarantined)
    document_tokens = np.load(tmp_path / "all/plan/document_tokens.npy")
    assert document_tokens[entry.document] == ordered_plan(SECOND).document_tokens[1]
    assert (entry.layer, entry.position) == (6, 0)


def test_documents_that_more_than_one_source_has_are_told(caches: tuple[Path, Path], tmp_path: Path) -> None:
    done = run("merge", tmp_path / "twice", caches[0], caches[0])
    assert done.returncode == 0, done.stderr
    num_documents = Manifest.read(caches[0]).plan.num_documents
    assert done.stdout.splitlines()[1] == (
        f"note: {num_documents} documents are repeated: more than one source has them"
    )
    assert Manifest.read(tmp_path / "twice").plan.num_documents == 2 * num_documents
    assert faults(tmp_path / "twice") == []


def test_sources_are_united(caches: tuple[Path, Path], tmp_path: Path) -> None:
    plan = ordered_plan(SECOND)
    sizes = replace(make_manifest(SECOND, plan).plan, sources=("books", "texts"))
    make_with(tmp_path / "books", SECOND, plan=sizes)
    report("merge", tmp_path / "all", caches[0], tmp_path / "books")
    assert Manifest.read(tmp_path / "all").plan.sources == ("books", "chats", "texts")
    source_ids = np.load(tmp_path / "all/plan/document_source.npy")
    rows = np.load(tmp_path / "all/plan/document_row.npy")
    of_books = plan.document_source[plan.document_row < 3]
    assert source_ids[(rows >= 4) & (rows < 7)].tolist() == [[0, 2][source] for source in of_books]
    of_first = ordered_plan(FIRST)
    assert source_ids[rows < 4].tolist() == [[1, 2][s] for s in of_first.document_source[of_first.document_row < 4]]


TARGET, CACHE = make_manifest(FIRST, ordered_plan(FIRST)).target, make_manifest(FIRST, ordered_plan(FIRST)).cache
DIFFERENCES = {
    "target.dtype": {"target": replace(TARGET, dtype="float32")},
    "target.mask_token_id": {"target": replace(TARGET, mask_token_id=4)},
    "data.holdout_fraction": {"data": DataConfig(files=("data/tiny.jsonl",), holdout_fraction=0.5)},
    "cache.shard_bytes": {"cache": replace(CACHE, shard_bytes=5)},
    **{f"identity.{key}": {"identity": replace(Identity(**IDENTITY), **{key: "e" * 64})} for key in IDENTITY},
}


@pytest.mark.parametrize("key", DIFFERENCES)
def test_caches_of_different_things_are_refused(caches: tuple[Path, Path], tmp_path: Path, key: str) -> None:
    make_with(tmp_path / "other", SECOND, **DIFFERENCES[key])
    message = refusal("merge", tmp_path / "all", caches[0], tmp_path / "other")
    assert f"are not of the same thing: {key} is " in message
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize(
    "shape",
    [replace(SECOND, codec="bf16"), replace(SECOND, layers=(1, 4)), replace(SECOND, row_tokens=64)],
    ids=["codec", "layers", "row_tokens"],
)
def test_caches_of_different_shape_are_refused(
    caches: tuple[Path, Path], tmp_path: Path, shape: CacheShape, request: pytest.FixtureRequest
) -> None:
    make_ordered_cache(tmp_path / "other", shape)
    key = request.node.callspec.id
    assert f"cache.{key} is " in refusal("merge", tmp_path / "all", caches[0], tmp_path / "other")


def test_different_data_is_merged_if_that_is_said(caches: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    identity = replace(Identity(**IDENTITY), data="e" * 64)
    make_with(other, SECOND, identity=identity, data=DataConfig(files=("data/more.jsonl",), min_supervised_tokens=1))
    assert "--different-data merges caches" in refusal("merge", tmp_path / "all", caches[0], other)
    report("merge", tmp_path / "all", caches[0], other, "--different-data")
    assert faults(tmp_path / "all") == []
    made = Manifest.read(tmp_path / "all")
    hashes = "d" * 64 + "\n" + "e" * 64 + "\n"
    assert made.identity.data == hashlib.sha256(hashes.encode()).hexdigest()
    assert made.data.files == ("data/tiny.jsonl", "data/more.jsonl")
    assert "identity.target" in refusal(
        "merge", tmp_path / "b", caches[0], make_with_target(tmp_path / "third"), "--different-data"
    )


def test_the_history_names_the_sources(caches: tuple[Path, Path], tmp_path: Path) -> None:
    report("slice", caches[0], tmp_path / "part", "--split", "train")
    report("merge", tmp_path / "all", tmp_path / "part", caches[1])
    seals = [Manifest.read(cache).seal[:16] for cache in (caches[0], tmp_path / "part", caches[1])]
    assert history(tmp_path / "all") == [
        f"sliced to split train, source {seals[0]}",
        f"merged from sources {seals[1]}, {seals[2]}",
    ]


def test_one_cache_is_no_merge_and_sources_are_only_read(caches: tuple[Path, Path], tmp_path: Path) -> None:
    before = [content(cache) for cache in caches]
    assert "at least two" in refusal("merge", tmp_path / "all", caches[0])
    assert "which is only read" in refusal("merge", caches[1], *caches)
    assert "which is only read" in refusal("merge", caches[1] / "all", *caches)
    report("merge", tmp_path / "all", *caches)
    assert "holds another cache" in refusal("merge", tmp_path / "all", *reversed(caches))
    assert [content(cache) for cache in caches] == before


def make_with_target(path: Path) -> Path:
    make_with(path, SECOND, identity=replace(Identity(**IDENTITY), target="e" * 64))
    return path
