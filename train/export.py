"""The drafter as serving engines load it: `model.safetensors` in bf16 and a `config.json`, checked name by name."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shards.codec import CODECS
from train.config import RunConfig
from train.decode import rotate_columns, unrotate_columns
from train.drafter import split_projections
from train.target_head import TargetHead

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
FC_WEIGHT = "fc.weight"


def export_drafter(
    directory: Path, masters: dict[str, Tensor], config: RunConfig, served_config: dict[str, Any]
) -> None:
    """Write the drafter with these fp32 weights, in bf16, and its config.json into `directory`, which exists."""
    published = split_projections(to_target_basis(masters, config), config.drafter)
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in published.items()}
    check_exported(tensors, config)
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    (directory / CONFIG_FILE).write_text(json.dumps(served_config, indent=2) + "\n", encoding="utf-8")


def to_target_basis(masters: dict[str, Tensor], config: RunConfig) -> dict[str, Tensor]:
    """The weights for features as the target gives them: fc is un-rotated if the cache's codec rotates."""
    if not CODECS[config.cache.codec].is_rotated:
        return masters
    return masters | {FC_WEIGHT: unrotate_columns(masters[FC_WEIGHT], config.target.hidden_size)}


def from_target_basis(weights: dict[str, Tensor], config: RunConfig) -> dict[str, Tensor]:
    """The inverse of `to_target_basis`, of fp32 weights."""
    if not CODECS[config.cache.codec].is_rotated:
        return weights
    return weights | {FC_WEIGHT: rotate_columns(weights[FC_WEIGHT], config.target.hidden_size)}


def exported_shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint without biases: 11·L + 3 names and their shapes."""
    drafter, hidden = config.drafter, config.target.hidden_size
    query = drafter.num_attention_heads * drafter.head_dim
    key = drafter.num_key_value_heads * drafter.head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (drafter.head_dim,),
        "self_attn.k_norm.weight": (drafter.head_dim,),
        "mlp.gate_proj.weight": (drafter.intermediate_size, hidden),
        "mlp.up_proj.weight": (drafter.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, drafter.intermediate_size),
    }
    if drafter.attention_bias:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            layer[f"self_attn.{name}.bias"] = layer[f"self_attn.{name}.weight"][:1]
    shapes = {f"layers.{i}.{name}": shape for i in range(drafter.num_layers) for name, shape in layer.items()}
    return shapes | {
        FC_WEIGHT: (hidden, len(drafter.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }


def check_exported(tensors: dict[str, Tensor], config: RunConfig) -> None:
    """Engines ignore what they don't know in silence, so a name or shape that is off must not get out."""
    expected, found = exported_shapes(config), {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    assert not wrong, f"exported tensors {wrong}: {[(expected.get(n), found.get(n)) for n in wrong]}"


def exported_config(config: RunConfig, head: TargetHead) -> dict[str, Any]:
    """config.json: a Qwen3 config plus what DFlash needs. What equals the loaders' default is left out.

    The target's factors stand in `dflash_config`, where both the published client and SGLang look for them.
    """
    drafter, target = config.drafter, config.target
    layer_types = list(drafter.resolved_layer_types)
    uses_sliding = "sliding_attention" in layer_types
    dflash_config: dict[str, Any] = {
        "mask_token_id": target.mask_token_id,
        "target_layer_ids": list(drafter.target_layer_ids),
        "block_size": drafter.block_size,
    }
    exported: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_hidden_layers": drafter.num_layers,
        "num_attention_heads": drafter.num_attention_heads,
        "num_key_value_heads": drafter.num_key_value_heads,
        "head_dim": drafter.head_dim,
        "attention_bias": drafter.attention_bias,
        "attention_dropout": 0.0,
        "initializer_range": drafter.init_std,
        "rms_norm_eps": drafter.rms_norm_eps,
        "rope_theta": drafter.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": drafter.rope_theta},
        "max_position_embeddings": drafter.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "layer_types": layer_types,
        "use_sliding_window": uses_sliding,
        "sliding_window": drafter.sliding_window,
        "max_window_layers": layer_types.index("sliding_attention") if uses_sliding else drafter.num_layers,
        "num_target_layers": target.num_layers,
        "block_size": drafter.block_size,
        "dflash_config": dflash_config,
    }
    if drafter.is_causal is not None:
        exported["is_causal"] = drafter.is_causal
    if head.input_embedding_scale != 1.0:
        dflash_config["input_embedding_scale"] = head.input_embedding_scale
    if head.output_multiplier != 1.0:
        dflash_config["output_multiplier"] = head.output_multiplier
    if head.final_logit_softcapping is not None:
        dflash_config["final_logit_softcapping"] = head.final_logit_softcapping
    return exported
