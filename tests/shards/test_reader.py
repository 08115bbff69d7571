"""How the reader behaves around its values: buffers, descriptors, threads, imports, what is missing."""

import dataclasses
import mmap
import os
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from benchmarks.file_cache import drop_from_memory, resident_fraction
from shards.errors import CacheError
from shards.manifest import Manifest
from shards.reader import CacheReader
from shards.schema import hidden_name, shard_arrays, shard_name
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


@pytest.mark.parametrize(("soft", "hard", "expected"), [(40, 40, 20), (40, 4096, 2048)])
def test_descriptors_are_no_more_than_a_process_may_have(cache: Path, soft: int, hard: int, expected: int) -> None:
    """In a process of its own, which may not raise its hard limit again: 24 arrays through 20 descriptors."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from shards.reader import CacheReader\n"
        "from tests.shards.caches import allocate\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))\n"
        "with CacheReader(Path(sys.argv[1])) as reader:\n"
        "    for row in (0, 4, 1, 2, 4, 0, 3):\n"
        "        reader.read_row(row, [1, 4, 6], allocate(reader.manifest, 3))\n"
        "    print(reader.max_open_files)\n"
    )
    command = [sys.executable, "-c", code, str(cache), str(soft), str(hard)]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert output == f"{expected}\n"


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


def test_a_read_allocates_nothing_that_grows_with_the_row(tmp_path: Path) -> None:
    """What is left is Python's own small objects: lists of views, offsets, strings."""
    small_objects = 8 << 10
    shape = CacheShape(num_rows=2, row_tokens=2048, hidden_size=512, codec="int8")
    out = allocate(make_cache(tmp_path / "cache", shape), 3)
    assert out.codes.nbytes + out.scales.nbytes > 300 * small_objects
    with CacheReader(tmp_path / "cache") as reader:
        for row in range(2):
            reader.read_row(row, shape.layers, out)  # opens the files
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for row in [0, 1] * 10:
            tracemalloc.reset_peak()
            reader.read_row(row, shape.layers, out)
            now, peak = tracemalloc.get_traced_memory()
            assert peak - now < small_objects
        tracemalloc.stop()
        assert now - before < small_objects / 8


def resident(cache: Path, row: int) -> dict[int, float]:
    """Share of a row's pages in the file cache, by layer."""
    manifest = Manifest.read(cache)
    shard, row_in_shard = divmod(row, manifest.plan.rows_per_shard)
    found = {}
    for layer in manifest.cache.layers:
        spec = shard_arrays(manifest, shard)[hidden_name(layer)]
        path, stride = cache / shard_name(shard) / spec.file_name, spec.chunk_stride
        chunks = [resident_fraction(path, start, stride) for start in spec.chunk_offsets()[row_in_shard].tolist()]
        found[layer] = float(np.mean(chunks))
    return found


def test_rows_come_into_memory_when_advised_and_leave_when_forgotten(tmp_path: Path) -> None:
    """Only the row and the layers that were named, and all of them: a chunk of 2 MB takes 17 pieces."""
    shape = CacheShape(num_rows=4, rows_per_shard=4, row_tokens=1024, hidden_size=2048, layers=(1, 4))
    make_cache(tmp_path, shape)
    if not drop_from_memory(tmp_path):
        pytest.skip("this file system keeps its files in memory")
    # A page at each end of a chunk is shared with its neighbour in the file.
    shared = 2 * mmap.PAGESIZE / (512 * 2048 * 2)
    with CacheReader(tmp_path) as reader:
        out = allocate(reader.manifest, 2)
        reader.advise(2, [4])
        for _ in range(10_000):  # the kernel has its requests, and answers them all
            if resident(tmp_path, 2)[4] == 1:
                break
            time.sleep(0.001)
        assert resident(tmp_path, 2)[4] == 1
        assert resident(tmp_path, 2)[1] <= shared
        assert max(resident(tmp_path, 0).values()) <= shared
        reader.read_row(2, [4, 1], out)
        assert min(resident(tmp_path, 2).values()) == 1
        reader.forget(2, [4])
        assert resident(tmp_path, 2)[4] <= shared
        assert resident(tmp_path, 2)[1] == 1


@pytest.mark.parametrize("method", ["advise", "forget"])
def test_advice_on_what_is_not_there_is_refused(cache: Path, tmp_path: Path, method: str) -> None:
    with CacheReader(cache) as reader:
        with pytest.raises(ValueError, match=r"row is 5, the cache has rows 0\.\.4"):
            getattr(reader, method)(5, [1])
        with pytest.raises(CacheError, match=r"has the layers \[1, 4, 6\], asked for \[5\]"):
            getattr(reader, method)(0, [5])
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "shard-00001")
    with CacheReader(tmp_path) as reader, pytest.raises(CacheError, match="shard-00001 is missing: run `python -m sh"):
        getattr(reader, method)(2, [1])


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
