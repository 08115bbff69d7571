"""What the kernel is told about rows: read these ahead, drop those. It reads while the one thread replays graphs.

A cache that fits into memory comes from the disk once, in the first epoch. Of a larger one the first rows stay, as many
as fit, and every other is dropped once it was read: left to itself, the kernel would push out what the next epoch needs
just as well.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from shards.codec import CODECS, bytes_per_token
from shards.manifest import Manifest
from shards.reader import CacheReader
from train.order import NO_ROW

FILE_CACHE_SHARE = 0.8  # of the memory that is available at the beginning: the job still allocates some


class Readahead:
    """Stays `num_rows` ahead of the rows that are trained on."""

    def __init__(
        self, reader: CacheReader, layers: Sequence[int], rows: Iterator[int], *, num_rows: int, memory_bytes: int
    ) -> None:
        """`rows` are all that this rank will read, in their order; the first of them are asked for at once.

        `memory_bytes`: what the file cache may take.
        """
        self._reader, self._layers, self._rows = reader, tuple(layers), rows
        self._num_kept_rows = rows_that_fit(reader.manifest, layers, memory_bytes)
        self._advise(num_rows)

    def advance(self, rows: Sequence[int]) -> None:
        """The next rows of the sequence, `rows`, were read: ask for as many more."""
        for row in rows:
            if row >= self._num_kept_rows:
                self._reader.forget(row, self._layers)
        self._advise(len(rows))

    def _advise(self, num_rows: int) -> None:
        for row in islice(self._rows, num_rows):
            if row != NO_ROW:
                self._reader.advise(row, self._layers)


def rows_that_fit(manifest: Manifest, layers: Sequence[int], num_bytes: int) -> int:
    """How many rows of these layers take `num_bytes`."""
    of_a_token = bytes_per_token(CODECS[manifest.cache.codec], manifest.target.hidden_size) * len(layers)
    return num_bytes // (of_a_token * manifest.cache.row_tokens)


def file_cache_bytes() -> int:
    """What the file cache may take of this machine's memory: MemAvailable of proc_meminfo(5) counts it in."""
    with open("/proc/meminfo", encoding="ascii") as file:
        kilobytes = next(line.split()[1] for line in file if line.startswith("MemAvailable:"))
    return int(FILE_CACHE_SHARE * int(kilobytes) * 1024)
