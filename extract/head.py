"""The target's frozen ends: input embedding, output head, and the scalars that go with them. They are stored once.

Families scale embeddings and logits in ways that their weights don't show. What is stored is therefore tried against
the target itself; a target that does something else is refused, not stored wrongly.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from extract.target import Architecture, load_model
from shards.durable import write_json
from shards.errors import UsageError
from shards.schema import HEAD_CONFIG_FILE, HEAD_FILE

PROBE_TOKENS = 16
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the largest value; for the order of sums and one rounding


@dataclass(frozen=True, kw_only=True)
class Head:
    """Embedding = embed_tokens · scale; logits = softcap · tanh(multiplier · lm_head · hidden / softcap)."""

    embed_tokens: Tensor  # [V, H]
    lm_head: Tensor | None  # [V, H]; None: it is the embedding ("tied")
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None

    def write(self, directory: Path) -> None:
        """Write the two files of the head below `directory`, a cache or what is to become one."""
        tensors = {"embed_tokens": self.embed_tokens, "lm_head": self.lm_head}
        try:
            save_file({name: t.contiguous() for name, t in tensors.items() if t is not None}, directory / HEAD_FILE)
        except SafetensorError as error:
            raise OSError(str(error)) from None  # what the disk does not take
        scalars = {
            "input_embedding_scale": self.input_embedding_scale,
            "output_multiplier": self.output_multiplier,
            "final_logit_softcapping": self.final_logit_softcapping,
            "tied": self.lm_head is None,
        }
        write_json(directory / HEAD_CONFIG_FILE, scalars)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embed_tokens[token_ids] * self.input_embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        weight_VH = self.embed_tokens if self.lm_head is None else self.lm_head
        logits = nn.functional.linear(hidden, weight_VH) * self.output_multiplier
        cap = self.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)


def read_head(architecture: Architecture) -> Head:
    """Load the ends of the target on the CPU, with one decoder layer between them to try them; else UsageError."""
    model = load_model(architecture, 1, torch.device("cpu"))
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    shape = (architecture.text_config.vocab_size, architecture.text_config.hidden_size)
    if embedding.weight.shape != shape or output.weight.shape != shape:
        found = f"{list(embedding.weight.shape)} and {list(output.weight.shape)}"
        raise UsageError(f"the target's embedding and head have the shapes {found}, expected {list(shape)} for both")
    if getattr(output, "bias", None) is not None:
        raise UsageError("the target's output head has a bias, which a drafter can't use")
    tied = output.weight.data_ptr() == embedding.weight.data_ptr()
    config = architecture.text_config
    head = Head(
        embed_tokens=embedding.weight.detach(),
        lm_head=None if tied else output.weight.detach(),
        input_embedding_scale=float(getattr(embedding, "embed_scale", getattr(config, "embedding_multiplier", 1.0))),
        output_multiplier=getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0),
        final_logit_softcapping=getattr(config, "final_logit_softcapping", None),
    )
    _try(head, model)
    return head


@torch.inference_mode()
def _try(head: Head, model: PreTrainedModel) -> None:
    """Raise UsageError unless `head` embeds and predicts as `model` does."""
    token_ids = torch.linspace(0, len(head.embed_tokens) - 1, PROBE_TOKENS).long()
    seen: dict[str, Tensor] = {}

    def remember(_module: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Any]) -> None:
        seen["embedded"] = arguments[0] if arguments else keywords["hidden_states"]

    decoder = model.get_decoder()
    handle = decoder.layers[0].register_forward_pre_hook(remember, with_kwargs=True)
    logits = model(input_ids=token_ids[None], use_cache=False).logits
    hidden = decoder(input_ids=token_ids[None], use_cache=False).last_hidden_state
    handle.remove()
    for what, ours, theirs in (
        ("input embedding", head.embed(token_ids)[None], seen["embedded"]),
        ("output head", head.logits(hidden), logits),
    ):
        error, size = (ours.float() - theirs.float()).abs().max(), theirs.float().abs().max()
        if not error <= TOLERANCE[head.embed_tokens.dtype] * size:
            raise UsageError(
                f"the target ({model.config.model_type}) does something to its {what} that is not known here: "
                f"computed from the weights it is off by {error:.3g} of {size:.3g}"
            )
