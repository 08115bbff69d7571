"""The drafter: a few Qwen3-style layers whose queries come from the blocks and whose keys and values come from both
the target's context and the blocks.

Parameter names are those of the exported checkpoint, but that projections of the same input are one matrix, which
`split_projections` takes apart. The embedding and the head are the target's, frozen, and live
elsewhere (`train/target_head.py`). Shapes: R rows, T tokens, N blocks, B slots, H hidden, K context layers.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shards.sections import DrafterConfig
from train.attention import block_attention
from train.graph import fused
from train.linear import Linear

if find_spec("triton"):  # it comes with torch's CUDA builds only; train/preflight.py refuses a GPU without it
    from train.swiglu_kernels import swiglu_kernel


class ContextKeyValue(NamedTuple):
    """One layer's keys (normed and rotated) and values of the context tokens, [R, T, kv heads, head dim]."""

    key_RTgd: Tensor
    value_RTgd: Tensor


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)."""
        return add_rms_norm(x, delta, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig, hidden_size: int, layer: int) -> None:
        super().__init__()
        self.use_kernel = True
        self.num_key_value_heads = config.num_key_value_heads
        self.sliding_window = config.layer_window(layer)
        self.is_causal = config.layer_is_causal(layer)
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.qkv_proj = Linear(hidden_size, query_size, key_size, key_size, bias=config.attention_bias)
        self.o_proj = Linear(query_size, hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def encode_context(self, context_RTH: Tensor, rotary: Tensor) -> ContextKeyValue:
        keys_and_values = self.qkv_proj(context_RTH, first=1)
        return ContextKeyValue(*key_value_heads(keys_and_values, self.k_norm.weight, rotary, self.k_norm.eps))

    def forward(
        self,
        x_RNBH: Tensor,
        rotary: Tensor,
        context: ContextKeyValue,
        context_start_RN: Tensor,
        context_end_RN: Tensor,
    ) -> Tensor:
        query, key, value = all_heads(
            self.qkv_proj(x_RNBH),
            self.q_norm.weight,
            self.k_norm.weight,
            rotary,
            self.num_key_value_heads,
            self.q_norm.eps,
        )
        output = block_attention(
            query,
            *context,
            key,
            value,
            context_start_RN,
            context_end_RN,
            sliding_window=self.sliding_window,
            is_causal=self.is_causal,
            use_kernel=self.use_kernel,
        )
        return self.o_proj(output.flatten(-2))


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, intermediate_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig, hidden_size: int, layer: int) -> None:
        super().__init__()
        self.recompute = "none"
        self.input_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, hidden_size, layer)
        self.post_attention_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.mlp = MLP(hidden_size, config.intermediate_size)

    def forward(self, x_RNBH: Tensor, normed_RNBH: Tensor, *attention_inputs: Any) -> tuple[Tensor, Tensor]:
        """From the residual stream and its input norm: the stream before the MLP's output is added, and that output."""
        if self.recompute == "layer":
            return recomputed(self._forward, x_RNBH, normed_RNBH, *attention_inputs)
        return self._forward(x_RNBH, normed_RNBH, *attention_inputs)

    def _forward(self, x_RNBH: Tensor, normed_RNBH: Tensor, *attention_inputs: Any) -> tuple[Tensor, Tensor]:
        attended_RNBH = self.self_attn(normed_RNBH, *attention_inputs)
        x_RNBH, normed_RNBH = self.post_attention_layernorm.of_sum(x_RNBH, attended_RNBH)
        return x_RNBH, recomputed(self.mlp, normed_RNBH) if self.recompute == "mlp" else self.mlp(normed_RNBH)


class Drafter(nn.Module):
    """Context features and block embeddings in, hidden states for the target's head out."""

    def __init__(self, config: DrafterConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(len(config.target_layer_ids) * hidden_size, hidden_size)
        self.hidden_norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, hidden_size, i) for i in range(config.num_layers))
        self.norm = RMSNorm(hidden_size, config.rms_norm_eps)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal matrices of `init_std`, zero biases, unit norms: a function of the seed alone, on any device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                values = torch.empty(parameter.shape).normal_(std=self.config.init_std, generator=generator)
                parameter.copy_(values)

    def encode_context(self, features_RTF: Tensor, position_ids_RT: Tensor) -> list[ContextKeyValue]:
        """Keys and values of the context for every layer. `features_RTF`: F = K·H, layers in the config's order.

        All layers project the same `hidden_norm(fc(features))`; it does not pass through their input norms.
        """
        context_RTH = self.hidden_norm(self.fc(features_RTF))
        rotary = rotary_embedding(position_ids_RT, self.config.head_dim, self.config.rope_theta)
        return [layer.self_attn.encode_context(context_RTH, rotary) for layer in self.layers]

    def forward(
        self,
        embeddings_RNBH: Tensor,
        position_ids_RNB: Tensor,
        context: list[ContextKeyValue],
        context_start_RN: Tensor,
        context_end_RN: Tensor,
    ) -> Tensor:
        """Normed hidden states [R, N, B, H] of the slots; a block sees context slots start ≤ t < end and itself."""
        rotary = rotary_embedding(position_ids_RNB, self.config.head_dim, self.config.rope_theta)
        norms = [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
        x_RNBH, normed_RNBH = embeddings_RNBH, self.layers[0].input_layernorm(embeddings_RNBH)
        for layer, layer_context, next_norm in zip(self.layers, context, norms, strict=True):
            x_RNBH, delta_RNBH = layer(x_RNBH, normed_RNBH, rotary, layer_context, context_start_RN, context_end_RN)
            x_RNBH, normed_RNBH = next_norm.of_sum(x_RNBH, delta_RNBH)
        return normed_RNBH


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, of which autograd keeps the arguments alone and runs it again in the backward."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


PROJECTIONS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def split_projections(tensors: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
    """Parameters by the names of the exported checkpoint: projections as views of the matrix that joins them."""
    key_size = config.num_key_value_heads * config.head_dim
    sizes = {
        "qkv_proj": (config.num_attention_heads * config.head_dim, key_size, key_size),
        "gate_up_proj": (config.intermediate_size, config.intermediate_size),
    }
    split = {}
    for name, tensor in tensors.items():
        *module, projection, kind = name.split(".")
        parts = PROJECTIONS.get(projection, ())
        named = zip(parts, tensor.split(sizes[projection]), strict=True) if parts else [(projection, tensor)]
        split |= {".".join((*module, part, kind)): rows for part, rows in named}
    return split


def join_projections(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `split_projections`."""
    joined = dict(tensors)
    for fused_name, (first, *_) in PROJECTIONS.items():
        for name in [name for name in joined if f".{first}." in name]:
            parts = [joined.pop(name.replace(first, part)) for part in PROJECTIONS[fused_name]]
            joined[name.replace(first, fused_name)] = torch.cat(parts)
    return joined


def rotary_embedding(position_ids: Tensor, head_dim: int, theta: float) -> Tensor:
    """Cosines and sines of the rotation at each position, fp32 [2, ..., 1, head dim / 2]; the 1 is for the heads."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
    angles = position_ids[..., None, None].float() / theta**exponents
    return torch.stack((angles.cos(), angles.sin()))


@fused
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Statistics in fp32, then cast, then scaled (as Qwen3 does)."""
    return _rms_norm(x, weight, eps)


@fused
def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, _rms_norm(total, weight, eps)


@fused
def all_heads(
    projected: Tensor, query_norm: Tensor, key_norm: Tensor, rotary: Tensor, num_key_value_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, values side by side, [..., (h + 2g)·d] → [..., h, d] and twice [..., g, d], ready to attend."""
    heads = projected.unflatten(-1, (-1, len(query_norm)))
    query, key, value = heads.tensor_split((-2 * num_key_value_heads, -num_key_value_heads), dim=-2)
    query, key = (rotate(_rms_norm(x, w, eps), rotary) for x, w in ((query, query_norm), (key, key_norm)))
    return query, key, value.contiguous()


@fused
def key_value_heads(projected: Tensor, key_norm: Tensor, rotary: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Keys and values side by side, [..., 2g·d] → twice [..., g, d], ready to be attended to."""
    key, value = projected.unflatten(-1, (2, -1, len(key_norm))).unbind(-3)
    return rotate(_rms_norm(key, key_norm, eps), rotary), value.contiguous()


def swiglu(gate_up: Tensor) -> Tensor:
    """Gates and values side by side, [..., 2·I] → [..., I]."""
    if gate_up.is_cuda:
        return swiglu_kernel(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the heads [..., heads, head dim]: the first half pairs with the second (neox layout), in fp32."""
    cos, sin = rotary
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
