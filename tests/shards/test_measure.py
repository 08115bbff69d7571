"""Statistics of stored codes against decoded float64 values: any codes, any sizes, the ends of the range included."""

import math

import numpy as np
import pytest

from shards.codec import CODECS, Encoded, decode_bf16, encode_bf16
from shards.measure import PIECE_TOKENS, StateSums

WIDTH = 128
RELATIVE = PIECE_TOKENS / 2 * 2.0**-24  # float32 sums of the squares of a piece's tokens; a root halves the error
MAGNITUDES = [1e-38, 1e-30, 1e-10, 1.0, 1e10, 1e19, 3e38]  # the first are subnormal, squares of the last overflow


def random_codes(codec: str, num_tokens: int, magnitude: float) -> Encoded:
    """Codes that need not come from an encoder: every bit pattern, and scales of either sign, 0 among them."""
    rng = np.random.default_rng(num_tokens)
    values = (rng.standard_normal((num_tokens, WIDTH)) * magnitude / 8).astype(np.float32)
    if codec.startswith("bf16"):
        return Encoded(encode_bf16(values))
    kind = CODECS[codec]
    codes = rng.integers(0, 256, (num_tokens, kind.code_width(WIDTH)), dtype=np.uint8).view(kind.code_dtype)
    scales = encode_bf16(values[:, : kind.scale_width(WIDTH)] / 128)
    scales[rng.random(scales.shape) < 0.2] = 0
    return Encoded(codes, scales)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("num_tokens", [1, PIECE_TOKENS, 2 * PIECE_TOKENS + 3])
@pytest.mark.parametrize("codec", CODECS)
def test_statistics_are_those_of_the_decoded_values(codec: str, num_tokens: int, magnitude: float) -> None:
    rows = [random_codes(codec, num_tokens + i, magnitude) for i in range(2)]
    values = np.concatenate([CODECS[codec].decode_stored(row) for row in rows]).astype(np.float64)
    sums = StateSums(CODECS[codec])
    for row in rows:
        sums.add(row)
    found = sums.statistics("hidden/1", values.size)
    assert found.max_abs == np.abs(values).max()
    assert found.rms == pytest.approx(math.sqrt(math.fsum((values**2).flat) / values.size), rel=RELATIVE)


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_but_zeros(codec: str) -> None:
    kind, sums = CODECS[codec], StateSums(CODECS[codec])
    scales = np.zeros((3, kind.scale_width(WIDTH)), np.uint16)
    sums.add(Encoded(np.zeros((3, kind.code_width(WIDTH)), kind.code_dtype), scales if scales.size else None))
    found = sums.statistics("hidden/1", 0)
    assert (found.rms, found.max_abs) == (0.0, 0.0)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
@pytest.mark.parametrize("codec", CODECS)
def test_values_that_are_not_finite_are_refused(codec: str, bits: int) -> None:
    codes, scales = random_codes(codec, 5, 1.0)
    (codes if scales is None else scales)[3, 1] = bits
    assert not np.isfinite(decode_bf16(np.uint16([bits]))[0])
    sums = StateSums(CODECS[codec])
    sums.add(Encoded(codes, scales))
    with pytest.raises(ValueError, match="hidden/1 has values that are not finite"):
        sums.statistics("hidden/1", codes.size)
