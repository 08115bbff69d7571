"""A tiny random target on disk, and a random drafter for it as training exports one."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.random_target import MASK_ID, TargetShape, make_random_target
from shards.config import CacheConfig, DataConfig, TargetConfig
from shards.sections import DrafterConfig, TrainConfig
from train.config import RunConfig
from train.drafter import Drafter
from train.export import export_drafter
from train.target_head import TargetHead

SIZES = {
    "hidden_size": 32,
    "num_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 264,
    "rope_theta": 1e4,
}
TARGETS = {
    "llama, tied": TargetShape(**SIZES, family="llama", tied=True),
    "qwen3": TargetShape(**SIZES),
    "qwen3, sliding": TargetShape(**SIZES, sliding_window=6),
}
DRAFTER = DrafterConfig(
    num_layers=2,
    block_size=4,
    target_layer_ids=(0, 2, 3),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=28,
    rope_theta=1e4,
)
PAIRS = {  # target and drafter
    "llama, tied": (TARGETS["llama, tied"], DRAFTER),
    "qwen3": (TARGETS["qwen3"], DRAFTER),
    "both sliding": (
        TARGETS["qwen3, sliding"],
        dataclasses.replace(DRAFTER, layer_types=("full_attention", "sliding_attention"), sliding_window=5),
    ),
}
PROMPTS = [[72, 101, 108, 108, 111], [65], list(range(97, 117))]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The factors that a drafter's config carries."""

    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None


def make_target(folder: Path, shape: TargetShape) -> Path:
    make_random_target(folder, shape, seed=3)
    return folder


def run_config(target: Path, shape: TargetShape, drafter: DrafterConfig) -> RunConfig:
    return RunConfig(
        target=TargetConfig(
            path=str(target),
            dtype="float32",
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            vocab_size=shape.vocab_size,
            mask_token_id=MASK_ID,
        ),
        data=DataConfig(files=("none.jsonl",)),
        cache=CacheConfig(row_tokens=64, layers=tuple(sorted(drafter.target_layer_ids))),
        drafter=drafter,
        train=TrainConfig(num_anchors=4, rows_per_step=1, gamma=2.0),
    )


def make_drafter(folder: Path, config: RunConfig, scale: Scale | None = None) -> Path:
    """Export a drafter whose every parameter is random, so that one that is left out shows."""
    scale = scale or Scale()
    drafter = Drafter(config.drafter, config.target.hidden_size)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in drafter.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * values if "norm" in name else 0.3 * values
    unused = torch.empty(0)
    folder.mkdir(parents=True)
    export_drafter(
        folder,
        drafter.state_dict(),
        config,
        TargetHead(
            embed_tokens_VH=unused,
            lm_head_VH=unused,
            input_embedding_scale=scale.input_embedding_scale,
            output_multiplier=scale.output_multiplier,
            final_logit_softcapping=scale.final_logit_softcapping,
        ),
    )
    return folder
