"""Writing one array of a shard, a row at a time: chunks and their checksums straight to their places in the file.

The bytes are those that zarr writes for the same values, but that compressed chunks lie in the order of the rows; zarr
itself copies each chunk several times and holds the whole array in memory. What a row may hold is the writer's part,
where chunks lie the schema's.
"""

import os
from pathlib import Path
from typing import Any, Self

import google_crc32c
import numpy as np

from shards.compression import compress
from shards.durable import json_text
from shards.schema import CRC_BYTES, INDEX_ENTRY_BYTES, ZARR_FILE, ArraySpec


def write_metadata(directory: Path, metadata: dict[str, Any]) -> None:
    """Write the zarr.json of a group or an array."""
    directory.mkdir(exist_ok=True)
    (directory / ZARR_FILE).write_text(json_text(metadata), encoding="utf-8")


class ArrayWriter:
    """The files of one array below a shard's directory."""

    def __init__(self, directory: Path, spec: ArraySpec) -> None:
        self.spec = spec
        self._index = np.zeros((spec.num_rows, spec.chunks_per_row, INDEX_ENTRY_BYTES // 8), "<u8")
        self._offsets = spec.chunk_offsets()
        self._num_bytes = 0  # of chunks, so far
        path = directory / spec.file_name
        path.parent.mkdir(parents=True)
        write_metadata(directory / spec.name, spec.zarr_metadata())
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write_row(self, row: int, values: np.ndarray) -> None:
        """Write `values`, of the array's shape without the row axis, as `row`, counted in the shard."""
        chunks = np.ascontiguousarray(values).reshape(self.spec.chunks_per_row, -1).view(np.uint8)
        for chunk, values_of_chunk in enumerate(chunks):
            if self.spec.is_compressed:  # one after the other, as they come
                stored, offset = compress(values_of_chunk), self._num_bytes
            else:
                stored, offset = values_of_chunk, int(self._offsets[row, chunk])
            self._write(stored, offset)
            self._index[row, chunk] = offset, len(stored) + CRC_BYTES
            self._num_bytes += len(stored) + CRC_BYTES

    def write_index(self) -> None:
        """To be called after the last row."""
        self._write(self._index.reshape(-1).view(np.uint8), self._num_bytes)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, stored: np.ndarray, offset: int) -> None:
        """Write bytes at `offset`, followed by their crc32c."""
        crc = google_crc32c.value(stored).to_bytes(CRC_BYTES, "little")
        buffers = [memoryview(stored), memoryview(crc)]
        while buffers:  # a disk that fills up takes a part, and says why at the next call
            num_bytes = os.pwritev(self._descriptor, buffers, offset)
            offset += num_bytes
            while buffers and num_bytes >= len(buffers[0]):
                num_bytes -= len(buffers.pop(0))
            if buffers:
                buffers[0] = buffers[0][num_bytes:]
