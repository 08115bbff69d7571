"""Root mean square and largest magnitude of stored codes, fast enough for a writer to keep up with a target.

Of codes in groups, squares are added up before the scale comes in, and only groups whose scale allows it are searched
for the largest. The order of operations is fixed, and so are a shard's bytes.
"""

import math

import numpy as np

from shards.codec import GROUP_CHANNELS, Codec, Encoded, decode_bf16
from shards.record import Statistics

PIECE_TOKENS = 128  # looked at in one go: what is made of them stays in the CPU's cache, and float32 sums are good
BF16_INFINITY = 0x7F80  # exponent bits all set; NaNs lie above
BF16_MANTISSA_BITS, BF16_EXPONENT_BIAS = 7, 127


class StateSums:
    """The sums that the statistics of one array of a shard are made of, while its rows come in."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._sum_of_squares = 0.0
        self._max_abs = 0.0

    def add(self, encoded: Encoded) -> None:
        """Add a row, codes [T, …]. Padding and quarantine are zeros, which change neither sum nor maximum."""
        for start in range(0, len(encoded.codes), PIECE_TOKENS):
            codes = encoded.codes[start : start + PIECE_TOKENS]
            if encoded.scales is None:
                sum_of_squares, max_abs = _measure_bf16(codes)
            else:
                scales = encoded.scales[start : start + PIECE_TOKENS]
                sum_of_squares, max_abs = _measure_groups(
                    self._codec.integers(codes), scales, self._codec.largest_integer
                )
            self._sum_of_squares += sum_of_squares
            self._max_abs = max(self._max_abs, max_abs)

    def statistics(self, name: str, num_values: int) -> Statistics:
        """Of `num_values` values outside of padding and quarantine. Raises ValueError unless all values are finite."""
        if not math.isfinite(self._sum_of_squares):
            raise ValueError(f"{name} has values that are not finite")
        return Statistics(rms=math.sqrt(self._sum_of_squares / max(1, num_values)), max_abs=self._max_abs)


def _measure_bf16(codes: np.ndarray) -> tuple[float, float]:
    """Sum of squares, and largest magnitude, of bf16 codes [T, H].

    Divided by a power of two near the largest, no square overflows float32, and all that count are exact in it: those
    of 8 bits have 16. Sums of n of these are off by n·2⁻²⁴ of themselves at most, so they go over one piece only.
    """
    largest = int((codes & np.uint16(0x7FFF)).max())
    if largest >= BF16_INFINITY:
        return math.inf, math.inf
    exponent = (largest >> BF16_MANTISSA_BITS) - BF16_EXPONENT_BIAS
    exponent = min(max(exponent, -126), 126)  # so that 2^−exponent is no subnormal number
    values = decode_bf16(codes)
    values *= np.float32(2.0**-exponent)
    np.square(values, out=values)
    return float(values.sum(axis=0).sum(dtype=np.float64)) * 4.0**exponent, float(decode_bf16(np.uint16([largest]))[0])


def _measure_groups(integers: np.ndarray, scales: np.ndarray, largest_integer: int) -> tuple[float, float]:
    """The same of int8 [T, H], which stand for themselves times the scale of their group, bf16 codes [T, G]."""
    groups, magnitudes = integers.reshape(-1, GROUP_CHANNELS), np.abs(decode_bf16(scales.reshape(-1)))
    values = groups.astype(np.float32)
    squares = np.einsum("gc,gc->g", values, values)  # exact in any order: whole numbers up to 64 · 128²
    with np.errstate(invalid="ignore"):  # 0 · ∞
        sum_of_squares = float((squares * np.square(magnitudes, dtype=np.float64)).sum())
    first = magnitudes.argmax()
    can_be_larger = magnitudes * np.float32(largest_integer) > _largest(groups[first], magnitudes[first])
    can_be_larger[first] = True
    return sum_of_squares, float(_largest(groups[can_be_larger], magnitudes[can_be_larger]).max())


def _largest(groups: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    return np.abs(groups.astype(np.int16)).max(axis=-1) * magnitudes
