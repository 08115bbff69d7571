"""The drafter: a few Qwen3-style layers whose queries come from the blocks and whose keys and values come from both
the target's context and the blocks.

Parameter names are those of the exported checkpoint. The embedding and the head are the target's, frozen, and live
elsewhere (`train/target_head.py`). Shapes: R rows, T tokens, N blocks, B slots, H hidden, K context layers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from train.attention import block_attention
from train.config import DrafterConfig


class ContextKeyValue(NamedTuple):
    """One layer's keys (normed and rotated) and values of the context tokens, [R, T, kv heads, head dim]."""

    key_RTgd: Tensor
    value_RTgd: Tensor


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension: statistics in fp32, then cast, then scaled (as Qwen3 does)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig, hidden_size: int, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.sliding_window = config.layer_window(layer)
        self.is_causal = config.layer_is_causal(layer)
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_and_values(self, x: Tensor, rotary: Tensor) -> ContextKeyValue:
        """Of context tokens or of block slots: [..., H] → [..., kv heads, head dim] each."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return ContextKeyValue(rotate(key, rotary), self.v_proj(x).unflatten(-1, (-1, self.head_dim)))

    def forward(
        self,
        x_RNBH: Tensor,
        rotary: Tensor,
        context: ContextKeyValue,
        context_start_RN: Tensor,
        context_end_RN: Tensor,
    ) -> Tensor:
        query = rotate(self.q_norm(self.q_proj(x_RNBH).unflatten(-1, (-1, self.head_dim))), rotary)
        output = block_attention(
            query,
            *context,
            *self.keys_and_values(x_RNBH, rotary),
            context_start_RN,
            context_end_RN,
            sliding_window=self.sliding_window,
            is_causal=self.is_causal,
        )
        return self.o_proj(output.flatten(-2))


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig, hidden_size: int, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, hidden_size, layer)
        self.post_attention_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.mlp = MLP(hidden_size, config.intermediate_size)

    def forward(self, x_RNBH: Tensor, *attention_inputs: Any) -> Tensor:
        x_RNBH = x_RNBH + self.self_attn(self.input_layernorm(x_RNBH), *attention_inputs)
        return x_RNBH + self.mlp(self.post_attention_layernorm(x_RNBH))


class Drafter(nn.Module):
    """Context features and block embeddings in, hidden states for the target's head out."""

    def __init__(self, config: DrafterConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden_size, hidden_size, bias=False)
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
        return [layer.self_attn.keys_and_values(context_RTH, rotary) for layer in self.layers]

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
        x_RNBH = embeddings_RNBH
        for layer, layer_context in zip(self.layers, context, strict=True):
            x_RNBH = layer(x_RNBH, rotary, layer_context, context_start_RN, context_end_RN)
        return self.norm(x_RNBH)


def rotary_embedding(position_ids: Tensor, head_dim: int, theta: float) -> Tensor:
    """Cosines and sines of the rotation at each position, fp32 [2, ..., 1, head dim / 2]; the 1 is for the heads."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
    angles = position_ids[..., None, None].float() / theta**exponents
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the heads [..., heads, head dim]: the first half pairs with the second (neox layout), in fp32."""
    cos, sin = rotary
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
