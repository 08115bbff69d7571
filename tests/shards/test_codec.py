"""bf16 codes against arithmetic on fractions and against torch; int8 and int4 against a reader of FORMAT.md."""

import dataclasses
import typing
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.codec import (
    CODECS,
    Codec,
    bytes_per_token,
    decode_bf16,
    encode_bf16,
    rotate,
    rotation_block,
    rotation_signs,
    unrotate,
)
from shards.config import CacheConfig, TargetConfig, check_codec
from shards.errors import UsageError
from tests.reference import codec as reference

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


ROTATED = [CODECS["int8"], CODECS["int4"]]
HIDDEN_SIZES = [64, 128, 192, 576]
# Steps of its group by which a decoded value may be off. bf16 may round a scale down by 2⁻⁸ of itself, so the largest
# magnitude lies up to 127·2⁻⁸ < 0.5 steps beyond the code 127; and in int4, with the sign that has no code 8, up to
# 8·(1 + 2⁻⁸) − 7 steps beyond the code 7.
LARGEST_ERROR = {"int8": 0.5, "int4": 1.03125}


def massive_states(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal values with one channel 1000 times as large as the median, as models have it."""
    values = rng.standard_normal(shape, dtype=np.float32)
    values[..., 5] = 1000 * np.median(np.abs(values))
    return decode_bf16(encode_bf16(values))


def test_golden_signs() -> None:
    """splitmix64's first outputs from the seeds 0, 1, 2, …: 0xE220A8397B1DCDAF, 0x910A2DEC89025CC1, …"""
    golden = "---+++-+--++--+-"
    assert "".join("+" if s > 0 else "-" for s in rotation_signs(576)[:16]) == golden
    assert [reference.sign(c) for c in range(576)] == rotation_signs(576).tolist()


@pytest.mark.parametrize(("hidden_size", "block"), [(5120, 1024), (4096, 4096), (576, 64), (64, 64), (192, 64)])
def test_blocks_are_the_largest_power_of_two(hidden_size: int, block: int) -> None:
    assert rotation_block(hidden_size) == reference.block_size(hidden_size) == block


@pytest.mark.parametrize("hidden_size", [64, 192, 128])
def test_the_rotation_is_its_matrix_and_orthonormal(hidden_size: int) -> None:
    matrix = np.array(reference.rotation_matrix(hidden_size))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(hidden_size), atol=1e-15)
    unit = np.eye(hidden_size, dtype=np.float32)
    # Butterflies of a unit vector are exact: only the last multiplication rounds.
    np.testing.assert_array_equal(rotate(unit).T, matrix.astype(np.float32))
    np.testing.assert_array_equal(unrotate(unit).T, matrix.T.astype(np.float32))


@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("codec", ROTATED, ids=lambda codec: codec.name)
def test_codes_are_those_of_the_format_to_the_bit(codec: Codec, hidden_size: int) -> None:
    for values in massive_states(np.random.default_rng(hidden_size), (3, hidden_size)):
        codes, scales = reference.encode(codec.name, values.tolist())
        encoded = codec.encode(values)
        assert encoded.codes.tobytes() == codes
        assert encoded.scales.tolist() == scales


finite_bf16 = st.integers(0, 0xFFFF).filter(lambda code: code & 0x7F80 < 0x7500)  # below 2^107: no sum overflows


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 20).map(lambda groups: 64 * groups), st.integers(0, 3), st.data())
def test_any_bf16_values_come_back_within_a_step(hidden_size: int, num_tokens: int, data: st.DataObject) -> None:
    """And are the codes of the format. Most values are few and repeated, so that ties and zero groups occur."""
    few = data.draw(st.lists(finite_bf16, min_size=1, max_size=4))
    picked = np.random.default_rng(data.draw(st.integers(0, 99))).integers(len(few), size=(num_tokens, hidden_size))
    values = decode_bf16(np.array(few, np.uint16)[picked])
    for codec in ROTATED:
        encoded = codec.encode(values)
        assert encoded.codes.shape == (num_tokens, codec.code_width(hidden_size))
        assert encoded.scales.shape == (num_tokens, codec.scale_width(hidden_size))
        for token, row in enumerate(values):
            codes, scales = reference.encode(codec.name, row.tolist())
            assert (encoded.codes[token].tobytes(), encoded.scales[token].tolist()) == (codes, scales)
        rotated = rotate(values).astype(np.float64)
        steps = np.repeat(np.abs(decode_bf16(encoded.scales).astype(np.float64)), 64, axis=-1)
        # Besides, a quotient is rounded to float32 before it is rounded to a code.
        assert (np.abs(codec.decode_stored(encoded) - rotated) <= steps * (LARGEST_ERROR[codec.name] + 1e-5)).all()


@pytest.mark.parametrize(("name", "limit"), [("int8", 0.006), ("int4", 0.10)])
def test_massive_activations_cost_nothing(name: str, limit: float) -> None:
    values = massive_states(np.random.default_rng(1), (50, 576))
    codec = CODECS[name]
    error = np.linalg.norm(codec.decode(codec.encode(values)) - values, axis=1) / np.linalg.norm(values, axis=1)
    assert error.mean() < limit


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_zeros_are_zeros(codec: Codec) -> None:
    encoded = codec.encode(np.zeros((2, 192), np.float32))
    assert not encoded.codes.any()
    assert encoded.scales is None or not encoded.scales.any()
    assert not codec.decode(encoded).any()


def test_an_int4_extreme_of_either_sign_is_kept() -> None:
    """The scale has bf16's 8 bits: the extreme is within 2⁻⁸ of itself, whatever its sign."""
    for sign in (1, -1):
        rotated = np.zeros(64, np.float32)
        rotated[[3, 4]] = sign * 3, -sign * 2
        decoded = CODECS["int4"].decode_stored(CODECS["int4"].encode(unrotate(rotated)))
        np.testing.assert_allclose(decoded[[3, 4]], rotated[[3, 4]], rtol=2**-8, atol=3 / 16)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_what_is_not_finite_or_overflows_is_refused(codec: Codec, bad: float) -> None:
    values = np.ones((3, 64), np.float32)
    values[1, :3] = bad
    with pytest.raises(ValueError, match="not finite"):
        codec.encode(values)


def test_the_config_knows_every_codec() -> None:
    assert typing.get_args(typing.get_type_hints(CacheConfig)["codec"]) == tuple(CODECS)


@pytest.mark.parametrize(("name", "width"), [("bf16", 2 * 4096), ("int8", 4096 + 128), ("int4", 2048 + 128)])
def test_bytes_of_a_token(name: str, width: int) -> None:
    assert bytes_per_token(CODECS[name], 4096) == width


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_codecs_with_groups_need_whole_ones(codec: str) -> None:
    cache = CacheConfig(row_tokens=64, layers=(1,), codec=codec)
    target = TargetConfig(path="t", hidden_size=96, num_layers=4, vocab_size=9, mask_token_id=1)
    with pytest.raises(UsageError, match=rf"target\.hidden_size is 96: cache\.codec '{codec}' needs a multiple of 64"):
        check_codec(cache, target)
    check_codec(dataclasses.replace(cache, codec="bf16"), target)
