"""Reading a cache for training: from the disk straight into buffers of the caller, on the caller's thread.

zarr can read every array too, but starts threads that stay and copies twice. Here a row is a few `preadv` calls whose
destinations are the caller's memory, with the crc32c of every chunk checked on the way. Imports neither zarr nor torch.
Reading ahead of the caller is the kernel's part: `advise` says which row comes next, `forget` which one is done with.
"""

import os
import resource
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import google_crc32c
import numpy as np

from shards.codec import CODECS
from shards.compression import decompress
from shards.errors import CacheError
from shards.manifest import Manifest, read_json
from shards.schema import (
    CRC_BYTES,
    ROW_IDS,
    ZARR_FILE,
    ArraySpec,
    hidden_name,
    scales_name,
    shard_arrays,
    shard_name,
)

EMPTY_CHUNK = 2**64 - 1  # zarr's offset and length of a chunk that has no bytes
# Linux cuts what it is asked to read ahead to the device's largest request and says nothing. None is smaller than this.
READAHEAD_BYTES = 128 << 10
PIECE_BYTES = 512 << 10  # read and checked in one go: a fifth faster, warm, than whole chunks; smaller ones cost calls
MAX_OPEN_FILES = 16_384  # of thousands of shards with a dozen arrays, each at the cost of a kilobyte or two
SLOT_ARRAYS = ("input_ids", "position_ids", "document_ids", "loss_mask")  # of those, what a trainer needs


@dataclass(frozen=True, kw_only=True)
class RowBuffers:
    """Where a row goes: memory of the caller, C-contiguous. K layers in the order that `read_row` is given."""

    input_ids: np.ndarray  # int32 [T]
    position_ids: np.ndarray  # int32 [T]
    document_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]
    codes: np.ndarray  # [K, T, code width] of the codec's type: for bf16 uint16 [K, T, H]
    scales: np.ndarray | None = None  # uint16 [K, T, scale width]; not looked at where the codec has no scales


class ArrayFile:
    """One array of a published shard, open for reading.

    Opening checks all that is not values: the array's zarr.json, the size of its file, its index. Errors are
    CacheErrors that begin with shard and array.
    """

    def __init__(self, directory: Path, spec: ArraySpec, first_row: int) -> None:
        """`directory` is the shard's; `first_row` is the shard's first row in the cache, for messages."""
        self.spec = spec
        self._label = f"{directory.name} {spec.name}"
        self._first_row = first_row
        self._crcs = np.empty((spec.chunks_per_row, CRC_BYTES), np.uint8)
        self._check_metadata(directory / spec.name / ZARR_FILE)
        try:
            self._descriptor = os.open(directory / spec.file_name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CacheError(f"{self._label}: the array file cannot be opened: {error.strerror}") from None
        try:
            self._places = self._read_index()  # uint64 [R, chunks of a row, 2]: offset, and bytes with the checksum
        except BaseException:
            self.close()
            raise

    def read_row(self, row: int, out: np.ndarray) -> None:
        """Fill `out` with the values of `row`, counted in the shard. Its shape is the array's without the row axis."""
        spec = self.spec
        if out.shape != spec.row_shape or out.dtype != spec.dtype or not out.flags.c_contiguous:
            raise ValueError(
                f"{self._label} needs a contiguous {spec.dtype} {spec.row_shape}, got {out.dtype} {out.shape}"
            )
        chunks = out.reshape(spec.chunks_per_row, -1).view(np.uint8)  # [chunks of a row, bytes of a chunk]
        read = self._read_compressed if spec.is_compressed else self._read_chunk
        for chunk, (offset, num_bytes) in enumerate(self._places[row].tolist()):
            read(row, chunk, offset, num_bytes, chunks[chunk])

    def advise(self, row: int) -> None:
        """Ask the kernel to read `row`, counted in the shard, into the file cache."""
        for start, num_bytes in self._places[row].tolist():
            stop = start + num_bytes
            for piece in range(start, stop, READAHEAD_BYTES):
                os.posix_fadvise(self._descriptor, piece, min(READAHEAD_BYTES, stop - piece), os.POSIX_FADV_WILLNEED)

    def forget(self, row: int) -> None:
        """Tell the kernel that the file cache need not keep `row`, counted in the shard."""
        for start, num_bytes in self._places[row].tolist():
            os.posix_fadvise(self._descriptor, start, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._descriptor)

    def _read_chunk(self, row: int, chunk: int, offset: int, _num_bytes: int, values: np.ndarray) -> None:
        """In pieces, so that the checksum finds them in the core's cache, where the kernel has just put them."""
        crc, found = self._crcs[chunk], 0
        for start in range(0, len(values), PIECE_BYTES):
            piece = values[start : start + PIECE_BYTES]
            is_last = start + PIECE_BYTES >= len(values)
            self._fill([piece, crc] if is_last else [piece], offset + start)
            found = google_crc32c.extend(found, piece)  # an ndarray goes in without a copy, a memoryview would not
        self._check_crc(self._place(row, chunk), found, crc)

    def _read_compressed(self, row: int, chunk: int, offset: int, num_bytes: int, values: np.ndarray) -> None:
        stored, crc = np.empty(num_bytes - CRC_BYTES, np.uint8), self._crcs[chunk]
        self._fill([stored, crc], offset)
        self._check_crc(self._place(row, chunk), google_crc32c.value(stored), crc)
        try:
            decompress(stored, values)
        except ValueError as error:
            raise CacheError(f"{self._place(row, chunk)}: {error}") from None

    def _check_crc(self, place: str, found: int, crc: np.ndarray) -> None:
        expected = int.from_bytes(crc.tobytes(), "little")
        if found != expected:
            raise CacheError(f"{place}: crc32c is {found:#010x}, expected {expected:#010x}")

    def _fill(self, buffers: list[np.ndarray], offset: int) -> None:
        """Read from `offset` on until `buffers`, flat byte arrays, are full; empties the list."""
        while buffers:
            try:
                num_bytes = os.preadv(self._descriptor, buffers, offset)
            except OSError as error:
                raise CacheError(f"{self._label}: byte {offset} cannot be read: {error.strerror}") from None
            if num_bytes == 0:
                raise CacheError(f"{self._label}: the array file ends at byte {offset}, it was cut while open")
            offset += num_bytes
            while buffers and num_bytes >= len(buffers[0]):
                num_bytes -= len(buffers.pop(0))
            if num_bytes:
                buffers[0] = buffers[0][num_bytes:]

    def _check_metadata(self, path: Path) -> None:
        expected = self.spec.zarr_metadata()
        found = read_json(path)
        if not isinstance(found, dict):
            raise CacheError(f"{self._label}: {ZARR_FILE} holds no object")
        for key in [*expected, *sorted(found.keys() - expected.keys())]:
            if found.get(key) != expected.get(key):
                raise CacheError(
                    f"{self._label}: {ZARR_FILE} has {key} {found.get(key)!r}, expected {expected.get(key)!r}"
                )

    def _read_index(self) -> np.ndarray:
        """Offset and bytes of each chunk, uint64 [R, chunks of a row, 2]. Together they must fill the file exactly."""
        spec = self.spec
        size = os.fstat(self._descriptor).st_size
        chunks_stop = size - spec.index_bytes - CRC_BYTES
        if chunks_stop < 0 if spec.is_compressed else size != spec.file_bytes:
            expected = f"more than {spec.index_bytes}" if spec.is_compressed else spec.file_bytes
            raise CacheError(f"{self._label}: the array file has {size} bytes, expected {expected}")
        stored = np.empty(spec.index_bytes, np.uint8)
        crc = np.empty(CRC_BYTES, np.uint8)
        self._fill([stored, crc], chunks_stop)
        self._check_crc(f"{self._label} index", google_crc32c.value(stored), crc)

        entries = stored.view("<u8").reshape(spec.num_rows, spec.chunks_per_row, 2)
        offsets, lengths = entries[..., 0], entries[..., 1]
        for row, chunk in np.argwhere((entries == EMPTY_CHUNK).any(axis=-1)):
            raise CacheError(f"{self._place(row, chunk)}: the chunk is empty, and a cache stores every chunk")
        shortest, longest = (CRC_BYTES, chunks_stop) if spec.is_compressed else (spec.chunk_stride,) * 2
        for row, chunk in np.argwhere((lengths < shortest) | (lengths > longest)):
            expected = f"{shortest} to {longest}" if spec.is_compressed else shortest
            raise CacheError(
                f"{self._place(row, chunk)}: the index says {lengths[row, chunk]} bytes, expected {expected}"
            )
        in_file_order = np.argsort(offsets, axis=None)
        stops = np.cumsum(lengths.flat[in_file_order])
        starts = np.concatenate([np.zeros(1, np.uint64), stops[:-1]])
        if not np.array_equal(offsets.flat[in_file_order], starts) or stops[-1] != chunks_stop:
            raise CacheError(f"{self._label} index: its chunks overlap, leave gaps or lie outside the file")
        return entries

    def _place(self, row: int, chunk: int) -> str:
        place = f"{self._label} row {self._first_row + row}"
        if self.spec.chunks_per_row == 1:
            return place
        tokens = self.spec.chunk_shape[1]
        return f"{place} tokens {chunk * tokens}–{(chunk + 1) * tokens - 1}"


class CacheReader:
    """The rows of a cache. Files open when they are first needed; the least recently used ones close again."""

    def __init__(self, cache: Path, *, max_open_files: int | None = None) -> None:
        """`max_open_files`: None for what the process may have, which is raised as far as the system lets it."""
        self.cache = cache
        self.max_open_files = open_files_allowance() if max_open_files is None else max_open_files
        self.manifest = Manifest.read(cache)
        self._has_scales = CODECS[self.manifest.cache.codec].scale_width(self.manifest.target.hidden_size) > 0
        self._files: OrderedDict[tuple[int, str], ArrayFile] = OrderedDict()
        self._row_id = np.empty((), np.int64)

    def read_row(self, row: int, layers: Sequence[int], out: RowBuffers) -> None:
        """Fill `out` with `row`; raise CacheError if any of it is not as it was written."""
        slots = (getattr(out, name) for name in SLOT_ARRAYS)
        scales = out.scales if self._has_scales else ()
        destinations = (self._row_id, *slots, *out.codes, *scales)
        names = self._names(row, layers)
        shard, row_in_shard = divmod(row, self.manifest.plan.rows_per_shard)
        with self._blame():
            for name, destination in zip(names, destinations, strict=True):
                self._array(shard, name).read_row(row_in_shard, destination)
            self._check_row_id(shard, self._row_id, row)

    def advise(self, row: int, layers: Sequence[int]) -> None:
        """Ask the kernel to read `row` ahead, so that `read_row` of it will find it in memory.

        Returns when the requests are made, which takes 10 to 20 µs for each 128 kB; a full disk queue delays it. A file
        system may ignore them.
        """
        names = self._names(row, layers)
        shard, row_in_shard = divmod(row, self.manifest.plan.rows_per_shard)
        with self._blame():
            for name in names:
                self._array(shard, name).advise(row_in_shard)

    def forget(self, row: int, layers: Sequence[int]) -> None:
        """Let the kernel drop `row` from memory: for caches that are larger, where it would push out what is needed."""
        names = self._names(row, layers)
        shard, row_in_shard = divmod(row, self.manifest.plan.rows_per_shard)
        with self._blame():
            for name in names:
                self._array(shard, name).forget(row_in_shard)

    def read_arrays(self, row: int, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Arrays of `row` by name, in memory of their own: for tools, which need others than a trainer."""
        shard, row_in_shard = divmod(row, self.manifest.plan.rows_per_shard)
        arrays = {}
        with self._blame():
            for name in (ROW_IDS, *names):
                file = self._array(shard, name)
                arrays[name] = np.empty(file.spec.row_shape, file.spec.dtype)
                file.read_row(row_in_shard, arrays[name])
            self._check_row_id(shard, arrays.pop(ROW_IDS), row)
        return arrays

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _blame(self) -> Iterator[None]:
        try:
            yield
        except CacheError as error:
            raise CacheError(f"{error}: run `python -m shards verify {self.cache}`") from None

    def _check_row_id(self, shard: int, found: np.ndarray, row: int) -> None:
        if found != row:
            raise CacheError(f"{shard_name(shard)} has row {found} in the place of row {row}")

    def _names(self, row: int, layers: Sequence[int]) -> list[str]:
        """The arrays that `row` is read from: row ids, slots, codes, scales."""
        plan, stored = self.manifest.plan, self.manifest.cache.layers
        if not 0 <= row < plan.num_rows:
            raise ValueError(f"row is {row}, the cache has rows 0..{plan.num_rows - 1}")
        if not set(layers) <= set(stored):
            raise CacheError(f"{self.cache} has the layers {list(stored)}, asked for {list(layers)}")
        codes = [hidden_name(layer) for layer in layers]
        scales = [scales_name(name) for name in codes] if self._has_scales else []
        return [ROW_IDS, *SLOT_ARRAYS, *codes, *scales]

    def _array(self, shard: int, name: str) -> ArrayFile:
        if (shard, name) in self._files:
            self._files.move_to_end((shard, name))
        else:
            self._files[shard, name] = self._open(shard, name)
            if len(self._files) > self.max_open_files:
                self._files.popitem(last=False)[1].close()
        return self._files[shard, name]

    def _open(self, shard: int, name: str) -> ArrayFile:
        directory = self.cache / shard_name(shard)
        if not directory.is_dir():
            raise CacheError(f"{directory.name} is missing")
        return ArrayFile(
            directory, shard_arrays(self.manifest, shard)[name], self.manifest.plan.shard_rows(shard).start
        )


def open_files_allowance() -> int:
    """Let this process have as many files open as it needs and may; return how many a reader should take of them.

    Opening an array again costs a third of a millisecond, and a row has a dozen.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_OPEN_FILES  # a half is for others
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, soft // 2)
