"""bf16 codes against arithmetic on fractions and against torch."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.codec import decode_bf16, encode_bf16

ALL_CODES = np.arange(1 << 16, dtype=np.uint16)


def test_every_code_comes_back_and_every_nan_becomes_the_quiet_one() -> None:
    values = decode_bf16(ALL_CODES)
    expected = np.where(np.isnan(values), 0x7FC0, ALL_CODES)
    np.testing.assert_array_equal(encode_bf16(values), expected)


def test_decoded_values_are_torchs() -> None:
    codes = torch.from_numpy(ALL_CODES.view(np.int16)).view(torch.bfloat16)
    np.testing.assert_array_equal(decode_bf16(ALL_CODES), codes.float().numpy())


@settings(derandomize=True)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_encoded_values_are_torchs(values: list[float]) -> None:
    expected = torch.tensor(values, dtype=torch.float32).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(encode_bf16(np.array(values, np.float32)), expected)


@settings(derandomize=True)
@given(st.integers(0, 0x7F7E), st.integers(0, 0xFFFF))
def test_rounds_to_the_nearest_and_ties_to_even(code: int, rest: int) -> None:
    below, above = (Fraction(float(decode_bf16(np.array([c], np.uint16))[0])) for c in (code, code + 1))
    value = np.array([code << 16 | rest], np.uint32).view(np.float32)
    middle = (below + above) / 2
    exact = Fraction(float(value[0]))
    expected = code + code % 2 if exact == middle else code + (exact > middle)
    assert encode_bf16(value)[0] == expected


@pytest.mark.parametrize("sign", [1, -1])
def test_beyond_the_largest_code_is_infinity(sign: int) -> None:
    largest_float32 = np.finfo(np.float32).max
    assert decode_bf16(encode_bf16(np.array([sign * largest_float32])))[0] == sign * np.inf
