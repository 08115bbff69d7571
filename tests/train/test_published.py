"""Exported drafters read back, published spellings of the same config, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shards.errors import UsageError
from tests.speculate.tiny import DRAFTER, TARGETS, Scale, make_drafter, run_config
from train.drafter import split_projections
from train.published import DraftCheckpoint

SHAPE = TARGETS["qwen3"]
SLIDING = replace(
    DRAFTER, layer_types=("full_attention", "sliding_attention"), sliding_window=7, is_causal=False, attention_bias=True
)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_drafter(tmp_path / "drafter", run_config(tmp_path, SHAPE, DRAFTER))


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("config", [DRAFTER, SLIDING, replace(DRAFTER, is_causal=True)])
def test_what_training_exports_is_read_back(tmp_path: Path, config: Any) -> None:
    scale = Scale(input_embedding_scale=5.5, output_multiplier=0.25, final_logit_softcapping=30.0)
    checkpoint = DraftCheckpoint.read(make_drafter(tmp_path / "drafter", run_config(tmp_path, SHAPE, config), scale))
    assert replace(checkpoint.drafter, layer_types=config.layer_types) == config
    assert checkpoint.drafter.resolved_layer_types == config.resolved_layer_types
    assert (checkpoint.hidden_size, checkpoint.vocab_size, checkpoint.num_target_layers) == (32, 264, 5)
    assert checkpoint.mask_token_id == 3
    assert checkpoint.input_embedding_scale == 5.5
    assert checkpoint.output_multiplier == 0.25
    assert checkpoint.final_logit_softcapping == 30.0
    drafter = checkpoint.load_drafter(CPU, torch.float32)
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    loaded = split_projections(drafter.state_dict(), config)
    assert loaded.keys() == stored.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, stored[name].float(), rtol=0, atol=0)


def test_factors_that_are_not_exported_are_neutral(folder: Path) -> None:
    checkpoint = DraftCheckpoint.read(folder)
    assert (checkpoint.input_embedding_scale, checkpoint.output_multiplier) == (1.0, 1.0)
    assert checkpoint.final_logit_softcapping is None


SPELLINGS = {
    "rope_parameters only": lambda values: [values.pop("rope_theta"), values.pop("rope_scaling")],
    "rope_theta only": lambda values: values.pop("rope_parameters"),
    "block size on top only": lambda values: values["dflash_config"].pop("block_size"),
    "block size inside only": lambda values: values.pop("block_size"),
    "dflash_config wins": lambda values: values.update(block_size=16, mask_token_id=0),
    "no layer types": lambda values: values.pop("layer_types"),
    "a window without sliding layers": lambda values: values.update(sliding_window=4096),
    "no softcap, as zero": lambda values: values.update(final_logit_softcapping=0.0),
    "keys that mean nothing here": lambda values: values.update(auto_map={}, bos_token_id=1, use_cache=True),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_mean_the_same(folder: Path, spelling: str) -> None:
    before = DraftCheckpoint.read(folder)
    assert DraftCheckpoint.read(edit(folder, SPELLINGS[spelling])) == before


def test_sliding_layers_follow_from_max_window_layers(folder: Path) -> None:
    edit(folder, lambda values: values.pop("layer_types"))
    edit(folder, lambda values: values.update(use_sliding_window=True, sliding_window=9, max_window_layers=1))
    drafter = DraftCheckpoint.read(folder).drafter
    assert drafter.layer_types == ("full_attention", "sliding_attention")
    assert drafter.sliding_window == 9


BAD_CONFIGS = {
    "lacks the key mask_token_id": lambda values: values["dflash_config"].pop("mask_token_id"),
    "lacks the key target_layer_ids": lambda values: values["dflash_config"].pop("target_layer_ids"),
    "lacks the key rope_theta": lambda values: [values.pop("rope_theta"), values.pop("rope_parameters")],
    "lacks the key head_dim": lambda values: values.pop("head_dim"),
    "rotary scaling 'yarn'": lambda values: values.update(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "hidden_act 'gelu'": lambda values: values.update(hidden_act="gelu"),
    "layer_types has": lambda values: values.update(layer_types=["linear_attention"] * 2),
    "layer_types has 1 entries": lambda values: values.update(layer_types=["full_attention"]),
    "must be a multiple of num_key_value_heads": lambda values: values.update(num_attention_heads=3),
    "can't be used": lambda values: values.update(hidden_size="wide"),
    "must be JSON objects": lambda values: values.update(dflash_config=[1]),
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_a_config_that_cannot_be_followed_is_refused(folder: Path, message: str) -> None:
    edit(folder, BAD_CONFIGS[message])
    with pytest.raises(UsageError, match=message) as error:
        DraftCheckpoint.read(folder)
    assert str(folder / "config.json") in str(error.value)


@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_a_config_that_is_none_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match=r"config\.json"):
        DraftCheckpoint.read(folder)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        DraftCheckpoint.read(tmp_path)


BAD_WEIGHTS = {
    "lacks the tensor norm.weight": lambda tensors: tensors.pop("norm.weight"),
    "has a tensor selector.weight": lambda tensors: tensors.update({"selector.weight": torch.zeros(2)}),
    r"fc.weight of shape \[32, 64\]": lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 64)}),
}


@pytest.mark.parametrize("message", BAD_WEIGHTS)
def test_weights_that_are_not_the_configs_are_refused(folder: Path, message: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    BAD_WEIGHTS[message](tensors)
    save_file(tensors, path)
    with pytest.raises(UsageError, match=message):
        DraftCheckpoint.read(folder).load_drafter(CPU, torch.float32)


@pytest.mark.parametrize("keep_bytes", [None, 0, 100, -1])
def test_weights_that_cannot_be_read_are_refused(folder: Path, keep_bytes: int | None) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    if keep_bytes is not None:
        path.write_bytes(content[:keep_bytes])
    with pytest.raises(UsageError, match="cannot be read"):
        DraftCheckpoint.read(folder).load_drafter(CPU, torch.float32)
