"""Runs that begin with another drafter's weights: what is taken over, what is refused, what is written down."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shards.errors import UsageError
from tests.train.caches import write_config
from tests.train.test_checkpoint import new_trainer
from train.config import RunConfig
from train.export import export_drafter, exported_config
from train.start import START_FILE, record_start, start_notes, start_weights

WIDE = ("target.hidden_size=192", "drafter.attention_bias=true")


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return RunConfig.load(write_config(folder / "tiny.toml"), overrides)


def starting_from(config: RunConfig, directory: Path) -> RunConfig:
    return replace(config, train=replace(config.train, init_from=str(directory)))


def export(config: RunConfig, directory: Path, step: int = 5) -> Path:
    trainer = new_trainer(config, step=step)
    directory.mkdir(parents=True)
    export_drafter(directory, trainer.flat.masters_by_name, config, exported_config(config, trainer.head))
    return directory


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_export_and_start_are_inverse(tmp_path: Path, codec: str) -> None:
    """To the bit, but for fc where a codec rotates: turned there and back in fp32, then rounded to bf16 anew.

    64 products of 2⁻²⁴ each bound what turning adds; only bits of bf16 that lie below that may change.
    """
    config = config_of(tmp_path, *WIDE, f"cache.codec={codec}")
    first = export(config, tmp_path / "first")
    config = starting_from(config, first)
    assert start_notes(config) == []
    trainer = new_trainer(config, step=6)
    trainer.flat.begin_with(start_weights(config))
    second = tmp_path / "second"
    second.mkdir()
    export_drafter(second, trainer.flat.masters_by_name, config, exported_config(config, trainer.head))
    before, after = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        if name == "fc.weight" and codec != "bf16":
            torch.testing.assert_close(after[name].float(), before[name].float(), rtol=2**-8, atol=64 * 2**-24)
        else:
            assert torch.equal(before[name], after[name]), name
    assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()


def test_a_start_means_the_same_in_either_basis(tmp_path: Path) -> None:
    """The weights of a run on plain features, taken over by one whose cache has them rotated, and exported by that."""
    first = export(config_of(tmp_path, *WIDE), tmp_path / "first")
    config = starting_from(config_of(tmp_path, *WIDE, "cache.codec=int8"), first)
    rotated = start_weights(config)["fc.weight"]
    published = load_file(first / "model.safetensors")["fc.weight"].float()
    assert (rotated - published).abs().max() > 0.1  # or nothing was turned
    (tmp_path / "second").mkdir()
    export_drafter(
        tmp_path / "second", start_weights(config), config, exported_config(config, new_trainer(config).head)
    )
    exported = load_file(tmp_path / "second/model.safetensors")["fc.weight"].float()
    torch.testing.assert_close(exported, published, rtol=2**-8, atol=64 * 2**-24)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_follow_the_masters(tmp_path: Path, precision: str) -> None:
    config = config_of(tmp_path, f"train.precision={precision}")
    config = starting_from(config, export(config, tmp_path / "first"))
    trainer = new_trainer(config, step=6)
    trainer.flat.begin_with(start_weights(config))
    for name, parameter in trainer.drafter.named_parameters():
        assert torch.equal(parameter.float(), trainer.flat.masters_by_name[name]), name


def test_a_run_gives_its_latest_checkpoint(tmp_path: Path) -> None:
    config, run = config_of(tmp_path), tmp_path / "run"
    for step in (2, 10):
        export(config, run / f"checkpoints/step-{step}", step)
    config = starting_from(config, run)
    weights = load_file(run / "checkpoints/step-10/model.safetensors")
    assert torch.equal(start_weights(config)["fc.weight"], weights["fc.weight"].float())
    another = tmp_path / "another"
    another.mkdir()
    record_start(another, config)
    content = (run / "checkpoints/step-10/model.safetensors").read_bytes()
    assert json.loads((another / START_FILE).read_text()) == {
        "directory": str(run / "checkpoints/step-10"),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


REFUSED = {
    "drafter.num_layers=1": "has drafter.num_layers = 2, this run has 1: configure the drafter that --init-from names",
    "drafter.target_layer_ids=[4, 1]": "has drafter.target_layer_ids = (1, 4), this run has (4, 1)",
    "drafter.num_key_value_heads=4": "drafter.num_key_value_heads = 2, this run has 4",
    "drafter.intermediate_size=32": "drafter.intermediate_size = 24, this run has 32",
    "drafter.rope_theta=1e6": "drafter.rope_theta = 10000.0, this run has 1000000.0",
    "drafter.attention_bias=true": "drafter.attention_bias = False, this run has True",
    "target.hidden_size=32": "target.hidden_size = 16, this run has 32",
    "target.num_layers=7": "target.num_layers = 6, this run has 7",
    "target.vocab_size=41": "target.vocab_size = 40, this run has 41",
}


@pytest.mark.parametrize("override", REFUSED)
def test_another_drafter_is_refused(tmp_path: Path, override: str) -> None:
    first = export(config_of(tmp_path), tmp_path / "first")
    with pytest.raises(UsageError) as error:
        start_notes(starting_from(config_of(tmp_path, override), first))
    assert str(first) in str(error.value)
    assert REFUSED[override] in str(error.value)


NOTED = {
    "drafter.block_size=8": "drafter.block_size = 4, this run has 8",
    "target.mask_token_id=38": "target.mask_token_id = 39, this run has 38",
    "drafter.is_causal=true": "drafter.is_causal = None, this run has True",
}


@pytest.mark.parametrize("override", NOTED)
def test_what_training_on_may_change_is_said(tmp_path: Path, override: str) -> None:
    first = export(config_of(tmp_path), tmp_path / "first")
    (note,) = start_notes(starting_from(config_of(tmp_path, override), first))
    assert note == f"{first} was trained with {NOTED[override]}"


def test_weights_that_are_not_the_configs_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    first = export(config, tmp_path / "first")
    tensors = load_file(first / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, first / "model.safetensors")
    with pytest.raises(UsageError, match=r"lacks the tensor layers\.1\.mlp\.up_proj\.weight"):
        start_notes(starting_from(config, first))
