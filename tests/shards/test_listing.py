"""`ls`: caches of a directory, shards of a cache."""

import shutil
from pathlib import Path

from tests.shards.caches import CacheShape, flip_bit, make_cache, make_plan
from tests.shards.derived import make_ordered_cache, refusal, report, run


def test_shards_of_a_cache(tmp_path: Path) -> None:
    shape = CacheShape()
    make_cache(tmp_path, shape)
    plan = make_plan(shape)
    shutil.rmtree(tmp_path / "shard-00001")
    flip_bit(tmp_path / "shard-00002/shard.json", 80)
    first, missing, damaged = report("ls", tmp_path)["shards"]
    in_first = plan.document_row < 2
    assert first == {
        "shard": "shard-00000",
        "first_row": 0,
        "rows": 2,
        "documents": in_first.sum(),
        "tokens": plan.document_tokens[in_first].sum(),
        "state": "published",
        "bytes": sum(path.stat().st_size for path in (tmp_path / "shard-00000").rglob("*") if path.is_file()),
        "quarantined_documents": 0,
    }
    assert (missing["state"], missing["first_row"], missing["rows"]) == ("missing", 2, 2)
    assert damaged["state"].startswith("damaged: ")
    assert "bytes" not in missing | damaged
    note, *lines = run("ls", tmp_path).stdout.splitlines()
    assert note.startswith("# incomplete: 2 of 3 shards are there; ")
    assert len(lines) == 3
    assert lines[0].startswith("shard-00000  rows 0:2  ")
    assert lines[1].endswith("  missing")


def test_the_history_comes_first(tmp_path: Path) -> None:
    make_ordered_cache(tmp_path / "a", CacheShape(), quarantined=(1,))
    report("slice", tmp_path / "a", tmp_path / "b", "--layers", "1")
    first, *shards = run("ls", tmp_path / "b").stdout.splitlines()
    assert first.startswith("# sliced to layers 1, source ")
    assert [line.endswith("  1 in quarantine") for line in shards] == [True, False, False]


def test_caches_of_a_directory(tmp_path: Path) -> None:
    make_cache(tmp_path / "whole", CacheShape())
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part/shard-00000")
    shutil.copytree(tmp_path / "whole", tmp_path / "bad")
    flip_bit(tmp_path / "bad/manifest.json", 800)
    (tmp_path / "other").mkdir()
    bad, part, whole = report("ls", tmp_path)["caches"]
    assert bad["state"].startswith("damaged: ")
    assert (part["state"], part["shards"], part["planned_shards"]) == ("incomplete", 2, 3)
    assert whole == {
        "cache": str(tmp_path / "whole"),
        "state": "complete",
        "target": "models/tiny",
        "codec": "bf16",
        "target_layer_ids": [1, 4, 6],
        "rows": 5,
        "row_tokens": 96,
        "tokens": make_plan(CacheShape()).document_tokens.sum(),
        "shards": 3,
        "planned_shards": 3,
    }
    assert len(run("ls", tmp_path).stdout.splitlines()) == 3


def test_what_is_not_there(tmp_path: Path) -> None:
    assert run("ls", tmp_path).stdout == "no caches here\n"
    assert "can't be listed" in refusal("ls", tmp_path / "none")
