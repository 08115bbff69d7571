"""`--check`: figures of what would be made, and of what is there, without weights."""

import json
import shutil
from pathlib import Path
from typing import get_args

import pytest

from extract.__main__ import main
from extract.sizes import LEFT_OUT_BECAUSE
from shards.documents import Reason
from shards.manifest import Manifest
from tests.extract.tiny import LAYERS, ROW_TOKENS, SIZES, files_of, records, write_jsonl

ROOT = Path(__file__).parents[2]


def test_check_prints_the_plan_and_writes_nothing(
    project: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "target" / "model-00001-of-00001.safetensors").unlink()  # no weights are needed
    before, manifest = files_of(copy), Manifest.read(project / "cache")
    arguments = ["--config", str(copy / "config.toml"), "--cache", str(copy / "cache"), "--check"]
    assert main([*arguments, "--json", "--tokens-per-second", "1000"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["rows"] == manifest.plan.num_rows
    assert figures["shards"] == manifest.plan.num_shards
    assert figures["tokens"] == manifest.plan.num_tokens
    assert figures["bytes_per_slot"] == len(LAYERS) * SIZES["hidden_size"] * 2 + 14
    assert figures["fill"] == manifest.plan.num_tokens / (manifest.plan.num_rows * ROW_TOKENS)
    assert figures["disk_write_bytes_per_second"] == round(1000 * figures["bytes_per_token"])
    stored = sum(len(content) for name, content in files_of(project / "cache").items() if name.startswith("shard-"))
    assert stored < figures["total_bytes"]
    assert main(arguments) == 0
    assert "40 documents" in capsys.readouterr().out
    assert files_of(copy) == before


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.6-27b"])
def test_check_without_data_gives_figures_for_a_million_tokens(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(ROOT / "configs" / f"{name}.toml"), "data.files=['none.jsonl']", "--check"]
    assert main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    hidden_size = {"qwen3-8b": 4096, "qwen3.6-27b": 5120}[name]
    assert figures["bytes_per_slot"] == 5 * hidden_size * 2 + 14
    assert figures["bytes_per_million_tokens"] == round(1e6 * figures["bytes_per_slot"] / 0.98)
    assert figures["workers"] == 5
    assert "rows" not in figures
    assert main(arguments) == 0
    assert "for a million tokens" in capsys.readouterr().out


def test_check_tells_what_is_there_and_refuses_what_does_not_match(
    project: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the data has gone: the plan is the cache's."""
    shutil.copytree(project / "cache", copy / "cache")
    shutil.rmtree(copy / "cache" / "shard-00001")
    manifest, before = Manifest.read(copy / "cache"), files_of(copy)
    arguments = ["--config", str(copy / "config.toml"), "--cache", str(copy / "cache"), "--check"]
    assert main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["published_shards"] == manifest.plan.num_shards - 1
    assert figures["tokens"] == manifest.plan.num_tokens
    assert main(arguments) == 0
    assert f"there   {manifest.plan.num_shards - 1} of {manifest.plan.num_shards} shards" in capsys.readouterr().out
    assert main([*arguments, "cache.codec=int8", "target.hidden_size=64"]) == 2
    assert "was made with target.hidden_size = 32, the config says 64" in capsys.readouterr().err
    assert files_of(copy) == before
    write_jsonl(copy / "data.jsonl", records()[1:])
    assert main(arguments) == 2
    assert "the data of data.files" in capsys.readouterr().err


@pytest.mark.parametrize("check", [["--check"], []], ids=["check", "extract"])
@pytest.mark.parametrize(
    "override",
    ["train.lr=fast", "train.lr=-1", "train.max_steps=2.5", "drafter.head_dim=7", "speculate.max_new_tokens=1"],
)
def test_what_a_later_program_would_refuse_is_refused_before_anything_is_extracted(
    copy: Path, override: str, check: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = Path(copy / "config.toml")
    sections = (ROOT / "configs/smollm2-135m.toml").read_text(encoding="utf-8").partition("[drafter]")
    config.write_text(config.read_text(encoding="utf-8") + "".join(sections[1:]), encoding="utf-8")
    before = files_of(copy)
    assert main(["--config", str(config), "--cache", str(copy / "new" / "cache"), *check, override]) == 2
    assert capsys.readouterr().err.startswith(f"error: {override.partition('=')[0]} is ")
    assert files_of(copy) == before
    assert not (copy / "new").exists()


def test_every_reason_to_leave_a_record_out_is_explained() -> None:
    assert LEFT_OUT_BECAUSE.keys() == set(get_args(Reason))
