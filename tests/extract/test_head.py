"""The frozen head: what is stored embeds and predicts as the target does, or the target is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from benchmarks.random_target import make_random_target
from extract.head import Head, read_head
from extract.target import read_architecture
from shards.config import CacheConfig, TargetConfig
from shards.errors import UsageError
from shards.schema import HEAD_CONFIG_FILE, HEAD_FILE
from tests.extract.tiny import SHAPES, SIZES

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def head_of(folder: Path, **sizes: int) -> Head:
    config = TargetConfig(path=str(folder), dtype="float32", mask_token_id=3, **sizes)
    return read_head(read_architecture(config, CacheConfig(row_tokens=32, layers=(0, 1))))


def save_model(folder: Path, config: PreTrainedConfig) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # large enough for a cap on logits to bend them
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", SHAPES)
def test_stored_tensors_are_the_target_s(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "t"
    make_random_target(folder, SHAPES[name])
    sizes = {key: SIZES[key] for key in ("hidden_size", "num_layers", "vocab_size")}
    head = head_of(folder, **sizes)
    (tmp_path / "target").mkdir()
    head.write(tmp_path)
    stored, scalars = load_file(tmp_path / HEAD_FILE), json.loads((tmp_path / HEAD_CONFIG_FILE).read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(stored["embed_tokens"], model.get_input_embeddings().weight)
    assert ("lm_head" in stored) != SHAPES[name].tied
    assert torch.equal(stored.get("lm_head", stored["embed_tokens"]), model.get_output_embeddings().weight)
    assert scalars == {
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "tied": SHAPES[name].tied,
    }


SCALED = {
    "gemma3: embedding times the root of H, capped logits": (
        AutoConfig.for_model("gemma3_text", **SMALL, final_logit_softcapping=5.0),
        (32**0.5, 1.0, 5.0),
    ),
    "granite: embedding multiplied, logits divided": (
        AutoConfig.for_model("granite", **SMALL, embedding_multiplier=12.0, logits_scaling=8.0),
        (12.0, 1 / 8, None),
    ),
    "cohere: logits multiplied": (AutoConfig.for_model("cohere", **SMALL, logit_scale=0.25), (1.0, 0.25, None)),
}


@pytest.mark.parametrize("name", SCALED)
def test_scales_are_found(tmp_path: Path, name: str) -> None:
    config, (scale, multiplier, softcap) = SCALED[name]
    head = head_of(save_model(tmp_path / "t", config), hidden_size=32, num_layers=3, vocab_size=100)
    assert head.input_embedding_scale == pytest.approx(scale)
    assert head.output_multiplier == pytest.approx(multiplier)
    assert head.final_logit_softcapping == softcap


UNKNOWN = {  # families that read as known ones do and compute something else
    "logits multiplied by what granite divides by": (
        AutoConfig.for_model("hyperclovax", **SMALL, logits_scaling=8.0),
        "(hyperclovax) does something to its output head that is not known here",
    ),
    "a norm after the embedding": (
        AutoConfig.for_model("nanochat", **SMALL),
        "(nanochat) does something to its input embedding that is not known here",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_refused(tmp_path: Path, name: str) -> None:
    config, message = UNKNOWN[name]
    folder = save_model(tmp_path / "t", config)
    with pytest.raises(UsageError) as raised:
        head_of(folder, hidden_size=32, num_layers=3, vocab_size=100)
    assert message in str(raised.value)


def test_a_head_with_a_bias_is_refused(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SMALL.items() if key != "head_dim"}
    folder = save_model(tmp_path / "t", AutoConfig.for_model("phi", **sizes))
    with pytest.raises(UsageError, match="has a bias"):
        head_of(folder, hidden_size=32, num_layers=3, vocab_size=100)
