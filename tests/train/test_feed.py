"""The feed: what was written is what is staged, for any row, with its own features or another row's."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shards.codec import CODECS
from shards.reader import CacheReader
from shards.schema import PlanArrays
from tests.train.caches import random_features, write_cache, write_config
from train.config import RunConfig
from train.feed import Feed
from train.order import NO_ROW
from train.staging import StagedRows

LAYERS = (4, 1)  # not in the order of the cache


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("feed")
    return write_cache(directory / "cache", RunConfig.load(write_config(directory / "tiny.toml")))


@pytest.fixture
def reader(cache):
    with CacheReader(cache) as reader:
        yield reader


def new_feed(reader: CacheReader, *, num_rows: int = 2) -> Feed:
    staged = StagedRows.allocate(
        num_rows=num_rows,
        num_tokens=reader.manifest.cache.row_tokens,
        num_layers=len(LAYERS),
        hidden_size=reader.manifest.target.hidden_size,
        codec=reader.manifest.cache.codec,
        device=torch.device("cpu"),
    )
    return Feed(reader, LAYERS, staged)


def check_row(feed: Feed, cache: Path, index: int, row: int, feature_row: int) -> None:
    """The staged row is the plan's `row`, and its codes are the bf16 bits of `feature_row`'s features."""
    staged, manifest = feed.staged, feed.reader.manifest
    assert staged.row_ids_R[index] == row
    expected = PlanArrays.read(cache / "plan").row_arrays(row, manifest.cache.row_tokens)
    for name in ("input_ids", "position_ids", "document_ids", "loss_mask"):
        np.testing.assert_array_equal(getattr(staged, f"{name}_RT")[index].numpy(), getattr(expected, name))
    documents = PlanArrays.read(cache / "plan").row_arrays(feature_row, manifest.cache.row_tokens).document_ids
    for k, layer in enumerate(LAYERS):
        features = torch.from_numpy(random_features(manifest, feature_row, layer)).bfloat16()
        features[documents < 0] = 0
        assert torch.equal(staged.codes_RKTC[index, k].view(torch.bfloat16), features)


def test_every_row_is_staged_as_it_was_written(reader, cache):
    feed = new_feed(reader)
    num_rows = reader.manifest.plan.num_rows
    for first in range(0, num_rows - 1, 2):
        feed.load([first, num_rows - 1 - first], epoch=first)
        check_row(feed, cache, 0, first, first)
        check_row(feed, cache, 1, num_rows - 1 - first, num_rows - 1 - first)
        assert feed.staged.epoch == first


def test_a_row_with_the_features_of_another(reader, cache):
    feed = new_feed(reader)
    feed.load([11, 12], epoch=0, feature_rows=[12, 13])
    check_row(feed, cache, 0, 11, 12)
    check_row(feed, cache, 1, 12, 13)


@pytest.mark.parametrize("rows", [[3, NO_ROW], [3]])
def test_rows_that_are_lacking_have_nothing_to_learn(reader, cache, rows):
    feed = new_feed(reader)
    for _ in range(3):  # every slot has held a full row
        feed.load([0, 1], epoch=0)
    feed.load(rows, epoch=1)
    check_row(feed, cache, 0, 3, 3)
    assert feed.staged.row_ids_R[1] == NO_ROW
    assert not feed.staged.loss_mask_RT[1].any()


def test_the_staged_tensors_stay_where_they_are(reader):
    feed = new_feed(reader)
    before = {name: tensor.data_ptr() for name, tensor in vars(feed.staged).items()}
    for row in range(5):
        feed.load([row, row + 1], epoch=row)
    assert before == {name: tensor.data_ptr() for name, tensor in vars(feed.staged).items()}


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_codes_and_scales_are_staged_as_they_are_stored(codec, tmp_path):
    overrides = [f"cache.codec={codec}", "target.hidden_size=128"]
    write_cache(tmp_path / "cache", RunConfig.load(write_config(tmp_path / "tiny.toml"), overrides))
    with CacheReader(tmp_path / "cache") as reader:
        feed = new_feed(reader)
        feed.load([2, 5], epoch=0, feature_rows=[5, 2])
        plan = PlanArrays.read(tmp_path / "cache/plan")
        for index, row in enumerate((5, 2)):
            used = plan.row_arrays(row, reader.manifest.cache.row_tokens).document_ids >= 0
            for k, layer in enumerate(LAYERS):
                expected = CODECS[codec].encode(random_features(reader.manifest, row, layer) * used[:, None])
                np.testing.assert_array_equal(feed.staged.codes_RKTC[index, k].numpy(), expected.codes)
                np.testing.assert_array_equal(feed.staged.scales_RKTG[index, k].numpy(), expected.scales)
