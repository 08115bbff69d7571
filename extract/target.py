"""The target: checked against the configuration, loaded, and run over packed rows with every document on its own.

A row holds many documents. Each must come out as if it had been run alone, so positions start from 0 in every document
and attention stays inside it. That cannot be had from targets that carry a state along the row: they are refused,
as is whatever else would come out wrong in silence. Only the layers up to the last captured one are loaded and run,
unless the final hidden state is wanted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from extract.attention import BY_DOCUMENT, BY_MASK, Documents, attention_of
from extract.tokenise import Encoder, first_line
from shards.config import CacheConfig, TargetConfig
from shards.errors import UsageError

ATTENTION_KINDS = {"full_attention", "sliding_attention"}
# Rotary frequencies that do not depend on the longest position of the row, which would be a neighbour's.
STATIC_ROPE_TYPES = {"default", "linear", "llama3", "proportional", "yarn"}

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What a checkpoint's config.json says."""

    folder: Path
    dtype: torch.dtype  # the target runs in this
    config: PreTrainedConfig
    skeleton: PreTrainedModel  # without weights

    @property
    def text_config(self) -> PreTrainedConfig:
        return self.config.get_text_config()

    @property
    def layer_types(self) -> list[str]:
        """The kind of attention of each decoder layer."""
        kind = "full_attention" if getattr(self.text_config, "sliding_window", None) is None else "sliding_attention"
        named = getattr(self.text_config, "layer_types", None)
        return list(named or [kind] * self.text_config.num_hidden_layers)

    @property
    def other_kinds(self) -> set[str]:
        """Kinds of layers that are not attention, which hold a state; in older transformers a class says so itself."""
        is_stateful = getattr(self.skeleton, "_is_stateful", False)
        return set(self.layer_types) - ATTENTION_KINDS or ({"recurrent state"} if is_stateful else set())


def load_architecture(folder: Path, dtype: torch.dtype | None) -> Architecture:
    """Read the config.json of `folder`; raise UsageError if transformers can't run what it describes.

    Without `dtype` it is the checkpoint's own, or bfloat16.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"the target {folder} has no config.json: name a folder in transformers' layout")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a malformed config fails anywhere in the library, with anything
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {first_line(cause)}"
        raise UsageError(f"{folder}/config.json describes no target that can be run: {reason}") from None
    dtype = dtype or config.get_text_config().dtype or torch.bfloat16
    return Architecture(folder=folder, dtype=dtype, config=config, skeleton=skeleton)


def read_architecture(target: TargetConfig, cache: CacheConfig) -> Architecture:
    """That of `target.path`; raise UsageError if its sizes or kind are not what we can extract from."""
    architecture = load_architecture(Path(target.path), getattr(torch, target.dtype))
    _check_sizes(target, architecture.text_config)
    _check_kind(architecture, cache)
    return architecture


def check_mask_token(target: TargetConfig, encoder: Encoder) -> None:
    """Raise UsageError if target.mask_token_id is a token that ends or pads text."""
    tokenizer = encoder.tokenizer
    taken = {"the tokenizer's pad": tokenizer.pad_token_id, "the tokenizer's eos": tokenizer.eos_token_id}
    if Path(target.path, "generation_config.json").is_file():
        try:
            generation = GenerationConfig.from_pretrained(target.path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UsageError(f"{target.path}/generation_config.json cannot be read: {first_line(error)}") from None
        taken |= {"the generation config's pad": generation.pad_token_id}
        taken |= {"the generation config's eos": generation.eos_token_id}
    for name, ids in taken.items():
        if target.mask_token_id in (ids if isinstance(ids, list) else [ids]):
            raise UsageError(f"target.mask_token_id is {target.mask_token_id}, {name} token: name one that no text has")


def load_model(
    architecture: Architecture, num_layers: int, device: torch.device, *, attention: str = BY_MASK
) -> PreTrainedModel:
    """Load the target with its first `num_layers` decoder layers only; the other weights are not read."""

    class FirstLayers(type(architecture.skeleton)):  # type: ignore[name-defined, misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            del self.get_decoder().layers[num_layers:]

    try:
        model, report = FirstLayers.from_pretrained(
            architecture.folder,
            config=architecture.config,
            dtype=architecture.dtype,
            attn_implementation=attention,
            device_map=str(device),
            local_files_only=True,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"the target in {architecture.folder} cannot be loaded: {first_line(error)}") from None
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UsageError(f"{architecture.folder} lacks {len(missing)} weights of the target, the first is {missing[0]}")
    return model.eval()


def num_run_layers(architecture: Architecture, cache: CacheConfig) -> int:
    """Up to the last one that is captured."""
    return architecture.text_config.num_hidden_layers if cache.final_hidden else cache.layers[-1] + 1


class Target:
    """A loaded target and the hooks that capture its layers."""

    @classmethod
    def load(cls, architecture: Architecture, cache: CacheConfig, device: torch.device) -> Self:
        """With the layers that are to run, and no others."""
        attention = attention_of(type(architecture.skeleton), architecture.text_config, architecture.dtype, device)
        model = load_model(architecture, num_run_layers(architecture, cache), device, attention=attention)
        return cls(architecture, cache, model)

    def __init__(self, architecture: Architecture, cache: CacheConfig, model: PreTrainedModel) -> None:
        self.num_layers = architecture.text_config.num_hidden_layers
        self.hidden_size = architecture.text_config.hidden_size
        self.final_hidden = cache.final_hidden
        self.captured_layers = [*cache.layers, *([self.num_layers] if cache.final_hidden else [])]
        self.device = model.device
        self.decoder = model.get_decoder()
        self.attends_by_document = model.config._attn_implementation == BY_DOCUMENT
        window = getattr(architecture.text_config, "sliding_window", None)
        kinds = architecture.layer_types
        self.windows = [window if kind == "sliding_attention" else None for kind in kinds]  # by layer
        num_layers = num_run_layers(architecture, cache)
        self.window_of_kind = dict(zip(kinds[:num_layers], self.windows[:num_layers], strict=True))
        self._captured: dict[int, Tensor] = {}
        for layer in cache.layers:
            self._capture(layer, self.decoder.layers[layer])

    def _capture(self, layer: int, module: nn.Module) -> None:
        def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        module.register_forward_hook(hook)

    @torch.inference_mode()
    def run(self, input_ids_RT: Tensor, position_ids_RT: Tensor, document_ids_RT: Tensor) -> dict[int, Tensor]:
        """Hidden states [R, T, H] by captured layer; the final one, after the norm, stands under num_layers.

        Padding slots have document id −1 and come out as something finite and meaningless.
        """
        output = self.decoder(**self.arguments(input_ids_RT, position_ids_RT, document_ids_RT))
        captured, self._captured = self._captured, {}
        return captured | ({self.num_layers: output.last_hidden_state} if self.final_hidden else {})

    def arguments(self, input_ids_RT: Tensor, position_ids_RT: Tensor, document_ids_RT: Tensor) -> dict[str, Any]:
        """Of the model's forward pass over packed rows, which are in the host's memory."""
        arguments: dict[str, Any] = {
            "input_ids": input_ids_RT.to(self.device, non_blocking=True).long(),
            "position_ids": position_ids_RT.to(self.device, non_blocking=True).long(),
            "use_cache": False,
        }
        if self.attends_by_document:
            return arguments | {"documents": Documents.of(document_ids_RT, self.windows, self.device)}
        return arguments | {"attention_mask": self._attention_mask(document_ids_RT.to(self.device, non_blocking=True))}

    def _attention_mask(self, document_ids_RT: Tensor) -> Tensor | dict[str, Tensor]:
        """One mask, or one for each kind of layer, which every family with mixed kinds accepts."""
        masks = {kind: isolation_mask(document_ids_RT, window) for kind, window in self.window_of_kind.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


def isolation_mask(document_ids_RT: Tensor, sliding_window: int | None = None) -> Tensor:
    """bool [R, 1, T, T], true where a query slot may see a key slot: the same document, not later, inside the window.

    Padding counts as one document, so that every slot sees at least itself.
    """
    slots_T = torch.arange(document_ids_RT.shape[1], device=document_ids_RT.device)
    distance_TT = slots_T[:, None] - slots_T[None, :]
    visible_TT = distance_TT >= 0
    if sliding_window is not None:
        visible_TT &= distance_TT < sliding_window
    return (document_ids_RT[:, None, :, None] == document_ids_RT[:, None, None, :]) & visible_TT


def _check_sizes(target: TargetConfig, config: PreTrainedConfig) -> None:
    names = {"hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "vocab_size": "vocab_size"}
    found = {key: getattr(config, name, None) for key, name in names.items()}
    for key, value in found.items():
        if getattr(target, key) != value:
            raise UsageError(f"target.{key} is {getattr(target, key)}, but {target.path}/config.json says {value}")


def _check_kind(architecture: Architecture, cache: CacheConfig) -> None:
    """Raise UsageError for targets whose packed rows would come out wrong."""
    model, config, name = architecture.skeleton, architecture.text_config, f"the target in {architecture.folder}"
    if kinds := ", ".join(sorted(architecture.other_kinds)):
        raise UsageError(
            f"{name} has layers of the kind {kinds}: documents in one row would leak into each other, so it is refused"
        )
    if not model._supports_sdpa or getattr(config, "attn_logit_softcapping", None) is not None:
        raise UsageError(
            f"{name} ({config.model_type}) has an attention that can't be computed with a mask for each row"
        )
    if not isinstance(getattr(model.get_decoder(), "layers", None), nn.ModuleList):
        raise UsageError(f"{name} is of the family {config.model_type}, whose decoder layers are in no known place")
    rope_types = set(_rope_types(getattr(config, "rope_parameters", None)))
    if rope_types - STATIC_ROPE_TYPES:
        found = ", ".join(sorted(rope_types - STATIC_ROPE_TYPES))
        raise UsageError(f"{name} has rotary scaling that depends on the longest document of a row ({found})")
    if cache.row_tokens > getattr(config, "max_position_embeddings", cache.row_tokens):
        raise UsageError(
            f"cache.row_tokens is {cache.row_tokens}, but {name} has only {config.max_position_embeddings} positions"
        )


def _rope_types(parameters: dict[str, Any] | None) -> Iterator[str]:
    """The rotary types in a config's rope_parameters, which may be nested by the kind of layer."""
    for key, value in (parameters or {}).items():
        if isinstance(value, dict):
            yield from _rope_types(value)
        elif key == "rope_type":
            yield value
