"""The target, live: run over new tokens with its key-value cache, rewound to what was committed.

One sequence at a time. Its features are the outputs of the decoder layers that the drafter was trained on.
"""

import inspect
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from extract.target import Architecture, load_architecture, load_model
from shards.errors import UsageError
from train.published import DraftCheckpoint
from train.target_head import TargetHead

# How far rounding moves two logits against each other, in steps of the dtype's eps at the largest logit. Measured on
# SmolLM2-135M in bfloat16: from passes over 1, 8 and 128 tokens to each other, the gap of its two best moved by 0.35 on
# average and 2.8 at most, in 2304 comparisons; where the best one changed, the gap was 1.84 at most.
TIE_STEPS = 4


def read_architecture(folder: Path, dtype: str | None, device: torch.device) -> Architecture:
    """Read the target's config.json; raise UsageError for a target that can't be rewound. Reads no weights.

    Without `dtype` the target runs in its checkpoint's, and on a CPU, where bfloat16 is slow, in float32.
    """
    fast_dtype = torch.float32 if device.type == "cpu" else None
    architecture = load_architecture(folder, fast_dtype if dtype is None else getattr(torch, dtype))
    if architecture.other_kinds:
        raise UsageError(
            f"the target {folder} ({architecture.config.model_type}) has layers with a recurrent state, which can't be "
            "rewound to the last accepted token: speculative decoding needs a target with attention layers only"
        )
    return architecture


def check_match(architecture: Architecture, checkpoint: DraftCheckpoint) -> None:
    """Raise UsageError unless the drafter was made for a target of these sizes."""
    config = architecture.text_config
    pairs = {
        "hidden_size": (checkpoint.hidden_size, config.hidden_size),
        "vocab_size": (checkpoint.vocab_size, config.vocab_size),
        "number of layers": (checkpoint.num_target_layers, config.num_hidden_layers),
    }
    for name, (expected, found) in pairs.items():
        if expected != found:
            raise UsageError(
                f"the drafter {checkpoint.directory} is for a target with {name} {expected}, "
                f"the target {architecture.folder} has {found}: name the target that it was trained for"
            )
    layers = checkpoint.drafter.target_layer_ids
    if not all(0 <= layer < config.num_hidden_layers - 1 for layer in layers):
        raise UsageError(
            f"the drafter {checkpoint.directory} wants the target's layers {list(layers)}: "
            f"they must be in 0..{config.num_hidden_layers - 2}"
        )
    if not 0 <= checkpoint.mask_token_id < config.vocab_size:
        raise UsageError(
            f"the drafter {checkpoint.directory} has mask_token_id {checkpoint.mask_token_id}, "
            f"outside the target's embedding of {config.vocab_size} tokens"
        )


@dataclass(frozen=True, kw_only=True)
class LiveTarget:
    model: PreTrainedModel
    feature_layers: tuple[int, ...]
    stop_ids: frozenset[int]  # each ends an answer

    @classmethod
    def load(cls, architecture: Architecture, checkpoint: DraftCheckpoint, device: torch.device) -> "LiveTarget":
        model = load_model(architecture, architecture.text_config.num_hidden_layers, device)
        eos = model.generation_config.eos_token_id
        return cls(
            model=model,
            feature_layers=checkpoint.drafter.target_layer_ids,
            stop_ids=frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos]),
        )

    def head(self, checkpoint: DraftCheckpoint) -> TargetHead:
        """The target's raw embedding and head, with the factors that the drafter was trained with."""
        return TargetHead(
            embed_tokens_VH=self.model.get_input_embeddings().weight,
            lm_head_VH=self.model.get_output_embeddings().weight,
            input_embedding_scale=checkpoint.input_embedding_scale,
            output_multiplier=checkpoint.output_multiplier,
            final_logit_softcapping=checkpoint.final_logit_softcapping,
        )

    @cached_property
    def cache_argument(self) -> str:
        """What the model calls its key-value cache: transformers renamed it, and drops the old name in 5.40."""
        return "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> tuple[float, float]:
        """By how much the logits of two next tokens differ after `token_ids`, in one pass without a cache.

        And the gap below which the two are tied, because rounding may choose either: 0 in float32, where none is.
        """
        with torch.inference_mode():
            output = self.model(torch.tensor([token_ids], device=self.model.device), logits_to_keep=1)
        logits_V = output.logits[0, -1].float()
        is_rounded = self.model.dtype != torch.float32
        tie_gap = TIE_STEPS * torch.finfo(self.model.dtype).eps * logits_V.abs().max().item() if is_rounded else 0.0
        return abs(logits_V[first] - logits_V[second]).item(), tie_gap


class TargetSequence:
    """One sequence and its key-value cache."""

    def __init__(self, target: LiveTarget) -> None:
        self.target = target
        # Full layers for all, sliding ones too (their mask is by position): a sliding cache has dropped what a rewind
        # needs.
        self.cache = DynamicCache()

    @torch.inference_mode()
    def run(self, token_ids: list[int], *, num_choices: int) -> tuple[Tensor, Tensor]:
        """Append tokens; returns the logits [`num_choices`, V] after the last of them, and features [T, K·H]."""
        output = self.target.model(
            torch.tensor([token_ids], device=self.target.model.device),
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=num_choices,
            **{self.target.cache_argument: self.cache},
        )
        features_TF = torch.cat([output.hidden_states[layer + 1][0] for layer in self.target.feature_layers], dim=-1)
        return output.logits[0], features_TF

    def rewind(self, num_tokens: int) -> None:
        """Forget the last `num_tokens`."""
        if num_tokens:
            self.cache.crop(-num_tokens)
