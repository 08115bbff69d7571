"""Encoding with torch gives the codes of the numpy reference, on the CPU and, where there is one, on a GPU."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extract.encode import encode, rotate
from shards.codec import CODECS, Encoded, decode_bf16
from shards.codec import rotate as reference_rotate

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def massive_states(*shape: int, seed: int = 0) -> torch.Tensor:
    """One channel is 1000 times the median, as in real models; some tokens are all zero."""
    states = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    states[..., 3] = 1000 * states.abs().median()
    states[..., 1, :] = 0
    return states


def check_codes(codec: str, states: torch.Tensor, device: str) -> None:
    """Equal, but that at rounding ties a code may be off by 1; decoded, all is then within a step."""
    expected = CODECS[codec].encode(states.float().numpy())
    found = encode(codec, states.to(device))
    assert found.is_finite.all()
    codes = found.codes.cpu().numpy()
    assert codes.dtype == expected.codes.dtype
    if expected.scales is None:
        assert found.scales is None
        np.testing.assert_array_equal(codes, expected.codes)
        return
    scales = found.scales.cpu().numpy()
    np.testing.assert_array_equal(scales, expected.scales)
    ours, truth = (CODECS[codec].decode_stored(Encoded(c, scales)) for c in (codes, expected.codes))
    steps = np.repeat(np.abs(decode_bf16(scales)), 64, axis=-1)
    assert (np.abs(ours - truth) <= steps).all()
    assert np.count_nonzero(ours != truth) <= 1e-4 * truth.size


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hidden_size", [64, 576, 4096, 5120])
def test_the_rotation_is_the_references_to_the_bit(hidden_size: int, device: str) -> None:
    states = massive_states(3, hidden_size)
    np.testing.assert_array_equal(rotate(states.to(device)).cpu().numpy(), reference_rotate(states.numpy()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [64, 576, 4096])
@pytest.mark.parametrize("codec", CODECS)
def test_massive_activations_have_the_references_codes(
    codec: str, hidden_size: int, dtype: torch.dtype, device: str
) -> None:
    check_codes(codec, massive_states(2, 20, hidden_size).to(dtype), device)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    codec=st.sampled_from(list(CODECS)),
    hidden_size=st.integers(1, 12).map(lambda n: 64 * n),
    num_tokens=st.integers(0, 4),
    seed=st.integers(0, 999),
    values=st.lists(st.integers(0, 0xFFFF).filter(lambda code: code & 0x7F80 < 0x7500), min_size=1, max_size=5),
)
def test_any_values_have_the_references_codes(
    codec: str, hidden_size: int, num_tokens: int, seed: int, values: list[int]
) -> None:
    """Few different values, so that ties and groups of zeros occur; of magnitudes whose sums don't overflow."""
    picked = np.random.default_rng(seed).integers(len(values), size=(num_tokens, hidden_size))
    check_codes(codec, torch.from_numpy(decode_bf16(np.array(values, np.uint16))[picked]), "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, torch.finfo(torch.float32).max])
def test_what_is_not_finite_is_told_token_by_token(codec: str, bad: float, device: str) -> None:
    states = torch.ones(2, 3, 128)
    states[1, 2, 70:73] = bad
    expected = torch.ones(2, 3, dtype=torch.bool)
    expected[1, 2] = False
    assert torch.equal(encode(codec, states.to(device)).is_finite.cpu(), expected)
