"""Stored codes to the features that `fc` reads, inside the step; and `fc` back to the basis of the target.

The codecs that rotate do so with one orthogonal R for all layers. Undoing it for every token would cost more than
the drafter's own arithmetic on them, so features stay rotated: where fc's columns for a layer would be W for the
target's features, training learns W·Rᵀ, and an exported checkpoint has that times R. An isotropic beginning is the
same in both. The rotation itself is specified in FORMAT.md and shards/codec.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shards.codec import CODECS, GROUP_CHANNELS, rotation_block, rotation_norm, rotation_signs
from train.graph import fused


@fused
def decode_features(codec: str, codes_RKTC: Tensor, scales_RKTG: Tensor, dtype: torch.dtype) -> Tensor:
    """The features [R, T, K·H] in `dtype`, in the basis of the codec. C and G: widths of codes and scales."""
    features_RKTH = DECODERS[codec](codes_RKTC, scales_RKTG, dtype)
    return features_RKTH.transpose(1, 2).flatten(2)


def basis(codec: str) -> str:
    """What the features are that fc learns to read, and so what its weights mean."""
    return "rotated" if CODECS[codec].is_rotated else "target"


def unrotate_columns(weight_OF: Tensor, hidden_size: int) -> Tensor:
    """W·R for each block of `hidden_size` columns of an fp32 weight [O, K·H].

    R is signs, then a Hadamard transform, which is symmetric: so a row of W is transformed, then takes the signs.
    """
    signs = torch.tensor(rotation_signs(hidden_size), device=weight_OF.device)
    return (_transform(weight_OF.unflatten(-1, (-1, hidden_size))) * signs).flatten(-2)


def rotate_columns(weight_OF: Tensor, hidden_size: int) -> Tensor:
    """W·Rᵀ, the inverse of `unrotate_columns`."""
    signs = torch.tensor(rotation_signs(hidden_size), device=weight_OF.device)
    return _transform(weight_OF.unflatten(-1, (-1, hidden_size)) * signs).flatten(-2)


def _transform(blocks: Tensor) -> Tensor:
    """The orthonormal Hadamard transform along the last dimension, on blocks of the largest power of two in it."""
    hidden_size = blocks.shape[-1]
    for stage in range(rotation_block(hidden_size).bit_length() - 1):
        first, second = blocks.unflatten(-1, (-1, 2, 1 << stage)).unbind(-2)
        blocks = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    return blocks * rotation_norm(hidden_size)


def _decode_bf16(codes: Tensor, _scales: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.view(torch.bfloat16).to(dtype)


def _decode_int8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The product is exact in fp32 and so rounded once, to `dtype`."""
    groups = codes.to(dtype).unflatten(-1, (-1, GROUP_CHANNELS))
    return (groups * scales.view(torch.bfloat16).to(dtype)[..., None]).flatten(-2)


def _decode_int4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return _decode_int8((nibbles ^ 8).to(torch.int8) - 8, scales, dtype)


DECODERS: dict[str, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
    "bf16": _decode_bf16,
    "int8": _decode_int8,
    "int4": _decode_int4,
}
