"""The codecs, one token and one number at a time, written from FORMAT.md alone: Python floats rounded by struct."""

import math
import struct
from collections.abc import Sequence

GROUP = 64


def single(x: float) -> float:
    """The IEEE 754 binary32 nearest to x. Sums and products of two of these are exact or nearly so in binary64, and
    rounding them once more gives what binary32 arithmetic gives (53 ≥ 2·24 + 2 bits)."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16_bits(x: float) -> int:
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    upper, rest = bits >> 16, bits & 0xFFFF
    return upper + (rest > 0x8000 or (rest == 0x8000 and upper % 2))


def from_bf16_bits(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def sign(channel: int) -> int:
    mask = 2**64 - 1
    z = (channel + 0x9E3779B97F4A7C15) & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return -1 if (z ^ z >> 31) >> 63 else 1


def block_size(hidden_size: int) -> int:
    block = 1
    while hidden_size % (2 * block) == 0:
        block *= 2
    return block


def hadamard(values: Sequence[float]) -> list[float]:
    values, block = list(values), block_size(len(values))
    stride = 1
    while stride < block:
        for i in range(len(values)):
            if i // stride % 2 == 0:
                a, b = values[i], values[i + stride]
                values[i], values[i + stride] = single(a + b), single(a - b)
        stride *= 2
    norm = single(1 / math.sqrt(block))
    return [single(value * norm) for value in values]


def rotate(values: Sequence[float]) -> list[float]:
    return hadamard([sign(c) * value for c, value in enumerate(values)])


def rotation_matrix(hidden_size: int) -> list[list[float]]:
    """R in exact terms: entry (i, j) is (−1)^(number of common bits) · sign(j) / √block inside a block."""
    block = block_size(hidden_size)
    return [
        [
            (-1) ** ((i % block) & (j % block)).bit_count() * sign(j) / math.sqrt(block)
            if i // block == j // block
            else 0.0
            for j in range(hidden_size)
        ]
        for i in range(hidden_size)
    ]


def scale_bits(exact: float) -> int:
    if exact == 0:
        return 0
    magnitude = max(from_bf16_bits(bf16_bits(abs(exact))), 2.0**-126)
    return bf16_bits(math.copysign(magnitude, exact))


def encode(codec: str, values: Sequence[float]) -> tuple[bytes, list[int]]:
    """The bytes of a token's codes, and the bits of its scales."""
    rotated = rotate(values)
    codes: list[int] = []
    scales = []
    for start in range(0, len(values), GROUP):
        group = rotated[start : start + GROUP]
        if codec == "int8":
            low, high, exact = -127, 127, single(max(map(abs, group)) * single(1 / 127))
        else:
            extreme = max(group) if max(group) >= -min(group) else min(group)
            low, high, exact = -8, 7, extreme / -8
        scales.append(scale_bits(exact))
        scale = from_bf16_bits(scales[-1])
        codes += [min(max(round(single(x / scale)), low), high) if scale else 0 for x in group]
    if codec == "int8":
        return struct.pack(f"{len(codes)}b", *codes), scales
    nibbles = [code & 15 for code in codes]
    return bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True)), scales
