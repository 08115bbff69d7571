"""A drafter as it was exported: `config.json` and `model.safetensors`, from this project's training or published.

Everything that decoding needs is read from the checkpoint's own config.json. What this program would run otherwise
than the checkpoint means it (a rotary scaling, another activation, further weights) is refused.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shards.errors import UsageError
from shards.sections import DrafterConfig, LayerType
from train.drafter import Drafter, join_projections, split_projections
from train.export import CONFIG_FILE, WEIGHTS_FILE


@dataclass(frozen=True, kw_only=True)
class DraftCheckpoint:
    """What a checkpoint's config.json says of the drafter, and of the target that it was trained for."""

    directory: Path
    drafter: DrafterConfig
    hidden_size: int
    vocab_size: int
    num_target_layers: int
    mask_token_id: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None

    @classmethod
    def read(cls, directory: Path) -> "DraftCheckpoint":
        """Read config.json; raise UsageError naming the key that is missing or can't be followed."""
        values = ExportedConfig.read(directory / CONFIG_FILE)
        values.refuse_unsupported()
        try:
            return cls(
                directory=directory,
                drafter=_drafter_config(values),
                hidden_size=int(values.require("hidden_size")),
                vocab_size=int(values.require("vocab_size")),
                num_target_layers=int(values.require("num_target_layers")),
                mask_token_id=int(values.require("mask_token_id")),
                input_embedding_scale=float(values.get("input_embedding_scale", 1.0)),
                output_multiplier=float(values.get("output_multiplier", 1.0)),
                final_logit_softcapping=_positive_or_none(values.get("final_logit_softcapping")),
            )
        except (UsageError, TypeError, ValueError) as error:
            raise UsageError(f"{values.path} can't be used: {error}") from None

    def load_drafter(self, device: torch.device, dtype: torch.dtype) -> Drafter:
        """The drafter with its weights; raise UsageError unless they are exactly those that its config asks for."""
        with torch.device("meta"):
            drafter = Drafter(self.drafter, self.hidden_size)
        path = self.directory / WEIGHTS_FILE
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                names = list(file.keys())
                _check_tensors(path, {name: tuple(file.get_slice(name).get_shape()) for name in names}, drafter)
                tensors = {name: file.get_tensor(name).to(dtype) for name in names}
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from None
        drafter.load_state_dict(join_projections(tensors), assign=True)
        return drafter.eval()


class ExportedConfig:
    """The keys of a config.json. Some may stand in `dflash_config` or beside it; the inner ones win."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        inner = values.get("dflash_config") or {}
        self.values = {**values, **inner}

    @classmethod
    def read(cls, path: Path) -> "ExportedConfig":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(
                f"{path} does not exist: the drafter must be a directory with {CONFIG_FILE} in it"
            ) from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from None
        if not isinstance(values, dict) or not isinstance(values.get("dflash_config", {}), dict):
            raise UsageError(f"{path} is not the config of a drafter: it and its dflash_config must be JSON objects")
        return cls(path, values)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def require(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise UsageError(f"it lacks the key {key}")
        return self.values[key]

    def refuse_unsupported(self) -> None:
        """Raise UsageError for what would be run otherwise than meant."""
        scaling = self.get("rope_scaling") or self.get("rope_parameters") or {}
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        if rope_type != "default":
            raise UsageError(f"{self.path} asks for rotary scaling {rope_type!r}: only unscaled rotary is supported")
        if self.get("hidden_act", "silu") != "silu":
            raise UsageError(f"{self.path} asks for hidden_act {self.get('hidden_act')!r}: only silu is supported")


def _drafter_config(values: ExportedConfig) -> DrafterConfig:
    num_layers = int(values.require("num_hidden_layers"))
    layer_types = _layer_types(values, num_layers)
    rope_theta = values.get("rope_theta") or (values.get("rope_parameters") or {}).get("rope_theta")
    if rope_theta is None:
        raise UsageError("it lacks the key rope_theta")
    return DrafterConfig(
        num_layers=num_layers,
        block_size=int(values.require("block_size")),
        target_layer_ids=tuple(int(layer) for layer in values.require("target_layer_ids")),
        num_attention_heads=int(values.require("num_attention_heads")),
        num_key_value_heads=int(values.require("num_key_value_heads")),
        head_dim=int(values.require("head_dim")),
        intermediate_size=int(values.require("intermediate_size")),
        rope_theta=float(rope_theta),
        rms_norm_eps=float(values.require("rms_norm_eps")),
        attention_bias=bool(values.get("attention_bias", False)),
        layer_types=layer_types,
        sliding_window=values.get("sliding_window") if "sliding_attention" in layer_types else None,
        is_causal=values.get("is_causal"),
    )


def _layer_types(values: ExportedConfig, num_layers: int) -> tuple[LayerType, ...]:
    """As listed, or what a Qwen3 config means without the list: sliding from layer `max_window_layers` on."""
    listed = values.get("layer_types")
    if listed is not None:
        unknown = set(listed) - {"full_attention", "sliding_attention"}
        if unknown:
            raise UsageError(
                f"layer_types has {sorted(unknown)}, which is neither full_attention nor sliding_attention"
            )
        return tuple(listed)
    first_sliding = int(values.get("max_window_layers", 28)) if values.get("use_sliding_window") else num_layers
    return tuple("sliding_attention" if i >= first_sliding else "full_attention" for i in range(num_layers))


def _positive_or_none(value: float | None) -> float | None:
    return float(value) if value is not None and value > 0 else None


def _check_tensors(path: Path, found: dict[str, tuple[int, ...]], drafter: Drafter) -> None:
    published = split_projections(drafter.state_dict(), drafter.config)
    expected = {name: tuple(tensor.shape) for name, tensor in published.items()}
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise UsageError(f"{path} lacks the tensor {name}, which its {CONFIG_FILE} asks for")
        if name not in expected:
            raise UsageError(f"{path} has a tensor {name}, which is no part of a DFlash drafter as {CONFIG_FILE} says")
        if found[name] != expected[name]:
            raise UsageError(
                f"{path} has {name} of shape {list(found[name])}, its {CONFIG_FILE} asks for {list(expected[name])}"
            )
