"""How fast rows come from disk into the buffers of a trainer, by this project's reader and by others on the same data.

    python -m benchmarks.feed --directory /data/scratch [--codecs bf16 int8] [--gigabytes 4] [--readers 1 3]

Writes a cache for each codec and the same arrays as .npy and safetensors files, checks that every way of reading gives
every value, and only then times them: random rows, in GB/s of values as stored. Each reader is a process with one
thread and takes its share of the rows. "warm" finds everything in the file cache, "cold" nothing.
"""

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import zarr
from safetensors import safe_open

from benchmarks.feed_data import Content, DataSet, write_cache, write_flat
from benchmarks.file_cache import drop_from_memory, resident_fraction
from shards.codec import CODECS
from shards.errors import run_command
from shards.manifest import Manifest
from shards.reader import CacheReader, RowBuffers
from shards.schema import hidden_name, shard_arrays, shard_name

GIVE_UP_S = 5.0  # on pages that were advised and do not come

# Each way of reading opens the data and yields a function that fills `out` with `row`; `following` comes next.
Read = Callable[[int, int | None], None]


@contextlib.contextmanager
def by_reader(data: DataSet, out: RowBuffers) -> Iterator[Read]:
    with CacheReader(data.cache) as reader:
        yield lambda row, following: reader.read_row(row, data.layers, out)


@contextlib.contextmanager
def by_advised_reader(data: DataSet, out: RowBuffers) -> Iterator[Read]:
    with CacheReader(data.cache) as reader:

        def read(row: int, following: int | None) -> None:
            if following is not None:
                reader.advise(following, data.layers)
            reader.read_row(row, data.layers, out)

        yield read


@contextlib.contextmanager
def by_preadv(data: DataSet, out: RowBuffers) -> Iterator[Read]:
    """The ceiling: as much straight from flat files, without looking at it."""
    with contextlib.ExitStack() as stack:
        files = []
        for name, destination in data.by_name(out).items():
            offset = np.load(data.flat_file(name), mmap_mode="r").offset
            files.append((stack.enter_context(open(data.flat_file(name), "rb", buffering=0)), offset, destination))

        def read(row: int, following: int | None) -> None:
            for file, offset, destination in files:
                num_bytes = os.preadv(file.fileno(), [destination], offset + row * destination.nbytes)
                assert num_bytes == destination.nbytes

        yield read


@contextlib.contextmanager
def by_memmap(data: DataSet, out: RowBuffers) -> Iterator[Read]:
    arrays = [(np.load(data.flat_file(name), mmap_mode="r"), to) for name, to in data.by_name(out).items()]

    def read(row: int, following: int | None) -> None:
        for stored, destination in arrays:
            np.copyto(destination, stored[row])

    yield read


@contextlib.contextmanager
def by_safetensors(data: DataSet, out: RowBuffers) -> Iterator[Read]:
    with safe_open(data.safetensors_file, framework="numpy") as file:

        def read(row: int, following: int | None) -> None:
            for name, destination in data.by_name(out).items():
                np.copyto(destination, file.get_slice(name)[row])

        yield read


@contextlib.contextmanager
def by_zarr(data: DataSet, out: RowBuffers) -> Iterator[Read]:
    rows_per_shard = Manifest.read(data.cache).plan.rows_per_shard
    num_shards = -(-data.num_rows // rows_per_shard)
    groups = [zarr.open_group(data.cache / shard_name(i), mode="r") for i in range(num_shards)]

    def read(row: int, following: int | None) -> None:
        for name, destination in data.by_name(out).items():
            np.copyto(destination, groups[row // rows_per_shard][name][row % rows_per_shard])

    yield read


WAYS: dict[str, Callable[[DataSet, RowBuffers], contextlib.AbstractContextManager[Read]]] = {
    "reader": by_reader,
    "reader, next row advised": by_advised_reader,
    "raw preadv, unchecked": by_preadv,
    "np.memmap": by_memmap,
    "safetensors": by_safetensors,
    "zarr": by_zarr,
}


def check(data: DataSet, content: Content) -> None:
    """Every way gives every value of every row, or nothing is timed."""
    out = data.allocate()
    for way, opened in WAYS.items():
        with opened(data, out) as read:
            for row in range(data.num_rows):
                read(row, None)
                for name, expected in content.row(row).items():
                    np.testing.assert_array_equal(data.by_name(out)[name], expected, err_msg=f"{way} {name} {row}")


def time_way(data: DataSet, way: str, *, num_readers: int, is_cold: bool, num_repeats: int) -> list[float]:
    """GB/s of all readers together, of each repetition. Empty if the file system can't be made cold."""
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit zarr's threads
    barrier, times = spawn.Barrier(num_readers + 1), spawn.SimpleQueue()
    arguments = [(data, way, reader, num_readers, num_repeats, barrier, times) for reader in range(num_readers)]
    processes = [spawn.Process(target=read_share, args=of_reader) for of_reader in arguments]
    for process in processes:
        process.start()
    speeds = []
    try:
        for _ in range(num_repeats):
            barrier.wait()
            is_dropped = not is_cold or drop_from_memory(data.directory)
            barrier.wait()
            spans = [times.get() for _ in range(num_readers)]
            seconds = max(stop for _, stop in spans) - min(start for start, _ in spans)
            if is_dropped:
                speeds.append(data.num_rows * data.row_bytes / seconds / 1e9)
    finally:
        for process in processes:
            process.join()
    return speeds


def read_share(
    data: DataSet, way: str, reader: int, num_readers: int, num_repeats: int, barrier: Barrier, times: SimpleQueue
) -> None:
    """One reader: its share of each repetition's random order of all rows."""
    out = data.allocate()
    for repeat in range(num_repeats):
        rows = np.random.default_rng(repeat).permutation(data.num_rows)[reader::num_readers].tolist()
        barrier.wait()  # nothing is open or mapped: it could not be made cold
        barrier.wait()
        with WAYS[way](data, out) as read:
            start = time.monotonic()  # the same clock in all processes
            for row, following in zip(rows, [*rows[1:], None], strict=True):
                read(row, following)
            times.put((start, time.monotonic()))
        del read  # the last that holds a mapping


def describe_machine() -> str:
    with open("/proc/cpuinfo") as file:
        models = {line.partition(":")[2].strip() for line in file if line.startswith("model name")}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {version(name)}" for name in ("numpy", "zarr", "safetensors", "google-crc32c"))
    return (
        f"{', '.join(sorted(models))}, {len(os.sched_getaffinity(0))} CPUs, {memory:.0f} GiB; "
        f"Linux {platform.release()}; Python {platform.python_version()}, {versions}"
    )


def cell(speeds: Sequence[float]) -> str:
    return f"{statistics.median(speeds):.2f} ({min(speeds):.2f}–{max(speeds):.2f})" if speeds else "–"


def measure_advice(data: DataSet) -> str:
    """Advise a cold row, and wait until the file cache has it."""
    if not drop_from_memory(data.directory):
        return "this file system keeps what was read: nothing can be said of readahead"
    spec = shard_arrays(Manifest.read(data.cache), 0)[hidden_name(data.layers[-1])]
    path, offsets = data.cache / shard_name(0) / spec.file_name, spec.chunk_offsets()[0].tolist()

    def resident() -> float:
        return statistics.mean(resident_fraction(path, offset, spec.chunk_stride) for offset in offsets)

    with CacheReader(data.cache) as reader:
        started = time.monotonic()
        reader.advise(0, data.layers)
        advised = time.monotonic()
        while (fraction := resident()) < 1 and time.monotonic() < advised + GIVE_UP_S:
            pass
    milliseconds = (advised - started) * 1e3, (time.monotonic() - started) * 1e3
    size = f"a row of {data.row_bytes / 1e6:.0f} MB"
    return f"advising {size} took {milliseconds[0]:.0f} ms; {fraction:.1%} in memory after {milliseconds[1]:.0f} ms"


def report(data: DataSet, options: argparse.Namespace) -> None:
    """Write, check, time; print a table."""
    content = Content(data)
    started = time.perf_counter()
    write_cache(data, content)
    written = data.num_rows * data.row_bytes / (time.perf_counter() - started) / 1e9
    write_flat(data, content)
    check(data, content)
    print(f"\n{data.codec}: {data.num_rows} rows of {data.row_bytes:,} bytes; written at {written:.2f} GB/s")
    columns = [(is_cold, num_readers) for is_cold in (False, True) for num_readers in options.readers]
    heads = [f"{'cold' if is_cold else 'warm'}, {num_readers} reader(s)" for is_cold, num_readers in columns]
    print(f"| GB/s: median (range) | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for way in WAYS:
        cells = [
            cell(time_way(data, way, num_readers=num_readers, is_cold=is_cold, num_repeats=options.repeats))
            for is_cold, num_readers in columns
        ]
        print(f"| {way} | {' | '.join(cells)} |", flush=True)
    print(measure_advice(data), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.feed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, metavar="DIR", help="on the disk to measure")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS), metavar="CODEC")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of values, for each codec and format")
    parser.add_argument("--readers", nargs="+", type=int, default=[1, 3], help="processes that read at a time")
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=5, help="how many")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    return run_command(lambda: measure(options))


def measure(options: argparse.Namespace) -> None:
    print(describe_machine(), flush=True)
    for codec in options.codecs:
        with tempfile.TemporaryDirectory(prefix="feed-", dir=options.directory) as folder:
            data = DataSet(
                directory=Path(folder),
                codec=codec,
                num_rows=1,
                row_tokens=options.row_tokens,
                hidden_size=options.hidden_size,
                layers=tuple(range(1, options.layers + 1)),
            )
            num_rows = max(*options.readers, round(options.gigabytes * 1e9 / data.row_bytes))
            report(dataclasses.replace(data, num_rows=num_rows), options)


if __name__ == "__main__":
    sys.exit(main())
