"""After `python -m shards repair`, extraction makes again what was set aside, and just that, with the same bytes."""

from pathlib import Path

import pytest

from shards.manifest import Manifest
from shards.repair import ASIDE_DIRECTORY, repair
from shards.verify import verify
from tests.extract.tiny import extract_here, files_of, job_of, write_project
from tests.shards.caches import flip_bit


def test_extraction_makes_again_what_was_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path)
    job = job_of(tmp_path)
    extract_here(job, monkeypatch)
    cache, whole = job.directory, files_of(job.directory)
    array = next(path for path in sorted((cache / "shard-00001/hidden").rglob("0")) if path.is_file())
    flip_bit(array, 8)
    untouched = (cache / "shard-00000/shard.json").stat().st_ino

    repaired = repair(cache, lambda: verify(cache, Manifest.read(cache)))
    assert set(repaired.set_aside) == {"complete.json", "shard-00001"}
    extract_here(job, monkeypatch)
    found = {name: stored for name, stored in files_of(cache).items() if not name.startswith(ASIDE_DIRECTORY)}
    assert found == whole
    assert (cache / "shard-00000/shard.json").stat().st_ino == untouched
