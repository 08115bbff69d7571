"""What the kernel is told of rows, seen in its file cache: rows to come are there, those that do not fit are gone."""

import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.file_cache import drop_from_memory, resident_fraction
from shards.reader import CacheReader
from shards.schema import hidden_name, shard_arrays, shard_name
from tests.shards.caches import CacheShape, allocate, make_cache
from train.order import NO_ROW
from train.readahead import Readahead, file_cache_bytes, rows_that_fit

SHAPE = CacheShape(num_rows=6, rows_per_shard=2, row_tokens=512, hidden_size=2048, layers=(1, 4))
ROW_BYTES = 512 * 2048 * 2  # of a layer in bf16
PRESENT, GONE = 1.0, 0.02  # pages at the ends of a row's bytes are shared with its neighbours


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("readahead") / "cache"
    make_cache(path, SHAPE)
    if not drop_from_memory(path):
        pytest.skip("this file system keeps its files in memory")
    return path


def resident(reader: CacheReader, row: int, layer: int) -> float:
    """The share of a row's bytes that are in memory."""
    shard, row_in_shard = divmod(row, SHAPE.rows_per_shard)
    spec = shard_arrays(reader.manifest, shard)[hidden_name(layer)]
    path, offsets = reader.cache / shard_name(shard) / spec.file_name, spec.chunk_offsets()[row_in_shard].tolist()
    return float(np.mean([resident_fraction(path, offset, spec.chunk_stride) for offset in offsets]))


def wait_until_present(reader: CacheReader, row: int, layer: int) -> None:
    """Requests are answered in the kernel's own time, and these were made: else this never ends."""
    while resident(reader, row, layer) < PRESENT:
        time.sleep(0.001)


def test_rows_to_come_are_there_and_rows_beyond_the_memory_are_gone(cache: Path) -> None:
    order = [5, 0, 3, 1, 4, NO_ROW, 2]
    drop_from_memory(cache)
    with CacheReader(cache) as reader:
        out = allocate(reader.manifest, 1)
        readahead = Readahead(reader, [4], iter(order), num_rows=2, memory_bytes=2 * ROW_BYTES + 1)
        for i, row in enumerate(order):
            coming = [later for later in order[i : i + 2] if later != NO_ROW]
            for later in coming:
                wait_until_present(reader, later, 4)
            for later in set(order[i + 2 :]) - {NO_ROW}:
                assert resident(reader, later, 4) <= GONE, (row, later)
            if row != NO_ROW:
                reader.read_row(row, [4], out)
            readahead.advance([row])
        found = {row: resident(reader, row, 4) for row in range(6)}
        assert {row for row in found if found[row] == PRESENT} == {0, 1}, found  # the first two are what fits
        assert max(found[row] for row in range(2, 6)) <= GONE, found
        assert max(resident(reader, row, 1) for row in range(6)) <= GONE  # a layer that nobody trains on


def test_a_cache_that_fits_stays(cache: Path) -> None:
    drop_from_memory(cache)
    with CacheReader(cache) as reader:
        readahead = Readahead(reader, [4, 1], iter(range(6)), num_rows=3, memory_bytes=file_cache_bytes())
        for rows in ([0, 1], [2, 3], [4, 5]):
            readahead.advance(rows)
        for row in range(6):
            wait_until_present(reader, row, 1)


def test_rows_that_fit_are_counted_in_stored_bytes(cache: Path) -> None:
    with CacheReader(cache) as reader:
        assert rows_that_fit(reader.manifest, [4, 1], 6 * ROW_BYTES) == 3
        assert rows_that_fit(reader.manifest, [4], 6 * ROW_BYTES - 1) == 5
