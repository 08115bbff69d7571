"""How hidden states become stored codes: the numpy reference of each codec, exact to the bit.

What a GPU encodes or decodes must agree with this; FORMAT.md says the same in words. `bf16` keeps the upper half of
every value; `bf16+zstd` does the same, and only its chunks are stored in another way. `int8` and `int4` first rotate a
token, which spreads its few huge channels over all the others, and then quantise groups of channels, each with a scale.
Layers and files are not known here.
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np

QUIET_NAN = np.uint16(0x7FC0)
GROUP_CHANNELS = 64  # channels that share a scale
# Factors, not divisors: a GPU may divide by a constant as it likes, but multiplies as everybody does.
INT8_SCALE = np.float32(1 / 127)
INT4_SCALE = np.float32(-1 / 8)
SMALLEST_SCALE = np.float32(2.0**-126)  # of groups that are not all zero: GPUs may flush smaller quotients to zero


class Encoded(NamedTuple):
    """What is stored of values [..., H]."""

    codes: np.ndarray  # [..., codec.code_width(H)] of codec.code_dtype
    scales: np.ndarray | None = None  # uint16 [..., codec.scale_width(H)]: bits of bf16; None where that is 0


@dataclass(frozen=True)
class Bf16:
    """A code is the upper half of the value as float32, rounded to the nearest, ties to even."""

    name: ClassVar[str] = "bf16"
    code_dtype: ClassVar[np.dtype] = np.dtype("<u2")
    is_rotated: ClassVar[bool] = False
    is_compressed: ClassVar[bool] = False  # chunks of codes, by compression.py: too slow to train from

    def code_width(self, hidden_size: int) -> int:
        return hidden_size

    def scale_width(self, hidden_size: int) -> int:
        return 0

    def encode(self, values: np.ndarray) -> Encoded:
        """float32 [..., H]; raises ValueError unless all are finite after rounding."""
        codes = encode_bf16(values)
        _require_finite(decode_bf16(codes))
        return Encoded(codes)

    def decode_stored(self, encoded: Encoded) -> np.ndarray:
        """float32 [..., H], in the basis that is stored: here the target's own."""
        return decode_bf16(encoded.codes)

    def decode(self, encoded: Encoded) -> np.ndarray:
        return decode_bf16(encoded.codes)


@dataclass(frozen=True)
class Bf16Zstd(Bf16):
    """The codes of bf16, compressed without loss."""

    name: ClassVar[str] = "bf16+zstd"
    is_compressed: ClassVar[bool] = True


@dataclass(frozen=True)
class Int8:
    """Rotated; a group's scale is its largest magnitude / 127, its codes are −127..127."""

    name: ClassVar[str] = "int8"
    code_dtype: ClassVar[np.dtype] = np.dtype("i1")
    largest_integer: ClassVar[int] = 128  # that a code has room for
    is_rotated: ClassVar[bool] = True
    is_compressed: ClassVar[bool] = False

    def code_width(self, hidden_size: int) -> int:
        return hidden_size

    def scale_width(self, hidden_size: int) -> int:
        return hidden_size // GROUP_CHANNELS

    def encode(self, values: np.ndarray) -> Encoded:
        """float32 [..., H]; raises ValueError unless all are finite after rotating."""
        groups = _groups(rotate(values))
        scales, divisors = _scales(np.abs(groups).max(-1) * INT8_SCALE)
        codes = np.clip(np.rint(groups / divisors[..., None]), -127, 127)
        return Encoded(codes.astype(np.int8).reshape(values.shape), scales)

    def integers(self, codes: np.ndarray) -> np.ndarray:
        """int8 [..., H]: what the scales of the groups multiply."""
        return codes

    def decode_stored(self, encoded: Encoded) -> np.ndarray:
        """float32 [..., H], rotated; exact."""
        return _scaled(encoded.codes, encoded.scales)

    def decode(self, encoded: Encoded) -> np.ndarray:
        """float32 [..., H], in the target's basis."""
        return unrotate(self.decode_stored(encoded))


@dataclass(frozen=True)
class Int4:
    """Rotated; the value of largest magnitude in a group has the code −8, so its scale has the opposite sign.

    Two's complement uses all 16 codes that way. On hidden states the error is 0.88 of that of codes −7..7 with a scale
    of largest magnitude / 7, and as good as that of a table of levels made for them.
    """

    name: ClassVar[str] = "int4"
    code_dtype: ClassVar[np.dtype] = np.dtype("u1")
    largest_integer: ClassVar[int] = 8  # that a code has room for
    is_rotated: ClassVar[bool] = True
    is_compressed: ClassVar[bool] = False

    def code_width(self, hidden_size: int) -> int:
        return hidden_size // 2

    def scale_width(self, hidden_size: int) -> int:
        return hidden_size // GROUP_CHANNELS

    def encode(self, values: np.ndarray) -> Encoded:
        """float32 [..., H]; raises ValueError unless all are finite after rotating."""
        groups = _groups(rotate(values))
        highest, lowest = groups.max(-1), groups.min(-1)
        scales, divisors = _scales(np.where(highest >= -lowest, highest, lowest) * INT4_SCALE)
        codes = np.clip(np.rint(groups / divisors[..., None]), -8, 7).astype(np.int8).reshape(values.shape)
        nibbles = codes.view(np.uint8) & np.uint8(15)
        return Encoded(nibbles[..., 0::2] | nibbles[..., 1::2] << np.uint8(4), scales)

    def integers(self, codes: np.ndarray) -> np.ndarray:
        """int8 [..., H]: what the scales of the groups multiply."""
        pairs = codes.astype(np.uint16)
        nibbles = ((pairs | pairs << np.uint16(4)) & np.uint16(0x0F0F)).view(np.int8)
        return (nibbles ^ np.int8(8)) - np.int8(8)

    def decode_stored(self, encoded: Encoded) -> np.ndarray:
        """float32 [..., H], rotated; exact."""
        return _scaled(self.integers(encoded.codes), encoded.scales)

    def decode(self, encoded: Encoded) -> np.ndarray:
        """float32 [..., H], in the target's basis."""
        return unrotate(self.decode_stored(encoded))


Codec = Bf16 | Int8 | Int4
CODECS: dict[str, Codec] = {codec.name: codec for codec in (Bf16(), Int8(), Int4(), Bf16Zstd())}


def bytes_per_token(codec: Codec, hidden_size: int) -> int:
    """Stored of one token at one layer, checksums and compression aside."""
    return codec.code_width(hidden_size) * codec.code_dtype.itemsize + codec.scale_width(hidden_size) * 2


def encode_bf16(values: np.ndarray) -> np.ndarray:
    """float32 → uint16 codes, rounded to the nearest, ties to the even code.

    Values beyond the largest bf16 become infinity, as rounding has it; every NaN becomes the one quiet NaN 0x7FC0.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    tie_to_even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + (np.uint32(0x7FFF) + tie_to_even)) >> np.uint32(16)
    return np.where(np.isnan(values), QUIET_NAN, rounded.astype(np.uint16))


def decode_bf16(codes: np.ndarray) -> np.ndarray:
    """uint16 codes → float32, exact."""
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


@cache
def rotation_signs(hidden_size: int) -> np.ndarray:
    """float32 [H] of ±1: −1 where the highest bit of splitmix64's f(channel) is set. Read-only."""
    z = np.arange(hidden_size, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    z = z ^ z >> np.uint64(31)
    signs = np.where(z >> np.uint64(63), np.float32(-1), np.float32(1))
    signs.flags.writeable = False
    return signs


def rotation_block(hidden_size: int) -> int:
    """The largest power of two that divides H: channels that are mixed with one another."""
    return hidden_size & -hidden_size


def rotation_norm(hidden_size: int) -> float:
    """What makes the butterflies of a block of 2ⁿ orthonormal: the float32 nearest to 2^(−n/2)."""
    return float(np.float32(rotation_block(hidden_size) ** -0.5))


def rotate(values: np.ndarray) -> np.ndarray:
    """R·x of each token x, float32 [..., H]: signs, then an orthonormal Hadamard transform of each block."""
    return _hadamard(values * rotation_signs(values.shape[-1]))


def unrotate(values: np.ndarray) -> np.ndarray:
    """Rᵀ·y, which is R⁻¹·y but for rounding."""
    return _hadamard(values) * rotation_signs(values.shape[-1])


def _hadamard(values: np.ndarray) -> np.ndarray:
    """Butterflies of stride 1, 2, 4, …, all in float32, then one multiplication: the order that FORMAT.md demands."""
    hidden_size = values.shape[-1]
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused afterwards
        for stage in range(rotation_block(hidden_size).bit_length() - 1):
            pairs = values.reshape(-1, hidden_size >> stage + 1, 2, 1 << stage)
            first, second = pairs[:, :, 0], pairs[:, :, 1]
            values = np.stack([first + second, first - second], axis=2).reshape(values.shape)
        return values * np.float32(rotation_norm(hidden_size))


def _groups(rotated: np.ndarray) -> np.ndarray:
    _require_finite(rotated)
    return rotated.reshape(*rotated.shape[:-1], rotated.shape[-1] // GROUP_CHANNELS, GROUP_CHANNELS)


def _require_finite(values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise ValueError("values that are not finite have no codes")


def _scales(exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales as they are stored, and as divisors: 1 where a group is all zero, whose scale is 0."""
    sign = np.copysign(np.float32(1), exact)
    rounded = decode_bf16(encode_bf16(exact))
    kept = np.where(exact == 0, np.float32(0), sign * np.maximum(np.abs(rounded), SMALLEST_SCALE))
    return encode_bf16(kept), np.where(exact == 0, np.float32(1), kept)


def _scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    groups = codes.reshape(*scales.shape, GROUP_CHANNELS)
    with np.errstate(invalid="ignore"):  # 0 · ∞, of scales that a writer refuses
        return (groups.astype(np.float32) * decode_bf16(scales)[..., None]).reshape(codes.shape)
