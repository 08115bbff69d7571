"""Hidden states to stored codes on the target's device: half to a quarter of the bytes to copy and write.

Every operation is that of shards/codec.py, in the same order and precision, so that a GPU's codes are the reference's.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from shards.codec import (
    GROUP_CHANNELS,
    INT4_SCALE,
    INT8_SCALE,
    SMALLEST_SCALE,
    rotation_block,
    rotation_norm,
    rotation_signs,
)


class EncodedStates(NamedTuple):
    """What is stored of states [..., H], and of which of them it can be."""

    codes: Tensor  # [..., code width] of the codec's type
    scales: Tensor | None  # uint16 [..., scale width]: bits of bf16; None for a codec without
    is_finite: Tensor  # bool [...]: codes of other tokens mean nothing


def encode(codec: str, states: Tensor) -> EncodedStates:
    """Encode states [..., H] of any floating type with the codec of this name."""
    return ENCODERS[codec](states.float())


def rotate(states: Tensor) -> Tensor:
    """R·x of each token x, float32 [..., H]: signs, then butterflies of ascending stride in blocks, then the norm."""
    hidden_size = states.shape[-1]
    states = states * _signs(hidden_size, states.device)
    mixed = torch.empty_like(states)
    for stage in range(rotation_block(hidden_size).bit_length() - 1):
        first, second = states.unflatten(-1, (-1, 2, 1 << stage)).unbind(-2)
        sums, differences = mixed.unflatten(-1, (-1, 2, 1 << stage)).unbind(-2)
        torch.add(first, second, out=sums)
        torch.sub(first, second, out=differences)
        states, mixed = mixed, states
    return states.mul_(rotation_norm(hidden_size))


@cache
def _signs(hidden_size: int, device: torch.device) -> Tensor:
    return torch.tensor(rotation_signs(hidden_size), device=device)


def _encode_bf16(states: Tensor) -> EncodedStates:
    rounded = states.bfloat16()
    return EncodedStates(rounded.view(torch.uint16), None, rounded.isfinite().all(-1))


def _encode_int8(states: Tensor) -> EncodedStates:
    rotated = rotate(states)
    groups = rotated.unflatten(-1, (-1, GROUP_CHANNELS))
    scales, divisors = _scales(groups.abs().amax(-1) * float(INT8_SCALE))
    codes = (groups / divisors[..., None]).round().clamp(-127, 127).to(torch.int8).flatten(-2)
    return EncodedStates(codes, scales, rotated.isfinite().all(-1))


def _encode_int4(states: Tensor) -> EncodedStates:
    rotated = rotate(states)
    groups = rotated.unflatten(-1, (-1, GROUP_CHANNELS))
    highest, lowest = groups.amax(-1), groups.amin(-1)
    scales, divisors = _scales(torch.where(highest >= -lowest, highest, lowest) * float(INT4_SCALE))
    codes = (groups / divisors[..., None]).round().clamp(-8, 7).to(torch.int8).flatten(-2)
    nibbles = codes.view(torch.uint8) & 15
    return EncodedStates(nibbles[..., 0::2] | nibbles[..., 1::2] << 4, scales, rotated.isfinite().all(-1))


def _scales(exact: Tensor) -> tuple[Tensor, Tensor]:
    """Scales as they are stored, and as divisors: 1 where a group is all zero, whose scale is 0."""
    rounded = exact.bfloat16().float()
    kept = torch.where(exact == 0, 0.0, rounded.abs().clamp(min=float(SMALLEST_SCALE)).copysign(exact))
    return kept.bfloat16().view(torch.uint16), torch.where(exact == 0, 1.0, kept)


ENCODERS: dict[str, Callable[[Tensor], EncodedStates]] = {
    "bf16": _encode_bf16,
    "int8": _encode_int8,
    "int4": _encode_int4,
    "bf16+zstd": _encode_bf16,
}
