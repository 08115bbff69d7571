"""The writer of arrays against zarr: the same values have the same bytes, whatever their type, shape and order."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.manifest import Manifest
from shards.schema import ArraySpec, shard_arrays
from shards.writer import ShardRow, ShardRows, write_shard
from tests.shards.caches import CacheShape, content, make_plan, make_rows, start_cache

SHAPES = [
    CacheShape(codec="bf16", final_hidden=True),
    CacheShape(codec="int8", num_rows=7, rows_per_shard=5, row_tokens=1536, layers=(0,)),  # Morton order of 5 × 3
    CacheShape(codec="int4", num_rows=3, rows_per_shard=3, row_tokens=2048, layers=(0,)),
    CacheShape(codec="int8", num_rows=1, rows_per_shard=1, row_tokens=1),
]


def write_with_zarr(path: Path, spec: ArraySpec, values: np.ndarray) -> None:
    """An array as zarr makes it from the sizes and codecs alone, by its own reckoning of everything else."""
    with zarr.config.set({"array.write_empty_chunks": True}):
        array = zarr.create_array(
            path,
            shape=spec.shape,
            dtype=spec.dtype,
            chunks=spec.chunk_shape,
            shards=spec.shape,
            filters=None,
            compressors=zarr.codecs.Crc32cCodec(),
            fill_value=0,
            dimension_names=spec.axes,
            attributes=spec.attributes,
        )
        array[...] = values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_array_files_are_those_that_zarr_writes(tmp_path: Path, shape: CacheShape) -> None:
    plan = make_plan(shape)
    manifest = start_cache(tmp_path / "cache", shape, plan)
    for shard in range(manifest.plan.num_shards):
        rows = make_rows(shape, manifest, plan, shard)
        assert write_shard(tmp_path / "cache", manifest, shard, rows)
        written = content(tmp_path / "cache" / f"shard-{shard:05d}")
        for name, spec in shard_arrays(manifest, shard).items():
            write_with_zarr(tmp_path / "zarr" / str(shard) / name, spec, rows.arrays[name])
            by_zarr = content(tmp_path / "zarr" / str(shard) / name)
            assert by_zarr.keys() == {"zarr.json", spec.file_name.removeprefix(f"{name}/")}
            assert written[spec.file_name] == by_zarr[spec.file_name.removeprefix(f"{name}/")]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 40))
def test_chunks_fill_the_file_in_morton_order(num_rows: int, num_chunks: int) -> None:
    spec = ArraySpec(
        name="a", dtype=np.dtype("u1"), shape=(num_rows, num_chunks), chunk_shape=(1, 1), axes=("row", "token")
    )
    places = [(row, chunk) for row in range(num_rows) for chunk in range(num_chunks)]
    widths = [(size - 1).bit_length() for size in spec.shape]

    def key(place: tuple[int, int]) -> list[int]:
        """The bits of a place, most significant first: of each level the row's below the chunk's."""
        levels = reversed(range(max(widths)))
        return [place[axis] >> level & 1 for level in levels for axis in (1, 0) if level < widths[axis]]

    offsets = spec.chunk_offsets()
    assert [int(offsets[place]) for place in sorted(places, key=key)] == [5 * i for i in range(len(places))]


def stream(rows: ShardRows) -> Iterator[ShardRow]:
    yield from rows


def test_rows_may_come_one_at_a_time(tmp_path: Path) -> None:
    shape = CacheShape(codec="int8")
    plan = make_plan(shape)
    for name, given_as in (("whole", lambda rows: rows), ("stream", stream), ("list", list)):
        manifest = start_cache(tmp_path / name, shape, plan)
        assert write_shard(tmp_path / name, manifest, 0, given_as(make_rows(shape, manifest, plan, 0)))
    assert content(tmp_path / "whole") == content(tmp_path / "stream") == content(tmp_path / "list")


@pytest.mark.parametrize("num_rows", [1, 3])
def test_too_few_or_too_many_rows_are_refused(tmp_path: Path, num_rows: int) -> None:
    shape = CacheShape()
    plan = make_plan(shape)
    manifest = start_cache(tmp_path, shape, plan)
    rows = [*make_rows(shape, manifest, plan, 0), *make_rows(shape, manifest, plan, 1)][:num_rows]
    before = content(tmp_path)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        write_shard(tmp_path, manifest, 0, rows)
    assert content(tmp_path) == before


def random_rows(shape: CacheShape, manifest: Manifest) -> Iterator[ShardRow]:
    plan, rng = make_plan(shape), np.random.default_rng(0)
    codes_TH = rng.integers(0x3F00, 0x4000, (shape.row_tokens, shape.hidden_size)).astype(np.uint16)
    for row in manifest.plan.shard_rows(0):
        arrays = vars(plan.row_arrays(row, shape.row_tokens))
        codes = np.where(arrays["document_ids"][:, None] < 0, 0, codes_TH).astype(np.uint16)
        yield ShardRow(arrays={"row_ids": np.int64(row), **arrays, "hidden/1": codes})


def test_memory_does_not_depend_on_the_size_of_a_shard(tmp_path: Path) -> None:
    """A row has 1 MB of codes. 16 rows and 64 rows need the same memory, of which a few rows' worth is enough."""
    peaks = []
    for num_rows in (16, 64):
        shape = CacheShape(num_rows=num_rows, rows_per_shard=num_rows, row_tokens=1024, hidden_size=512, layers=(1,))
        manifest = start_cache(tmp_path / str(num_rows), shape, make_plan(shape))
        tracemalloc.start()
        assert write_shard(tmp_path / str(num_rows), manifest, 0, random_rows(shape, manifest))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    row_bytes = 1024 * 512 * 2
    assert peaks[1] < peaks[0] + row_bytes
    assert peaks[1] < 8 * row_bytes
