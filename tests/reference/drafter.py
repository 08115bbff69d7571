"""The drafter in float64: every query of every block attends, on its own, to the keys that the predicate allows.

Differentiable, so that gradients can be checked too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.mask import is_causal_inside_block, sees_context, sees_slot

Weights = Mapping[str, Tensor]  # exported name → float64


@dataclass(frozen=True, kw_only=True)
class Shape:
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    layer_types: Sequence[str]
    sliding_window: int | None
    is_causal: bool | None


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The row's documents and the blocks on it. An anchor of None is a padding block: it sees itself only."""

    document_ids: Sequence[int]
    positions: Sequence[int]
    anchors: Sequence[int | None]

    def block_position(self, block: int) -> int:
        anchor = self.anchors[block]
        return 0 if anchor is None else self.positions[anchor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def rotate(vector: Tensor, position: int, theta: float) -> Tensor:
    """Pair dimension i with i + d/2 and turn each pair by position · theta^(−2i/d)."""
    half = len(vector) // 2
    angles = [position * theta ** (-2 * i / len(vector)) for i in range(half)]
    turned = [vector[i] * math.cos(a) - vector[half + i] * math.sin(a) for i, a in enumerate(angles)]
    turned += [vector[half + i] * math.cos(a) + vector[i] * math.sin(a) for i, a in enumerate(angles)]
    return torch.stack(turned)


def attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    scores = torch.stack([query @ key for key in keys]) / math.sqrt(len(query))
    return torch.softmax(scores, dim=0) @ torch.stack(list(values))


def project_heads(weights: Weights, prefix: str, x: Tensor, head_dim: int) -> Tensor:
    """[..., H] → [..., heads, head dim]"""
    projected = x @ weights[f"{prefix}.weight"].T
    bias = weights.get(f"{prefix}.bias")
    return (projected if bias is None else projected + bias).unflatten(-1, (-1, head_dim))


def attention(
    weights: Weights, prefix: str, shape: Shape, layer_type: str, context_TH: Tensor, normed_NBH: Tensor, row: Packing
) -> Tensor:
    """[N, B, H] in, [N, B, heads · head dim] out. The context is projected as it is, the block layernormed."""
    window = shape.sliding_window if layer_type == "sliding_attention" else None
    is_causal = is_causal_inside_block(layer_type, shape.is_causal)
    eps, theta, head_dim = shape.rms_norm_eps, shape.rope_theta, shape.head_dim
    num_blocks, block_size, _ = normed_NBH.shape

    query = rms_norm(
        project_heads(weights, f"{prefix}.q_proj", normed_NBH, head_dim), weights[f"{prefix}.q_norm.weight"], eps
    )
    keys, values = {}, {}  # by ("context", token) and (block, slot): [key-value heads, head dim]
    for name, x in (("context", context_TH), ("block", normed_NBH)):
        key = rms_norm(project_heads(weights, f"{prefix}.k_proj", x, head_dim), weights[f"{prefix}.k_norm.weight"], eps)
        value = project_heads(weights, f"{prefix}.v_proj", x, head_dim)
        if name == "context":
            for token, position in enumerate(row.positions):
                keys["context", token] = [rotate(head, position, theta) for head in key[token]]
                values["context", token] = value[token]
            continue
        for n in range(num_blocks):
            for slot in range(block_size):
                keys[n, slot] = [rotate(head, row.block_position(n) + slot, theta) for head in key[n, slot]]
                values[n, slot] = value[n, slot]

    def visible(n: int, slot: int) -> list[tuple]:
        anchor = row.anchors[n]
        context = [
            ("context", token)
            for token in range(len(row.positions))
            if anchor is not None
            and sees_context(
                row.document_ids, row.positions, anchor=anchor, slot=slot, token=token, sliding_window=window
            )
        ]
        blocks = [
            (m, other)
            for m in range(num_blocks)
            for other in range(block_size)
            if sees_slot(n, slot, m, other, sliding_window=window, is_causal=is_causal)
        ]
        return context + blocks

    outputs = []
    for n in range(num_blocks):
        for slot in range(block_size):
            seen = visible(n, slot)
            for head in range(shape.num_heads):
                group = head * shape.num_key_value_heads // shape.num_heads
                rotated = rotate(query[n, slot, head], row.block_position(n) + slot, theta)
                outputs.append(attend(rotated, [keys[k][group] for k in seen], [values[k][group] for k in seen]))
    return torch.stack(outputs).view(num_blocks, block_size, -1)


def drafter_forward(
    weights: Weights, shape: Shape, *, features_TF: Tensor, embeddings_NBH: Tensor, row: Packing
) -> Tensor:
    """Normed hidden states [N, B, H] of the blocks; F = K·H, layers in the order of target_layer_ids."""
    eps = shape.rms_norm_eps
    context_TH = rms_norm(features_TF @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x_NBH = embeddings_NBH
    for i, layer_type in enumerate(shape.layer_types):
        layer = f"layers.{i}"
        normed_NBH = rms_norm(x_NBH, weights[f"{layer}.input_layernorm.weight"], eps)
        attended = attention(weights, f"{layer}.self_attn", shape, layer_type, context_TH, normed_NBH, row)
        x_NBH = x_NBH + project_heads(weights, f"{layer}.self_attn.o_proj", attended, 1).squeeze(-1)
        normed_NBH = rms_norm(x_NBH, weights[f"{layer}.post_attention_layernorm.weight"], eps)
        gate = normed_NBH @ weights[f"{layer}.mlp.gate_proj.weight"].T
        up = normed_NBH @ weights[f"{layer}.mlp.up_proj.weight"].T
        x_NBH = x_NBH + (gate * torch.sigmoid(gate) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    return rms_norm(x_NBH, weights["norm.weight"], eps)
