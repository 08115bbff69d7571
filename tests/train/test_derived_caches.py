"""Caches that tools made: they train with the configuration that they fit, and are refused where they don't."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shards.errors import CacheError, UsageError
from shards.merge import merge
from shards.recode import recode
from shards.slicing import Choice, slice_cache
from tests.train.caches import worker_environment, write_cache, write_config
from train.config import RunConfig
from train.preflight import preflight

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tiny.toml, wide enough for any codec, and cache/."""
    directory = tmp_path_factory.mktemp("derived")
    write_config(directory / "tiny.toml")
    text = (directory / "tiny.toml").read_text().replace("hidden_size = 16", "hidden_size = 64")
    (directory / "tiny.toml").write_text(text)
    write_cache(directory / "cache", RunConfig.load(directory / "tiny.toml"))
    return directory


def train(workspace: Path, cache: Path, run: Path, *settings: str) -> dict[str, torch.Tensor]:
    """Train for two steps; the exported weights."""
    command = [sys.executable, "-m", "train", "--config", workspace / "tiny.toml", "--cache", cache, "--run", run]
    done = subprocess.run(
        [*map(str, command), "train.max_steps=2", *settings],
        cwd=ROOT,
        env=worker_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return load_file(run / "checkpoints/latest/model.safetensors")


def test_slices_merged_train_as_the_whole_does(workspace: Path, tmp_path: Path) -> None:
    for name, rows in (("a", (0, 5)), ("b", (5, 14))):
        slice_cache(workspace / "cache", tmp_path / name, Choice(rows=(rows,)))
    merge(tmp_path / "merged", [tmp_path / "a", tmp_path / "b"], different_data=False)
    expected = train(workspace, workspace / "cache", tmp_path / "run")
    found = train(workspace, tmp_path / "merged", tmp_path / "other run")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_slice_of_layers_trains_as_the_whole_does(workspace: Path, tmp_path: Path) -> None:
    slice_cache(workspace / "cache", tmp_path / "part", Choice(layers=("1", "4")))  # the drafter's
    expected = train(workspace, workspace / "cache", tmp_path / "run")
    found = train(workspace, tmp_path / "part", tmp_path / "other run", "cache.layers=[1,4]")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_recoded_cache_trains(workspace: Path, tmp_path: Path, codec: str) -> None:
    recode(workspace / "cache", tmp_path / codec, codec)
    found = train(workspace, tmp_path / codec, tmp_path / "run", f"cache.codec={codec}")
    assert all(weight.isfinite().all() for weight in found.values())


@pytest.mark.parametrize(
    ("choice", "settings", "message"),
    [
        (Choice(layers=("1", "4")), (), "was made with cache.layers = [1, 4], the config says [1, 2, 4]"),
        (Choice(split="heldout"), (), "has no rows to train on"),
        (Choice(split="train"), ("data.holdout_fraction=0.5",), "was made with data.holdout_fraction"),
    ],
)
def test_a_slice_is_refused_where_it_does_not_fit(
    workspace: Path, tmp_path: Path, choice: Choice, settings: tuple[str, ...], message: str
) -> None:
    slice_cache(workspace / "cache", tmp_path / "part", choice)
    config = RunConfig.load(workspace / "tiny.toml", settings)
    with pytest.raises(CacheError) as error:
        preflight(config, tmp_path / "part", tmp_path / "run", world_size=1, resume=False)
    assert message in str(error.value)


def test_a_recoded_cache_is_refused_by_the_configuration_of_the_other(workspace: Path, tmp_path: Path) -> None:
    recode(workspace / "cache", tmp_path / "int8", "int8")
    config = RunConfig.load(workspace / "tiny.toml")
    with pytest.raises(CacheError, match=r"was made with cache\.codec = 'int8', the config says 'bf16'"):
        preflight(config, tmp_path / "int8", tmp_path / "run", world_size=1, resume=False)


def test_a_run_does_not_go_on_with_other_rows(workspace: Path, tmp_path: Path) -> None:
    """A slice has the identity of its source, and the same configuration fits both."""
    train(workspace, workspace / "cache", tmp_path / "run")
    slice_cache(workspace / "cache", tmp_path / "part", Choice(rows=((0, 12),)))
    config = RunConfig.load(workspace / "tiny.toml", ["train.max_steps=2"])
    assert preflight(config, workspace / "cache", tmp_path / "run", world_size=1, resume=True).is_finished
    with pytest.raises(UsageError, match=r"was begun with identity\.plan = "):
        preflight(config, tmp_path / "part", tmp_path / "run", world_size=1, resume=True)
