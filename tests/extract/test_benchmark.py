"""The benchmark of extraction runs without a GPU, and measures nothing whose result is wrong."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import extract
from extract.job import Job
from shards.errors import RunError

CONFIG = """
[target]
path = "none"
dtype = "float32"
hidden_size = 64
num_layers = 4
vocab_size = 320
mask_token_id = 3
[data]
files = ["none"]
[cache]
row_tokens = 128
layers = [0, 2]
shard_bytes = 70_000
"""


def arguments(directory: Path, *overrides: str) -> argparse.Namespace:
    (directory / "config.toml").write_text(CONFIG)
    config = directory / "config.toml"
    return argparse.Namespace(
        config=config, overrides=overrides, directory=directory, rows=4, mean_tokens=40.0, json=True
    )


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_it_runs_and_leaves_nothing(tmp_path: Path, codec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert extract.run(arguments(tmp_path, f"cache.codec={codec!r}")) == 0
    result = json.loads(capsys.readouterr().out)
    stage, bare = result["stage_tokens_per_second"], result["bare_tokens_per_second"]
    assert result["ratio_to_bare"] == pytest.approx(stage / bare, rel=1e-2)
    assert 0 < result["error_of_codec"] <= result["error_against_documents_alone"] + 1e-6
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_wrong_result_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each document had been run with its neighbours."""
    alone = extract.states_alone

    def shifted(*args: object, **kwargs: object) -> dict[int, torch.Tensor]:
        return {layer: states.roll(1, 0) for layer, states in alone(*args, **kwargs).items()}

    monkeypatch.setattr(extract, "states_alone", shifted)
    with pytest.raises(RunError, match="stored features are wrong: error_against_documents_alone is "):
        extract.run(arguments(tmp_path))


def test_a_config_of_no_known_shape_is_refused(tmp_path: Path) -> None:
    asked = arguments(tmp_path, "target.hidden_size=128")
    with pytest.raises(ValueError, match="no shape of tiny, "):
        extract.shape_of(Job.load(asked.config, asked.overrides))
