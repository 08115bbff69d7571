"""The manifest: a round trip, what it is compared by, and how JSON is written."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from shards.durable import write_json
from shards.errors import CacheError
from shards.manifest import Manifest, read_json
from tests.shards.caches import CacheShape, make_cache, make_manifest, make_plan

MANIFEST = make_manifest(CacheShape(final_hidden=True), make_plan(CacheShape()))


def test_round_trip(tmp_path: Path) -> None:
    write_json(tmp_path / "manifest.json", MANIFEST.to_json())
    assert Manifest.read(tmp_path) == MANIFEST


def test_nothing_of_a_written_file_stays_beside_it(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": [1.5]})
    write_json(tmp_path / "a.json", {"b": 2, "a": [1.5]})
    assert (tmp_path / "a.json").read_text() == '{\n "a": [\n  1.5\n ],\n "b": 2\n}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", float("nan"))
    assert read_json(tmp_path / "a.json")["b"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_places_are_no_part_of_the_identity() -> None:
    target = dataclasses.replace(MANIFEST.target, path="elsewhere")
    data = dataclasses.replace(MANIFEST.data, files=("elsewhere.jsonl",))
    MANIFEST.check_config(target, data, MANIFEST.cache, Path("cache"))


def test_places_that_differ_are_told() -> None:
    target = dataclasses.replace(MANIFEST.target, path="elsewhere")
    data = dataclasses.replace(MANIFEST.data, files=("elsewhere.jsonl",))
    assert MANIFEST.moved(MANIFEST.target, MANIFEST.data) == []
    of_target, of_data = MANIFEST.moved(target, data)
    assert f"target.path = {MANIFEST.target.path!r}, the config says 'elsewhere'" in of_target
    assert f"data.files = {list(MANIFEST.data.files)!r}, the config says ['elsewhere.jsonl']" in of_data


def test_what_can_not_be_looked_into_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, reason in (
        ("absent", "is not a cache: it has no manifest.json"),
        ("file", "is not a cache: it has no manifest.json"),
        ("x" * 300, "manifest.json cannot be read: File name too long"),
    ):
        with pytest.raises(CacheError, match=reason):
            Manifest.read(tmp_path / name)


@pytest.mark.parametrize(
    ("section", "change", "reason"),
    [
        ("target", {"hidden_size": 128}, r"made with target\.hidden_size = 64, the config says 128"),
        ("data", {"holdout_fraction": 0.5}, r"data\.holdout_fraction = 0\.02, the config says 0\.5"),
        ("cache", {"layers": (1, 2)}, r"cache\.layers = \[1, 4, 6\], the config says \[1, 2\]"),
        ("cache", {"final_hidden": False, "row_tokens": 64}, r"cache\.row_tokens = 96, the config says 64"),
    ],
)
def test_the_first_difference_to_a_config_is_named(section: str, change: dict[str, object], reason: str) -> None:
    sections = {name: getattr(MANIFEST, name) for name in ("target", "data", "cache")}
    sections[section] = dataclasses.replace(sections[section], **change)
    with pytest.raises(CacheError, match=reason):
        MANIFEST.check_config(**sections, where=Path("cache"))


def test_the_seal_is_what_format_md_says(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", CacheShape(num_rows=1))
    for path in (tmp_path / "cache/manifest.json", tmp_path / "cache/shard-00000/shard.json"):
        seal = json.loads(path.read_text())["seal"]
        unsealed = path.read_bytes().replace(seal.encode(), b"0" * 64)
        assert hashlib.sha256(unsealed).hexdigest() == seal


def test_shards_of_the_plan() -> None:
    plan = MANIFEST.plan
    assert [list(plan.shard_rows(shard)) for shard in range(plan.num_shards)] == [[0, 1], [2, 3], [4]]
