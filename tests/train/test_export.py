"""The exported checkpoint: names, shapes and types of the tensors, and the keys of config.json."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from shards.config import CacheConfig, DataConfig, TargetConfig
from shards.sections import DrafterConfig, TrainConfig
from train.config import RunConfig
from train.drafter import Drafter, split_projections
from train.export import check_exported, export_drafter
from train.target_head import TargetHead

SLIDING, FULL = "sliding_attention", "full_attention"
BASE = RunConfig(
    target=TargetConfig(path="none", hidden_size=24, num_layers=12, vocab_size=50, mask_token_id=49),
    data=DataConfig(files=("none",)),
    cache=CacheConfig(row_tokens=64, layers=(1, 4, 9)),
    drafter=DrafterConfig(
        num_layers=3,
        block_size=8,
        target_layer_ids=(1, 9),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        intermediate_size=36,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
    ),
    train=TrainConfig(num_anchors=8, rows_per_step=1),
)
LAYER_SHAPES = {
    "input_layernorm": (24,),
    "post_attention_layernorm": (24,),
    "self_attn.q_proj": (40, 24),
    "self_attn.k_proj": (20, 24),
    "self_attn.v_proj": (20, 24),
    "self_attn.o_proj": (24, 40),
    "self_attn.q_norm": (10,),
    "self_attn.k_norm": (10,),
    "mlp.gate_proj": (36, 24),
    "mlp.up_proj": (36, 24),
    "mlp.down_proj": (24, 36),
}
PLAIN_HEAD = TargetHead(
    embed_tokens_VH=torch.zeros(50, 24),
    lm_head_VH=torch.zeros(50, 24),
    input_embedding_scale=1.0,
    output_multiplier=1.0,
    final_logit_softcapping=None,
)


def export(directory: Path, *, head: TargetHead = PLAIN_HEAD, **drafter: object) -> tuple[dict, Drafter]:
    """Export fresh weights; returns config.json and the drafter."""
    config = replace(BASE, drafter=replace(BASE.drafter, **drafter))
    module = Drafter(config.drafter, 24)
    module.init_weights(0)
    export_drafter(directory, module.state_dict(), config, head)
    return json.loads((directory / "config.json").read_text()), module


def test_tensors_are_the_weights_in_bf16_under_the_published_names(tmp_path):
    _, drafter = export(tmp_path)
    expected = {f"layers.{i}.{name}.weight": shape for i in range(3) for name, shape in LAYER_SHAPES.items()}
    expected |= {"fc.weight": (24, 2 * 24), "hidden_norm.weight": (24,), "norm.weight": (24,)}
    assert len(expected) == 11 * 3 + 3
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == expected  # noqa: SIM118
        for name, weight in split_projections(drafter.state_dict(), drafter.config).items():
            assert torch.equal(file.get_tensor(name), weight.bfloat16()), name
        assert file.metadata() == {"format": "pt"}  # which transformers insists on


def test_config_has_every_key_that_loaders_read(tmp_path):
    config, _ = export(tmp_path)
    dflash = {"mask_token_id": 49, "target_layer_ids": [1, 9], "block_size": 8}
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": 40_960,
        "vocab_size": 50,
        "tie_word_embeddings": False,
        "layer_types": [FULL] * 3,
        "use_sliding_window": False,
        "sliding_window": None,
        "num_target_layers": 12,
        "block_size": 8,
        "dflash_config": dflash,
    }
    assert {key: config[key] for key in expected} == expected
    assert "max_window_layers" in config


def test_what_equals_the_loaders_default_is_left_out(tmp_path):
    config, _ = export(tmp_path)
    keys = {"is_causal", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"}
    assert not keys & config.keys()
    assert not keys & config["dflash_config"].keys()


@pytest.mark.parametrize("is_causal", [True, False])
def test_causality_is_exported_when_it_is_set(tmp_path, is_causal):
    assert export(tmp_path, is_causal=is_causal)[0]["is_causal"] is is_causal


def test_scales_and_softcap_of_the_target_are_exported(tmp_path):
    head = replace(PLAIN_HEAD, input_embedding_scale=8.0, output_multiplier=0.25, final_logit_softcapping=30.0)
    config, _ = export(tmp_path, head=head)
    assert config["input_embedding_scale"] == 8.0
    assert config["output_multiplier"] == 0.25
    assert config["final_logit_softcapping"] == 30.0


def test_sliding_layers_are_exported(tmp_path):
    config, _ = export(tmp_path, layer_types=(SLIDING, SLIDING, FULL), sliding_window=32)
    assert config["layer_types"] == [SLIDING, SLIDING, FULL]
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 32)


def test_biases_are_exported_when_there_are_any(tmp_path):
    config, _ = export(tmp_path, attention_bias=True)
    assert config["attention_bias"] is True
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 15 * 3 + 3
        assert file.get_slice("layers.2.self_attn.k_proj.bias").get_shape() == [20]


@pytest.mark.parametrize("change", ["missing", "extra", "reshaped"])
def test_a_name_or_shape_that_is_off_does_not_get_out(change):
    tensors = split_projections(Drafter(BASE.drafter, 24).state_dict(), BASE.drafter)
    if change == "missing":
        del tensors["layers.1.self_attn.k_norm.weight"]
    elif change == "extra":
        tensors["rotary_emb.inv_freq"] = torch.zeros(5)
    else:
        tensors["fc.weight"] = tensors["fc.weight"].T
    with pytest.raises(AssertionError, match=r"k_norm|rotary_emb|fc\.weight"):
        check_exported(tensors, BASE)
