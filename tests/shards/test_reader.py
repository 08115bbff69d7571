"""How the reader behaves around its values: buffers, descriptors, threads, imports, what is missing."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shards.errors import CacheError
from shards.manifest import Manifest
from shards.reader import CacheReader
from tests.shards.caches import CacheShape, allocate, make_cache, make_plan, make_rows

ROOT = Path(__file__).parents[2]
SHAPE = CacheShape()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader") / "cache"
    make_cache(path, SHAPE)
    return path


def open_files(cache: Path) -> int:
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.path.realpath(link).startswith(str(cache)) for link in links)


def test_any_number_of_files_is_read_through_few_descriptors(cache: Path) -> None:
    manifest, plan = Manifest.read(cache), make_plan(SHAPE)
    with CacheReader(cache, max_open_files=3) as reader:
        for row in (0, 4, 1, 2, 4, 0, 3):
            out = allocate(manifest, 2)
            reader.read_row(row, [6, 4], out)
            shard, row_in_shard = divmod(row, SHAPE.rows_per_shard)
            written = make_rows(SHAPE, manifest, plan, shard)
            np.testing.assert_array_equal(out.codes[0], written.hidden[6][row_in_shard])
            np.testing.assert_array_equal(out.codes[1], written.hidden[4][row_in_shard])
            assert open_files(cache) <= 3
        assert open_files(cache) > 0
    assert open_files(cache) == 0


def test_reading_goes_into_the_given_memory(cache: Path) -> None:
    manifest = Manifest.read(cache)
    out = allocate(manifest, 3)
    memory = np.full((5, *out.codes.shape[1:]), 7, np.uint16)
    with CacheReader(cache) as reader:
        reader.read_row(1, SHAPE.layers, dataclasses.replace(out, codes=memory[1:4]))
        reader.read_row(1, SHAPE.layers, out)
    np.testing.assert_array_equal(memory[1:4], out.codes)
    assert (memory[[0, 4]] == 7).all()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("input_ids", np.zeros(96, np.int64)),
        ("loss_mask", np.zeros(95, np.uint8)),
        ("codes", np.zeros((3, 96, 128), np.uint16)[..., ::2]),
        ("codes", np.zeros((2, 96, 64), np.uint16)),
    ],
)
def test_unfit_buffers_are_refused(cache: Path, name: str, wrong: np.ndarray) -> None:
    out = dataclasses.replace(allocate(Manifest.read(cache), 3), **{name: wrong})
    with CacheReader(cache) as reader, pytest.raises(ValueError, match=r"contiguous|shorter"):
        reader.read_row(0, SHAPE.layers, out)


@pytest.mark.parametrize("row", [-1, 5])
def test_rows_outside_the_plan_are_refused(cache: Path, row: int) -> None:
    out = allocate(Manifest.read(cache), 0)
    with CacheReader(cache) as reader, pytest.raises(ValueError, match=rf"row is {row}, the cache has rows 0\.\.4"):
        reader.read_row(row, [], out)


def test_layers_that_are_not_stored_are_refused(cache: Path) -> None:
    out = allocate(Manifest.read(cache), 1)
    with CacheReader(cache) as reader, pytest.raises(CacheError, match=r"has the layers \[1, 4, 6\], asked for \[5\]"):
        reader.read_row(0, [5], out)


def test_a_missing_shard_is_named(cache: Path, tmp_path: Path) -> None:
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    with CacheReader(tmp_path) as reader:
        shutil.rmtree(tmp_path / "shard-00001")
        with pytest.raises(CacheError, match="shard-00001 is missing"):
            reader.read_row(2, [1], allocate(reader.manifest, 1))


def test_a_file_that_is_cut_while_open_is_refused(cache: Path, tmp_path: Path) -> None:
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    with CacheReader(tmp_path) as reader:
        out = allocate(reader.manifest, 1)
        reader.read_row(0, [4], out)
        os.truncate(tmp_path / "shard-00000/hidden/4/c/0/0/0", 100)
        with pytest.raises(CacheError, match=r"shard-00000 hidden/4: the array file ends at byte 100"):
            reader.read_row(0, [4], out)


def test_no_directory_is_a_cache_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"is not a cache: it has no manifest\.json"):
        CacheReader(tmp_path)


READ_EVERYTHING = """
import os, sys, threading
from pathlib import Path
import numpy as np
from shards.manifest import Manifest
from shards.reader import CacheReader, RowBuffers

tasks = len(os.listdir("/proc/self/task"))  # numpy's BLAS may have started its own
with CacheReader(Path(sys.argv[1])) as reader:
    T, H = reader.manifest.cache.row_tokens, reader.manifest.target.hidden_size
    out = RowBuffers(
        input_ids=np.empty(T, np.int32),
        position_ids=np.empty(T, np.int32),
        document_ids=np.empty(T, np.int32),
        loss_mask=np.empty(T, np.uint8),
        codes=np.empty((3, T, H), np.uint16),
    )
    for row in range(reader.manifest.plan.num_rows):
        reader.read_row(row, reader.manifest.cache.layers, out)
assert threading.active_count() == 1
assert len(os.listdir("/proc/self/task")) == tasks
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_reading_starts_no_thread_and_imports_neither_zarr_nor_torch(cache: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ_EVERYTHING, str(cache)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert "google_crc32c" in imported
    assert imported.isdisjoint({"zarr", "numcodecs", "torch", "transformers", "asyncio", "concurrent"})
