"""Writing a cache so that nothing half-written is ever read, and whatever a crash leaves behind does no harm.

Everything is written into a hidden directory beside its place, made durable, and renamed: first plan/ and target/, then
the manifest, then shards in any order, by any number of processes. Arrays are encoded by zarr; this module owns names,
metadata, checksums and order. A shard is written once and whole, never changed.
"""

import contextlib
import dataclasses
import errno
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from shards.codec import CODECS, Codec, Encoded
from shards.config import CHUNK_TOKENS
from shards.durable import json_text, sync_directory, sync_tree, temporary_beside, write_json
from shards.errors import CacheError, RunError, UsageError
from shards.manifest import COMPLETE_FILE, MANIFEST_FILE, Manifest
from shards.record import FileRecord, Quarantined, ShardRecord, Statistics
from shards.schema import (
    FINAL_HIDDEN,
    LOST_AND_FOUND,
    NO_DOCUMENT,
    PLAN_DIRECTORY,
    SHARD_FILE,
    TARGET_DIRECTORY,
    ZARR_FILE,
    ArraySpec,
    file_names,
    group_metadata,
    group_names,
    hidden_name,
    missing_shards,
    scales_name,
    shard_arrays,
    shard_name,
)


@dataclass(frozen=True, kw_only=True)
class ShardRows:
    """The rows of one shard, as they are to be stored. Padding slots and documents in quarantine hold zero codes."""

    row_ids: np.ndarray  # int64 [R]
    input_ids: np.ndarray  # int32 [R, T]
    position_ids: np.ndarray  # int32 [R, T]
    document_ids: np.ndarray  # int32 [R, T]
    loss_mask: np.ndarray  # uint8 [R, T]
    source_ids: np.ndarray  # uint8 [R, T]
    hidden: dict[int, np.ndarray]  # codes by layer: [R, T, code width] of the codec's type
    final_hidden: np.ndarray | None = None  # codes, when the cache stores it
    scales: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # by array: uint16 [R, T, scale width]
    quarantined: tuple[Quarantined, ...] = ()

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """By the name under which each is stored."""
        slots = ("row_ids", "input_ids", "position_ids", "document_ids", "loss_mask", "source_ids")
        return {name: getattr(self, name) for name in slots} | self.states | self.scales

    @property
    def states(self) -> dict[str, np.ndarray]:
        """The arrays of codes, by the name under which each is stored."""
        final = {} if self.final_hidden is None else {FINAL_HIDDEN: self.final_hidden}
        return {hidden_name(layer): codes for layer, codes in self.hidden.items()} | final


def check_vacant(cache: Path) -> None:
    """Raise UsageError when `cache` is or holds something that is no cache, CacheError when it holds one already."""
    try:
        found = {path.name for path in cache.iterdir() if not path.name.startswith(".")} - {LOST_AND_FOUND}
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{cache} cannot be used: {error.strerror}") from None
    if MANIFEST_FILE in found:
        raise CacheError(f"{cache} holds a cache already")
    # plan/ is renamed into place before target/, so a target/ alone is somebody else's.
    if found and (PLAN_DIRECTORY not in found or found - {PLAN_DIRECTORY, TARGET_DIRECTORY}):
        raise UsageError(f"{cache} is not empty and holds no cache ({min(found)}, …): name another directory")


@contextlib.contextmanager
def new_cache(cache: Path) -> Iterator[Path]:
    """Yield a hidden directory with empty plan/ and target/ to write into; call `publish_cache` before leaving it.

    Raises UsageError when `cache` holds something that is no cache, CacheError when it holds one already. A plan/ or
    target/ that a crash left without a manifest is replaced.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{cache} cannot be used: {error.strerror}") from None
    check_vacant(cache)
    try:
        with _staging(cache / "cache") as directory:
            (directory / PLAN_DIRECTORY).mkdir()
            (directory / TARGET_DIRECTORY).mkdir()
            yield directory
    finally:
        with contextlib.suppress(OSError):  # not empty: there is something in it to keep
            cache.rmdir()


def publish_cache(cache: Path, staging: Path, manifest: Manifest) -> Manifest:
    """Move plan/, target/ and then the manifest from `staging` (see `new_cache`) into place.

    Returns `manifest` with the checksums of what was moved. One process at a time may begin a cache.
    """
    checksums = {name: FileRecord.of(staging / name).sha256 for name in file_names(staging)}
    manifest = dataclasses.replace(manifest, checksums=checksums)
    write_json(staging / MANIFEST_FILE, manifest.to_json())
    sync_tree(staging)
    check_vacant(cache)  # again: much time may have passed
    for name in (TARGET_DIRECTORY, PLAN_DIRECTORY):  # left by a crash; this order keeps `check_vacant` right
        if (cache / name).exists():
            shutil.rmtree(cache / name)
    for name in (PLAN_DIRECTORY, TARGET_DIRECTORY, MANIFEST_FILE):
        os.rename(staging / name, cache / name)
        sync_directory(cache)  # so that a power cut keeps the order, too
    return manifest


def write_shard(cache: Path, manifest: Manifest, shard: int, rows: ShardRows) -> bool:
    """Write and publish one shard; False if it was there already, or another process published it first.

    The bytes depend on the arguments only. Raises ValueError for rows that break the format, RunError if the disk does
    not take them.
    """
    arrays = shard_arrays(manifest, shard)
    _check_rows(rows, arrays, manifest.plan.shard_rows(shard))
    destination = cache / shard_name(shard)
    if destination.exists():
        return False
    with _staging(destination) as directory:
        for name in group_names(arrays):
            _write_metadata(directory / name, group_metadata())
        for name, values in rows.arrays.items():
            _write_array(directory, arrays[name], values)
        record = _record(directory, shard, rows, CODECS[manifest.cache.codec])
        (directory / SHARD_FILE).write_text(json_text(record.to_json()), encoding="utf-8")
        sync_tree(directory)
        return _publish(directory, destination)


def mark_complete(cache: Path, manifest: Manifest) -> bool:
    """Write complete.json if every shard is there; say whether it is so. Anyone may call this, any number of times."""
    if missing_shards(cache, manifest):
        return False
    with _staging(cache / COMPLETE_FILE) as directory:
        write_json(directory / COMPLETE_FILE, {"num_shards": manifest.plan.num_shards})
        os.rename(directory / COMPLETE_FILE, cache / COMPLETE_FILE)
        sync_directory(cache)
    return True


def _check_rows(rows: ShardRows, arrays: dict[str, ArraySpec], row_ids: range) -> None:
    """Raise ValueError unless `rows` are what FORMAT.md says of a shard."""
    if rows.arrays.keys() != arrays.keys():
        raise ValueError(f"the shard's arrays are {list(rows.arrays)}, the cache stores {list(arrays)}")
    for name, values in rows.arrays.items():
        if values.dtype != arrays[name].dtype or values.shape != arrays[name].shape:
            raise ValueError(
                f"{name} is {values.dtype} {values.shape}, expected {arrays[name].dtype} {arrays[name].shape}"
            )
    if rows.row_ids.tolist() != list(row_ids):
        raise ValueError(f"the shard's rows are {rows.row_ids.tolist()}, the plan says {list(row_ids)}")
    padding_RT = rows.document_ids == NO_DOCUMENT
    for name in ("input_ids", "position_ids", "loss_mask", "source_ids"):
        if rows.arrays[name][padding_RT].any():
            raise ValueError(f"{name} is not 0 in every padding slot")
    unmeasured_RT = ~_measured_slots(rows)
    if rows.loss_mask[unmeasured_RT].any():
        raise ValueError("loss_mask is not 0 in every document in quarantine")
    for name, stored_RTH in (rows.states | rows.scales).items():
        if stored_RTH[unmeasured_RT].any():
            raise ValueError(f"{name} is not 0 in every padding slot and every document in quarantine")


def _measured_slots(rows: ShardRows) -> np.ndarray:
    """bool [R, T]: the slots whose codes are hidden states."""
    without_states = [NO_DOCUMENT, *(entry.document for entry in rows.quarantined)]
    return ~np.isin(rows.document_ids, without_states)


def _write_array(directory: Path, spec: ArraySpec, values: np.ndarray) -> None:
    _write_metadata(directory / spec.name, spec.zarr_metadata())
    # Without this zarr leaves out chunks of zeros, and padding would have no bytes and no checksum.
    with zarr.config.set({"array.write_empty_chunks": True}):
        zarr.open_array(directory / spec.name, mode="r+", zarr_format=3)[...] = values


def _write_metadata(directory: Path, metadata: dict[str, Any]) -> None:
    """Write zarr.json ourselves, so that its bytes do not depend on zarr's version."""
    directory.mkdir(exist_ok=True)
    (directory / ZARR_FILE).write_text(json_text(metadata), encoding="utf-8")


def _record(directory: Path, shard: int, rows: ShardRows, codec: Codec) -> ShardRecord:
    measured_RT = _measured_slots(rows)
    return ShardRecord(
        shard=shard,
        num_measured_tokens=int(np.count_nonzero(measured_RT)),
        statistics={name: _measure(name, rows, measured_RT, codec) for name in rows.states},
        quarantined=rows.quarantined,
        files={name: FileRecord.of(directory / name) for name in file_names(directory)},
    )


def _measure(name: str, rows: ShardRows, measured_RT: np.ndarray, codec: Codec) -> Statistics:
    """In pieces of one chunk, so that the float64 copies stay small; the order of summation is fixed."""
    codes_RTH = rows.states[name]
    scales_RTG = rows.scales.get(scales_name(name))
    num_values, sum_of_squares, max_abs = 0, 0.0, 0.0
    for row, measured_T in enumerate(measured_RT):
        for start in range(0, len(measured_T), CHUNK_TOKENS):
            tokens = row, start + np.flatnonzero(measured_T[start : start + CHUNK_TOKENS])
            scales = None if scales_RTG is None else scales_RTG[tokens]
            values = codec.decode_stored(Encoded(codes_RTH[tokens], scales))
            num_values += values.size
            sum_of_squares += float(np.square(values, dtype=np.float64).sum())
            max_abs = max(max_abs, float(np.abs(values).max(initial=0.0)))
    if not math.isfinite(sum_of_squares):
        raise ValueError(f"{name} has values that are not finite outside of quarantine")
    return Statistics(rms=math.sqrt(sum_of_squares / max(1, num_values)), max_abs=max_abs)


@contextlib.contextmanager
def _staging(destination: Path) -> Iterator[Path]:
    """Yield an empty hidden directory beside `destination`; on leaving it is gone, renamed into place or removed.

    What the disk does not take raises RunError.
    """
    directory = temporary_beside(destination)
    try:
        _remove_leftovers(destination)
        directory.mkdir()
        yield directory
    except OSError as error:
        raise RunError(
            f"{destination} could not be written: {error}; what was published before is whole: "
            "make room or mend the disk, then run the same command again"
        ) from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _remove_leftovers(destination: Path) -> None:
    """Remove what killed processes of this host left of `destination`. An earlier process may have had our own id."""
    prefix = temporary_beside(destination).name.removesuffix(str(os.getpid()))
    for path in destination.parent.iterdir():
        pid = path.name.removeprefix(prefix)
        if path.name.startswith(prefix) and pid.isdecimal() and (int(pid) == os.getpid() or not _is_alive(int(pid))):
            shutil.rmtree(path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


def _publish(directory: Path, destination: Path) -> bool:
    try:
        os.rename(directory, destination)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process was first
            return False
        raise
    sync_directory(destination.parent)
    return True
