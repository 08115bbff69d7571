"""Lossless compression of chunks of bf16 codes: their low and high bytes apart, then zstd. For archives and transport.

The same as zarr's codecs `numcodecs.shuffle` and `zstd`. numcodecs is imported when it is needed, so that a trainer,
which reads no such cache, does without it.
"""

from typing import Any

import numpy as np

CODE_BYTES = 2
ZSTD_LEVEL = 1  # higher ones gain 2 % of the bytes and take ten times as long
ZARR_CODECS: tuple[dict[str, Any], ...] = (
    {"name": "numcodecs.shuffle", "configuration": {"elementsize": CODE_BYTES}},
    {"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}},
)


def compress(chunk: np.ndarray) -> np.ndarray:
    """The bytes of a chunk, uint8 [n], compressed."""
    from numcodecs import zstd

    shuffled = np.ascontiguousarray(chunk.reshape(-1, CODE_BYTES).T)
    return np.frombuffer(zstd.compress(shuffled, ZSTD_LEVEL, False), np.uint8)


def decompress(stored: np.ndarray, chunk: np.ndarray) -> None:
    """Fill `chunk`, uint8 [n]; raise ValueError unless `stored` are the bytes of so many. Takes no more memory."""
    from numcodecs import zstd

    if _content_bytes(stored.tobytes()) != chunk.size:
        raise ValueError(f"the compressed chunk is not one zstd frame of {chunk.size} bytes")
    shuffled = np.empty((CODE_BYTES, chunk.size // CODE_BYTES), np.uint8)
    try:
        zstd.decompress(stored, shuffled)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the compressed chunk cannot be read: {error}") from None
    chunk.reshape(-1, CODE_BYTES)[...] = shuffled.T


def _content_bytes(frame: bytes) -> int:
    """The size that a zstd frame says its content has, 0 if none (RFC 8878, 3.1.1.1).

    numcodecs checks a destination that is too small, but not one that is too large.
    """
    if len(frame) < 5:
        return 0
    size_flag, is_single_segment, dictionary_flag = frame[4] >> 6, frame[4] >> 5 & 1, frame[4] & 3
    start = 5 + (not is_single_segment) + (0, 1, 2, 4)[dictionary_flag]
    field = frame[start : start + (is_single_segment, 2, 4, 8)[size_flag]]
    return int.from_bytes(field, "little") + (256 if size_flag == 1 else 0)
