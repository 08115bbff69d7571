"""Decoding inside the step, and the rotation that fc takes over: exported weights mean the target's own features."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from shards.codec import CODECS, Encoded, rotate, unrotate
from tests.reference.codec import rotation_matrix
from tests.train.caches import write_config
from train.config import RunConfig
from train.decode import DECODERS, decode_features, unrotate_columns
from train.drafter import Drafter
from train.export import to_target_basis

HIDDEN_SIZE, NUM_TOKENS = 192, 7
NO_SCALES = torch.zeros(1, 2, NUM_TOKENS, 0, dtype=torch.uint16)


@pytest.fixture
def config(tmp_path) -> RunConfig:
    overrides = [f"target.hidden_size={HIDDEN_SIZE}", "cache.codec=int8"]
    return RunConfig.load(write_config(tmp_path / "tiny.toml"), overrides)


def encoded_states(codec: str) -> tuple[np.ndarray, Encoded]:
    """Random states [1, K=2, T, H] with a massive channel, and what is stored of them."""
    values = np.random.default_rng(0).standard_normal((1, 2, NUM_TOKENS, HIDDEN_SIZE), dtype=np.float32)
    values[..., 9] = 700
    values[0, :, 3] = 0
    return values, CODECS[codec].encode(values)


def decode(codec: str, encoded: Encoded, dtype: torch.dtype) -> Tensor:
    scales = NO_SCALES if encoded.scales is None else torch.from_numpy(encoded.scales)
    return decode_features(codec, torch.from_numpy(encoded.codes), scales, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", DECODERS)
def test_features_are_the_references_rounded_once(codec, dtype):
    _, encoded = encoded_states(codec)
    expected = torch.from_numpy(CODECS[codec].decode_stored(encoded)).to(dtype)
    found = decode(codec, encoded, dtype)
    assert found.dtype == dtype
    assert found.shape == (1, NUM_TOKENS, 2 * HIDDEN_SIZE)
    assert torch.equal(found, torch.cat((expected[:, 0], expected[:, 1]), dim=-1))


@pytest.mark.parametrize("hidden_size", [64, 192])
def test_unrotating_columns_is_the_product_with_the_matrix(hidden_size):
    """In fp32: a sum of up to 64 products of magnitude 1/8 is within some 10 roundings of 2⁻²⁴."""
    weight = torch.randn(5, 3 * hidden_size, generator=torch.Generator().manual_seed(0))
    rotation = torch.tensor(rotation_matrix(hidden_size), dtype=torch.float64)
    expected = (weight.double().unflatten(1, (3, hidden_size)) @ rotation).flatten(1)
    torch.testing.assert_close(unrotate_columns(weight, hidden_size).double(), expected, rtol=0, atol=2e-6)


def context_of(config: RunConfig, weights: dict[str, Tensor], features_RTF: Tensor) -> Tensor:
    """What every layer's keys and values are made from, with `weights`, and then all of them."""
    drafter = Drafter(config.drafter, HIDDEN_SIZE)
    drafter.load_state_dict(weights)
    positions = torch.arange(features_RTF.shape[1])[None]
    with torch.no_grad():
        return torch.cat([part.flatten() for pair in drafter.encode_context(features_RTF, positions) for part in pair])


def fresh_weights(config: RunConfig) -> dict[str, Tensor]:
    drafter = Drafter(config.drafter, HIDDEN_SIZE)
    drafter.init_weights(1)
    return {name: weight.detach() for name, weight in drafter.state_dict().items()}


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_exported_drafter_reads_the_targets_features_as_the_trained_one_reads_decoded_ones(config, codec):
    """With the very values that were decoded, taken back to the target's basis, only rounding of fp32 differs."""
    config = replace(config, cache=replace(config.cache, codec=codec))
    _, encoded = encoded_states(codec)
    raw = torch.from_numpy(unrotate(CODECS[codec].decode_stored(encoded))).transpose(1, 2).flatten(2)
    weights = fresh_weights(config)
    trained = context_of(config, weights, decode(codec, encoded, torch.float32))
    exported = context_of(config, to_target_basis(weights, config), raw)
    assert not torch.allclose(trained, context_of(config, weights, raw), rtol=0.1, atol=0.1)  # the bases do differ
    torch.testing.assert_close(exported, trained, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("codec", "limit"), [("int8", 0.01), ("int4", 0.15)])
def test_on_raw_features_they_differ_by_the_codecs_error(config, codec, limit):
    config = replace(config, cache=replace(config.cache, codec=codec))
    values, encoded = encoded_states(codec)
    weights = fresh_weights(config)
    fc = weights["fc.weight"]
    trained = decode(codec, encoded, torch.float32) @ fc.T
    exported = torch.from_numpy(values).transpose(1, 2).flatten(2) @ to_target_basis(weights, config)["fc.weight"].T
    assert torch.linalg.vector_norm(trained - exported) < limit * torch.linalg.vector_norm(exported)


def test_where_every_number_is_exact_the_two_are_equal(config):
    """Blocks of 64: the norm is 1/8, so small whole numbers stay exact in fp32 through rotation, fc and back."""
    rng = np.random.default_rng(3)
    rotated = 8 * rng.integers(-7, 8, (1, 2, NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32)
    raw = unrotate(rotated)
    np.testing.assert_array_equal(rotate(raw), rotated)
    fc = torch.from_numpy(rng.integers(-4, 5, (HIDDEN_SIZE, 2 * HIDDEN_SIZE)).astype(np.float32))
    exported = to_target_basis({"fc.weight": fc}, config)["fc.weight"]
    by_trained = torch.from_numpy(rotated).transpose(1, 2).flatten(2) @ fc.T
    by_exported = torch.from_numpy(raw).transpose(1, 2).flatten(2) @ exported.T
    assert torch.equal(by_trained, by_exported)


def test_without_rotation_the_weights_are_exported_as_they_are(config):
    config = replace(config, cache=replace(config.cache, codec="bf16"))
    weights = fresh_weights(config)
    assert to_target_basis(weights, config) is weights
