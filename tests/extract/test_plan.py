"""`python -m extract plan`: its figures are those of the extraction that follows, and it leaves no trace."""

import json
from pathlib import Path

import numpy as np
import pytest

from extract.__main__ import main
from shards.manifest import Manifest
from shards.schema import PLAN_DIRECTORY, PlanArrays
from tests.extract.tiny import ROW_TOKENS, files_of


def test_the_figures_are_those_of_the_cache(project: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "target" / "model-00001-of-00001.safetensors").unlink()  # no weights are needed
    before = files_of(copy)
    arguments = ["plan", "--config", str(copy / "config.toml"), "--cache", str(copy / "cache")]
    assert main([*arguments, "--json", "--tokens-per-second", "10", "extract.gpus=[0, 1]"]) == 0
    figures = json.loads(capsys.readouterr().out)
    made, plan = Manifest.read(project / "cache").plan, PlanArrays.read(project / "cache" / PLAN_DIRECTORY)
    assert {key: figures[key] for key in ("documents", "tokens", "supervised_tokens", "rows", "shards")} == {
        key: getattr(made, f"num_{key}") for key in ("documents", "tokens", "supervised_tokens", "rows", "shards")
    }
    assert figures["fill"] == made.num_tokens / made.num_rows / ROW_TOKENS
    assert figures["hours"] == pytest.approx(made.num_tokens / 20 / 3600)
    supervised = [int(tokens.sum()) for tokens in np.split(plan.loss_mask, plan.token_offsets[1:-1])]
    for group, column in (("sources", plan.document_source), ("splits", plan.document_split)):
        names = {"sources": made.sources, "splits": ("train", "heldout")}[group]
        for i, name in enumerate(names):
            assert figures[group][name] == {
                "documents": np.count_nonzero(column == i),
                "tokens": plan.document_tokens[column == i].sum(),
                "supervised_tokens": np.array(supervised)[column == i].sum(),
            }
    stored = sum(len(content) for name, content in files_of(project / "cache").items() if name.startswith("shard-"))
    assert figures["bytes"].keys() == {"bf16"}  # 32 channels are too few for the others
    assert stored < figures["bytes"]["bf16"]
    assert main(arguments) == 0
    assert f"{made.num_rows:,} of {ROW_TOKENS} slots" in capsys.readouterr().out
    assert files_of(copy) == before


def test_what_is_missing_is_one_sentence(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--config", str(copy / "config.toml")]
    assert main([*arguments, 'data.files=["none"]']) == 2
    assert capsys.readouterr().err == (
        "error: data file none does not exist: data.files must name files, folders or patterns\n"
    )
