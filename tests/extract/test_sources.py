"""A cache is of one configuration, data and target: all else is refused, and only what has changed is read again."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.random_target import make_random_target
from extract.__main__ import main
from extract.job import Job
from extract.sources import SEEN_FILE
from shards.manifest import Manifest
from tests.extract.tiny import SHAPES, extract_here, files_of, records, write_jsonl, write_project


def change_data(directory: Path) -> None:
    write_jsonl(directory / "data.jsonl", records()[1:])


def change_template(directory: Path) -> None:
    path = directory / "target" / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|im_start|>assistant", " <|im_start|>assistant"))


def change_tokenizer(directory: Path) -> None:
    path = directory / "target" / "tokenizer.json"
    path.write_text(path.read_text() + "\n")


def change_weights(directory: Path) -> None:
    """To as many bytes, as old as those before."""
    (weights,) = (directory / "target").glob("*.safetensors")
    before = weights.stat()
    make_random_target(directory / "target", SHAPES["qwen3"], seed=9)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size


CHANGES: dict[str, Callable[[Path], None]] = {
    "data": change_data,
    "chat template": change_template,
    "tokenizer": change_tokenizer,
    "target's config.json or weights": change_weights,
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a complete cache, whose configuration has relative paths."""
    directory = tmp_path_factory.mktemp("relative")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(directory)
        write_project(Path())
        extract_here(Job.load(Path("config.toml"), directory=Path("cache")), monkeypatch)
    return directory


@pytest.fixture
def made(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One to change, whose files were all seen; tests run in it."""
    shutil.copytree(template, tmp_path / "made")
    monkeypatch.chdir(tmp_path / "made")
    assert run() == 0
    return tmp_path / "made"


def run(*overrides: str) -> int:
    return main(["--config", "config.toml", "--cache", "cache", *overrides])


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence on stderr."""
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("shards", ["all shards", "one shard"])
@pytest.mark.parametrize("name", CHANGES)
def test_another_content_is_refused(made: Path, name: str, shards: str, capsys: pytest.CaptureFixture[str]) -> None:
    if shards == "one shard":
        shutil.rmtree(made / "cache" / "shard-00001")
    CHANGES[name](made)
    before = files_of(made / "cache")
    for _ in range(2):  # once refused is not forgotten
        assert run() == 2
        error = error_of(capsys)
        assert error.startswith(f"error: the {name} of ")
        key = name.partition("'")[0].replace(" ", "_")
        assert f"cache has {getattr(Manifest.read(made / 'cache').identity, key)[:16]}…" in error
        assert "extract into another directory" in error
    assert files_of(made / "cache") == before


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ('data.files=["other.jsonl"]', "error: the data of data.files ['other.jsonl'] is not what"),
        (
            'data.files=["data.jsonl", "data.jsonl"]',
            "error: the data of data.files ['data.jsonl', 'data.jsonl'] is not",
        ),
        ("target.path=other", "error: the target's config.json or weights of target.path other is not what"),
        ('data.files=["none.jsonl"]', "error: data file none.jsonl does not exist"),
        ("target.path=none", "error: target.path is none, which is no folder"),
        ("cache.layers=[0, 1]", "error: cache was made with cache.layers = [0, 2, 3], the config says [0, 1]"),
        ("data.max_documents=3", "error: cache was made with data.max_documents = None, the config says 3"),
    ],
)
def test_another_configuration_is_refused(
    made: Path, override: str, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(made / "other.jsonl", records()[:9])
    make_random_target(made / "other", SHAPES["qwen3"], seed=9)
    for check in ([], ["--check"]):
        if check and "target.path=other" in override:
            continue  # it reads no weights
        assert run(*check, override) == 2
        assert error_of(capsys).startswith(start)


def test_the_same_content_elsewhere_is_the_same(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(made / "target", made / "moved")
    shutil.copy(made / "data.jsonl", made / "moved.jsonl")
    before = files_of(made / "cache")
    assert run("target.path=moved", 'data.files=["moved.jsonl"]') == 0
    assert "cache is complete: nothing to extract" in capsys.readouterr().out
    after = files_of(made / "cache")
    assert {name for name in after if after[name] != before[name]} == {SEEN_FILE}


def test_weights_are_read_when_their_state_has_changed(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run() == 0
    assert "hashing" not in capsys.readouterr().out
    (weights,) = (made / "target").glob("*.safetensors")
    os.utime(weights)
    for hashed in (True, False):
        assert run() == 0
        assert ("hashing" in capsys.readouterr().out) == hashed


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"identity": {}, "data": [], "target": []}', None])
def test_what_was_seen_is_no_part_of_the_cache(
    made: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged, another cache's, or none: all is read again."""
    seen = made / "cache" / SEEN_FILE
    if content is None:
        seen.unlink()
    else:
        seen.write_text(content)
    capsys.readouterr()
    assert run() == 0
    assert "hashing" in capsys.readouterr().out
    assert seen.exists()


def test_what_was_seen_of_another_cache_counts_for_nothing(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hidden files outlive a `rm -r cache/*`."""
    seen = (made / "cache" / SEEN_FILE).read_bytes()
    shutil.copy(made / "data.jsonl", made / "old.jsonl")
    shutil.rmtree(made / "cache")
    extract_here(Job.load(Path("config.toml"), ['data.files=["data.jsonl", "old.jsonl"]'], Path("cache")), monkeypatch)
    (made / "cache" / SEEN_FILE).write_bytes(seen)
    assert run() == 2
    assert "the data of data.files ['data.jsonl'] is not what cache was made with" in error_of(capsys)


@pytest.mark.parametrize("gone", ["target", "data.jsonl"])
def test_a_complete_cache_needs_neither_target_nor_data(
    made: Path, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has gone from where the manifest says that it was can't be compared, and that is said; the rest is."""
    before = files_of(made / "cache")
    (made / gone).rename(made / "away")
    capsys.readouterr()
    for _ in range(2):
        assert run() == 0
        assert capsys.readouterr().out.splitlines() == [
            f"extract: {gone} has gone, so it is not compared with cache",
            "cache is complete: nothing to extract",
        ]
    assert files_of(made / "cache") == before
    (change_data if gone == "target" else change_weights)(made)
    assert run() == 2
    assert "is not what cache was made with" in error_of(capsys)


def test_an_unfinished_cache_needs_both(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(made / "cache" / "shard-00001")
    for gone in ("data.jsonl", "target"):
        (made / gone).rename(made / "away")
        assert run() == 2
        assert f"{gone} " in error_of(capsys)
        (made / "away").rename(made / gone)
