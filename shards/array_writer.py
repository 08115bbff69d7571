"""Writing one array of a shard, a row at a time: chunks and their checksums straight to their places in the file.

The bytes are those that zarr writes for the same values; zarr itself copies each chunk several times and holds the
whole array in memory. What a row may hold is the writer's part, where chunks lie the schema's.
"""

import os
from pathlib import Path
from typing import Any, Self

import google_crc32c
import numpy as np

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
        self._offsets = spec.chunk_offsets()
        path = directory / spec.file_name
        path.parent.mkdir(parents=True)
        write_metadata(directory / spec.name, spec.zarr_metadata())
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write_row(self, row: int, values: np.ndarray) -> None:
        """Write `values`, of the array's shape without the row axis, as `row`, counted in the shard."""
        chunks = np.ascontiguousarray(values).reshape(self.spec.chunks_per_row, -1).view(np.uint8)
        for chunk, offset in zip(chunks, self._offsets[row].tolist(), strict=True):
            self._write(chunk, offset)

    def write_index(self) -> None:
        """To be called after the last row."""
        index = np.empty((*self._offsets.shape, INDEX_ENTRY_BYTES // 8), "<u8")
        index[..., 0] = self._offsets
        index[..., 1] = self.spec.chunk_stride
        self._write(index.reshape(-1).view(np.uint8), self.spec.file_bytes - self.spec.index_bytes - CRC_BYTES)

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
