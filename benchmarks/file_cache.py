"""The kernel's file cache: what of a file is in memory, and getting it out, so that a reading is known to be cold."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

RESIDENT_AT_MOST = 0.01  # of the pages, or a file is not cold


def drop_from_memory(directory: Path) -> bool:
    """Whether the files below `directory` have left the file cache."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    large = [path for path in paths if path.stat().st_size > 1 << 20]
    return max(resident_fraction(path) for path in large) <= RESIDENT_AT_MOST


def resident_fraction(path: Path, start: int = 0, num_bytes: int | None = None) -> float:
    """Share of the pages of a range of a file, from the page of `start` on, that are in the file cache: mincore(2)."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    with open(path, "rb") as file:
        stop = os.fstat(file.fileno()).st_size if num_bytes is None else start + num_bytes
        # A private mapping is writable, which ctypes needs to find its address; nothing is written.
        with mmap.mmap(file.fileno(), stop - first, access=mmap.ACCESS_COPY, offset=first) as mapped:
            pages = np.empty(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
            anchor = ctypes.c_char.from_buffer(mapped)
            libc = ctypes.CDLL(None, use_errno=True)
            address, length = ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(mapped))
            if libc.mincore(address, length, ctypes.c_void_p(pages.ctypes.data)):
                raise OSError(ctypes.get_errno(), "mincore")
            del anchor
    return float((pages & 1).mean())
