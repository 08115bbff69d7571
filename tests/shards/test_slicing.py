"""Slices: what is taken is what was there, to the bit; slices of rows merged are the cache that they are of."""

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.manifest import Manifest
from shards.merge import merge
from shards.slicing import Choice, slice_cache
from tests.shards.caches import CacheShape, content
from tests.shards.derived import Stored, faults, history, make_ordered_cache, refusal, report, run, stored_documents

SHAPE = CacheShape(num_rows=7, rows_per_shard=2, layers=(1, 4, 6), final_hidden=True, codec="int8")
QUARANTINED = (3,)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slicing") / "cache"
    make_ordered_cache(path, SHAPE, quarantined=QUARANTINED)
    return path


@pytest.fixture(scope="module")
def documents(cache: Path) -> dict[int, Stored]:
    return stored_documents(cache)


def assert_same(found: Stored, expected: Stored) -> None:
    for name in ("source", "is_heldout", "input_ids", "loss_mask", "position_ids"):
        assert getattr(found, name) == getattr(expected, name), name
    for name, values in found.states.items():
        np.testing.assert_array_equal(values, expected.states[name])


def without_manifest(cache: Path) -> dict[str, bytes]:
    return {name: stored for name, stored in content(cache).items() if name != "manifest.json"}


@settings(max_examples=6, deadline=None)
@given(cuts=st.sets(st.integers(1, SHAPE.num_rows - 1), min_size=1))
def test_slices_of_rows_merged_are_the_whole_again(
    cache: Path, tmp_path_factory: pytest.TempPathFactory, cuts: set[int]
) -> None:
    directory = tmp_path_factory.mktemp("slices")
    edges = [0, *sorted(cuts), SHAPE.num_rows]
    parts = []
    for start, stop in pairwise(edges):
        parts.append(directory / f"{start}-{stop}")
        slice_cache(cache, parts[-1], Choice(rows=((start, stop),)))
        assert faults(parts[-1]) == []
    made = merge(directory / "whole", parts, different_data=False)
    assert without_manifest(directory / "whole") == without_manifest(cache)
    assert made["repeated_documents"] == 0
    before, after = Manifest.read(cache), Manifest.read(directory / "whole")
    assert (after.identity, after.cache, after.data, after.target) == (
        before.identity, before.cache, before.data, before.target,
    )  # fmt: skip
    shutil.rmtree(directory)


def test_layers_are_files_of_the_source(cache: Path, tmp_path: Path) -> None:
    report("slice", cache, tmp_path / "part", "--layers", "1,6")
    assert faults(tmp_path / "part") == []
    old, new = without_manifest(cache), without_manifest(tmp_path / "part")
    dropped = {name for name in old if "/4/" in name or "final_hidden/" in name}
    assert new.keys() == old.keys() - dropped
    for name in new:
        assert new[name] == old[name] or name.endswith("shard.json"), name
    made = Manifest.read(tmp_path / "part")
    assert (made.cache.layers, made.cache.final_hidden) == ((1, 6), False)
    assert made.plan == Manifest.read(cache).plan


def test_the_final_state_is_kept_when_it_is_named(cache: Path, tmp_path: Path) -> None:
    slice_cache(cache, tmp_path / "part", Choice(layers=("4", "final")))
    assert faults(tmp_path / "part") == []
    made = Manifest.read(tmp_path / "part")
    assert (made.cache.layers, made.cache.final_hidden) == ((4,), True)


def test_rows_keep_their_order_and_get_new_numbers(cache: Path, documents: dict[int, Stored], tmp_path: Path) -> None:
    report("slice", cache, tmp_path / "part", "--rows", "5:7,1,2:4")
    assert faults(tmp_path / "part") == []
    found = stored_documents(tmp_path / "part")
    assert found.keys() == {record for record, document in documents.items() if document.row in (1, 2, 3, 5, 6)}
    for record, document in found.items():
        assert document.row == [1, 2, 3, 5, 6].index(documents[record].row)
        assert_same(document, documents[record])
    plan = Manifest.read(tmp_path / "part").plan
    assert (plan.num_rows, plan.num_train_rows, plan.rows_per_shard) == (5, 4, 2)
    assert plan.num_supervised_tokens == np.load(tmp_path / "part/plan/loss_mask.npy").sum()


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_split(cache: Path, documents: dict[int, Stored], tmp_path: Path, split: str) -> None:
    slice_cache(cache, tmp_path / "part", Choice(split=split))
    assert faults(tmp_path / "part") == []
    found = stored_documents(tmp_path / "part")
    assert found.keys() == {r for r, document in documents.items() if document.is_heldout == (split == "heldout")}
    for record, document in found.items():
        assert_same(document, documents[record])
    plan = Manifest.read(tmp_path / "part").plan
    assert plan.num_train_rows == (plan.num_rows if split == "train" else 0)


@pytest.mark.parametrize("source", ["chats", "texts"])
def test_documents_of_a_source_are_packed_anew(
    cache: Path, documents: dict[int, Stored], tmp_path: Path, source: str
) -> None:
    report("slice", cache, tmp_path / "part", "--sources", source)
    assert faults(tmp_path / "part") == []
    found = stored_documents(tmp_path / "part")
    wanted = {record: document for record, document in documents.items() if document.source == source}
    assert found.keys() == wanted.keys()
    for record, document in found.items():
        assert_same(document, documents[record])
    made = Manifest.read(tmp_path / "part")
    assert made.plan.sources == (source,)
    assert made.plan.num_rows < SHAPE.num_rows
    assert {d.is_heldout for d in found.values() if d.row < made.plan.num_train_rows} <= {False}
    assert {d.is_heldout for d in found.values() if d.row >= made.plan.num_train_rows} <= {True}
    assert made.identity == Manifest.read(cache).identity


def test_the_history_says_what_was_taken(cache: Path, tmp_path: Path) -> None:
    report("slice", cache, tmp_path / "a", "--layers", "1,4", "--rows", "0:5", "--split", "train", "--sources", "texts")
    seal = Manifest.read(cache).seal[:16]
    assert history(tmp_path / "a") == [f"sliced to layers 1,4; rows 0:5; sources texts; split train, source {seal}"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "all of the cache is no slice"),
        (["--layers", "1,5"], "--layers names '5': the cache has 1, 4, 6, final"),
        (["--layers", "final"], "must keep at least one of 1, 4, 6"),
        (["--rows", "3:9"], "--rows has 3:9: the cache has rows 0:7"),
        (["--rows", "3:3"], "--rows has 3:3"),
        (["--rows=-1"], "--rows has -1:0: the cache has rows 0:7"),
        (["--sources", "poems"], "--sources names 'poems': the cache has chats, texts"),
        (["--rows", "0:6", "--split", "heldout"], "nothing is left of the cache with rows 0:6; split heldout"),
    ],
)
def test_a_choice_that_can_not_be(cache: Path, tmp_path: Path, options: list[Any], message: str) -> None:
    assert message in refusal("slice", cache, tmp_path / "part", *options)
    assert not (tmp_path / "part").exists()


def test_a_destination_that_can_not_be(cache: Path, tmp_path: Path) -> None:
    assert "File name too long; name another" in refusal("slice", cache, tmp_path / ("x" * 256), "--rows", "0:1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rows", ["a:b", "1:", "", "1:2:3"])
def test_rows_that_are_none(cache: Path, tmp_path: Path, rows: str) -> None:
    done = run("slice", cache, tmp_path / "part", f"--rows={rows}")
    assert done.returncode == 2
    assert done.stderr.endswith(
        f"{rows!r} names no rows: write 0:100 for the first hundred, 250 for one, 0:100,250 for both\n"
    )
    assert not (tmp_path / "part").exists()
