"""The sections of a configuration that say what the programs do: `[extract]`, `[drafter]` and `[train]`, `[speculate]`.

They are here, and not with the programs, so that each program refuses a wrong value in any of them: one that is found
when training begins was paid for with the extraction before it.
"""

from dataclasses import dataclass
from typing import Literal

from shards.config import (
    MAX_LAYERS,
    CacheConfig,
    DataConfig,
    TargetConfig,
    require_path,
    require_positive,
    shown,
)
from shards.errors import UsageError

LayerType = Literal["full_attention", "sliding_attention"]
MAX_EPOCHS_OR_ROWS = 1 << 20  # of a run, of a step: far above any, and low enough to be counted out


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """On what the target runs. Nothing in it changes what a cache contains."""

    gpus: tuple[int, ...] | None = None  # one worker each; default: all visible ones, and without any one on the CPU

    def __post_init__(self) -> None:
        if self.gpus is not None and (not self.gpus or len(set(self.gpus)) < len(self.gpus) or min(self.gpus) < 0):
            raise UsageError(f"extract.gpus is {list(self.gpus)}: name at least one GPU, each once, counted from 0")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Sizes of the drafter. Its hidden size and vocabulary are the target's."""

    num_layers: int
    block_size: int  # B: slots of a block, the anchor's included
    target_layer_ids: tuple[int, ...]  # the context feature: these layers' outputs, in this order
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40_960  # recorded for serving engines; training positions end with the row
    attention_bias: bool = False
    layer_types: tuple[LayerType, ...] | None = None  # None: all full
    sliding_window: int | None = None  # tokens; for the sliding layers
    is_causal: bool | None = None  # inside the block. None: sliding layers are, full layers are not
    init_std: float = 0.02

    def __post_init__(self) -> None:
        positive = ("block_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        require_positive(self, "drafter", *positive, "rope_theta", "rms_norm_eps", "init_std")
        require_positive(self, "drafter", "max_position_embeddings")
        require_positive(self, "drafter", "num_layers", at_most=MAX_LAYERS)
        if self.block_size < 2:
            raise UsageError(f"drafter.block_size is {self.block_size}: it must be at least 2, the anchor and one slot")
        if self.head_dim % 2:
            raise UsageError(f"drafter.head_dim is {self.head_dim}: it must be even")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"drafter.num_attention_heads is {self.num_attention_heads}: it must be a multiple of "
                f"num_key_value_heads, {self.num_key_value_heads}"
            )
        if not self.target_layer_ids or len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            raise UsageError(
                f"drafter.target_layer_ids is {shown(list(self.target_layer_ids))}: it must name layers, each once"
            )
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise UsageError(
                f"drafter.layer_types has {len(self.layer_types)} entries: num_layers is {self.num_layers}"
            )
        has_sliding = "sliding_attention" in self.resolved_layer_types
        if has_sliding and self.sliding_window is None:
            raise UsageError("drafter.layer_types has sliding layers: drafter.sliding_window must be set")
        if self.sliding_window is not None:
            require_positive(self, "drafter", "sliding_window")
            if not has_sliding:
                raise UsageError("drafter.sliding_window has no effect: drafter.layer_types has no sliding layer")

    @property
    def resolved_layer_types(self) -> tuple[LayerType, ...]:
        return self.layer_types or ("full_attention",) * self.num_layers

    def layer_window(self, layer: int) -> int | None:
        return self.sliding_window if self.resolved_layer_types[layer] == "sliding_attention" else None

    def layer_is_causal(self, layer: int) -> bool:
        if self.is_causal is None:
            return self.resolved_layer_types[layer] == "sliding_attention"
        return self.is_causal


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run. Steps are optimizer steps everywhere."""

    gpus: tuple[int, ...] | None = None  # one process each; None: all that are visible, or one process on the CPU
    num_anchors: int  # N, per row
    rows_per_step: int  # the global batch, over all ranks
    rows_per_micro_step: int = 1  # per rank: what is in memory at once
    epochs: int = 6
    max_steps: int | None = None  # stop earlier than the epochs say; the learning rate schedule ends there too
    lr: float = 6e-4
    warmup_fraction: float = 0.04  # of all steps: linear from 0
    final_lr_fraction: float = 0.1  # of lr: where the cosine ends
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float = 1.0
    gamma: float | None = None  # decay of the slot weights, in slots; None: by block size
    loss: Literal["ce"] = "ce"
    precision: Literal["fp32", "bf16", "fp8"] = "bf16"  # of products; masters and moments are fp32 always
    attention: Literal["kernel", "torch"] = "kernel"  # on a GPU; "torch" takes any shape, in more time and memory
    capture: bool = True  # on a GPU: replay every step as one CUDA graph; False launches its kernels one by one
    recompute: Literal["none", "mlp", "layer"] = "none"  # in the backward, instead of keeping it in memory
    compile_cache: str = ".compile-cache"  # directory where compiled kernels are kept between runs
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500
    save_every: int = 500
    keep_checkpoints: int = 2
    max_bad_steps: int = 20  # so many non-finite steps in a row end the run

    def __post_init__(self) -> None:
        positive = ("num_anchors", "rows_per_micro_step", "lr", "eps", "clip_norm")
        every = ("log_every", "eval_every", "save_every", "keep_checkpoints", "max_bad_steps")
        require_positive(self, "train", *positive, *every)
        require_positive(self, "train", "rows_per_step", "epochs", at_most=MAX_EPOCHS_OR_ROWS)
        require_path("train.compile_cache", self.compile_cache)
        if self.max_steps is not None:
            require_positive(self, "train", "max_steps")
        if self.gamma is not None:
            require_positive(self, "train", "gamma")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise UsageError(f"train.betas is {shown(list(self.betas))}: it must be two numbers in [0, 1)")
        for key in ("warmup_fraction", "final_lr_fraction"):
            if not 0.0 <= getattr(self, key) <= 1.0:
                raise UsageError(f"train.{key} is {getattr(self, key)}: it must be in [0, 1]")
        if self.gpus is not None and (not self.gpus or len(set(self.gpus)) != len(self.gpus) or min(self.gpus) < 0):
            raise UsageError(f"train.gpus is {shown(list(self.gpus))}: it must name GPUs by number, each once")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"train.seed is {self.seed}: it must be in 0..2^63 − 1")
        for key in ("eval_every", "save_every"):
            if getattr(self, key) % self.log_every:
                raise UsageError(
                    f"train.{key} is {getattr(self, key)}: it must be a multiple of train.log_every, {self.log_every}, "
                    "because the device is only read at log intervals"
                )

    def num_micro_steps(self, world_size: int) -> int:
        """Micro-steps of one step on each rank; raise UsageError unless the global batch divides."""
        rows_per_round = world_size * self.rows_per_micro_step
        if self.rows_per_step % rows_per_round:
            below = self.rows_per_step // rows_per_round * rows_per_round
            fitting = [value for value in (below, below + rows_per_round) if value]
            raise UsageError(
                f"train.rows_per_step is {self.rows_per_step}: with {world_size} processes of "
                f"{self.rows_per_micro_step} rows a micro-step it must be a multiple of {rows_per_round}, for example "
                f"{' or '.join(map(str, fitting))}"
            )
        return self.rows_per_step // rows_per_round


@dataclass(frozen=True, kw_only=True)
class SpeculateConfig:
    """What live decoding is measured on."""

    prompts: str  # JSONL; each line has `messages` (ending with the user's turn) or `text` (to be continued)
    num_prompts: int | None = None  # the first so many; None: all
    max_new_tokens: int = 256  # of one answer

    def __post_init__(self) -> None:
        require_path("speculate.prompts", self.prompts)
        require_positive(self, "speculate", "max_new_tokens")
        if self.num_prompts is not None:
            require_positive(self, "speculate", "num_prompts")
        if self.max_new_tokens < 2:
            raise UsageError(
                f"speculate.max_new_tokens is {self.max_new_tokens}: it must be at least 2, "
                "because the first token of an answer needs no drafter"
            )


SECTIONS = {
    "target": TargetConfig,
    "data": DataConfig,
    "cache": CacheConfig,
    "extract": ExtractConfig,
    "drafter": DrafterConfig,
    "train": TrainConfig,
    "speculate": SpeculateConfig,
}
