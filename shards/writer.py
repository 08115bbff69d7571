"""Writing a cache so that nothing half-written is ever read, and whatever a crash leaves behind does no harm.

Everything is written into a hidden directory beside its place, made durable, and renamed: first plan/ and target/, then
the manifest, then shards in any order, by any number of processes. A shard is written once and whole, never changed.
Its rows come one at a time, so that memory does not depend on its size; array_writer.py puts them where they belong.
"""

import contextlib
import dataclasses
import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shards.array_writer import ArrayWriter, write_metadata
from shards.codec import CODECS, Encoded
from shards.durable import json_text, sync_directory, sync_file, sync_tree, temporary_beside, write_json
from shards.errors import CacheError, RunError, UsageError
from shards.manifest import COMPLETE_FILE, MANIFEST_FILE, Manifest
from shards.measure import StateSums
from shards.record import FileRecord, Quarantined, ShardRecord
from shards.schema import (
    FINAL_HIDDEN,
    LOST_AND_FOUND,
    NO_DOCUMENT,
    PLAN_DIRECTORY,
    ROW_IDS,
    SHARD_FILE,
    TARGET_DIRECTORY,
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

SLOT_ARRAYS = ("input_ids", "position_ids", "document_ids", "loss_mask", "source_ids")


@dataclass(frozen=True, kw_only=True)
class ShardRow:
    """One row, as it is to be stored. Padding slots and documents in quarantine hold zero codes."""

    arrays: dict[str, np.ndarray]  # every array of the shard by its name, without the row axis
    quarantined: tuple[Quarantined, ...] = ()  # documents of this row


@dataclass(frozen=True, kw_only=True)
class ShardRows:
    """All rows of one shard, for whoever has them in memory: an iterable of `ShardRow`."""

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
        states = {hidden_name(layer): codes for layer, codes in self.hidden.items()}
        final = {} if self.final_hidden is None else {FINAL_HIDDEN: self.final_hidden}
        return {name: getattr(self, name) for name in (ROW_IDS, *SLOT_ARRAYS)} | states | final | self.scales

    def __iter__(self) -> Iterator[ShardRow]:
        for row in range(len(self.row_ids)):
            yield ShardRow(
                arrays={name: values[row] for name, values in self.arrays.items()},
                quarantined=tuple(entry for entry in self.quarantined if entry.document in self.document_ids[row]),
            )


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


def write_shard(cache: Path, manifest: Manifest, shard: int, rows: Iterable[ShardRow]) -> bool:
    """Write and publish one shard; False if it was there already, or another process published it first.

    The bytes depend on the arguments only. `rows` is not looked at if the shard is there. Raises ValueError for rows
    that break the format, RunError if the disk does not take them.
    """
    destination = cache / shard_name(shard)
    if destination.exists():
        return False
    with _staging(destination) as directory:
        record = _write_arrays(directory, manifest, shard, rows)
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


def _write_arrays(directory: Path, manifest: Manifest, shard: int, rows: Iterable[ShardRow]) -> ShardRecord:
    """Write all files of a shard but its record, which is returned; make the files durable, but not their names."""
    arrays = shard_arrays(manifest, shard)
    for name in group_names(arrays):
        write_metadata(directory / name, group_metadata())
    sums = {name: StateSums(CODECS[manifest.cache.codec]) for name, spec in arrays.items() if spec.holds_states}
    num_measured_tokens = 0
    quarantined: list[Quarantined] = []
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor())  # arrays are independent, and one thread is slower than a disk
        writers = {name: stack.enter_context(ArrayWriter(directory, spec)) for name, spec in arrays.items()}
        for i, (row_id, row) in enumerate(zip(manifest.plan.shard_rows(shard), rows, strict=True)):
            num_measured_tokens += _check_row(row, arrays, row_id)
            quarantined += row.quarantined
            _write_row(i, row, writers, sums, pool)
        list(pool.map(ArrayWriter.write_index, writers.values()))
        names = file_names(directory)
        records = list(pool.map(_sync_and_record, [directory / name for name in names]))
    num_values = num_measured_tokens * manifest.target.hidden_size
    return ShardRecord(
        shard=shard,
        num_measured_tokens=num_measured_tokens,
        statistics={name: of.statistics(name, num_values) for name, of in sums.items()},
        quarantined=tuple(quarantined),
        files=dict(zip(names, records, strict=True)),
    )


def _write_row(
    i: int, row: ShardRow, writers: dict[str, ArrayWriter], sums: dict[str, StateSums], pool: ThreadPoolExecutor
) -> None:
    def write(name: str) -> None:
        writers[name].write_row(i, row.arrays[name])
        if name in sums:
            sums[name].add(Encoded(row.arrays[name], row.arrays.get(scales_name(name))))

    list(pool.map(write, row.arrays))  # a list, so that what was raised in a thread is raised here


def _check_row(row: ShardRow, arrays: Mapping[str, ArraySpec], row_id: int) -> int:
    """The number of slots with hidden states. Raises ValueError unless `row` is what FORMAT.md says of one."""
    if row.arrays.keys() != arrays.keys():
        raise ValueError(f"row {row_id} has the arrays {list(row.arrays)}, the cache stores {list(arrays)}")
    for name, values in row.arrays.items():
        spec = arrays[name]
        if values.dtype != spec.dtype or values.shape != spec.row_shape:
            raise ValueError(f"{name} is {values.dtype} {values.shape}, expected {spec.dtype} {spec.row_shape}")
    if row.arrays[ROW_IDS] != row_id:
        raise ValueError(f"row {row.arrays[ROW_IDS]} comes in the place of row {row_id}")
    document_ids_T = row.arrays["document_ids"]
    padding_T = document_ids_T == NO_DOCUMENT
    for name in ("input_ids", "position_ids", "source_ids"):
        if row.arrays[name][padding_T].any():
            raise ValueError(f"{name} of row {row_id} is not 0 in every padding slot")
    without_states_T = padding_T | np.isin(document_ids_T, [entry.document for entry in row.quarantined])
    for name in row.arrays.keys() - {ROW_IDS, "input_ids", "position_ids", "document_ids", "source_ids"}:
        if row.arrays[name][without_states_T].any():
            raise ValueError(f"{name} of row {row_id} is not 0 in every padding slot and document in quarantine")
    return int(np.count_nonzero(~without_states_T))


def _sync_and_record(path: Path) -> FileRecord:
    sync_file(path)
    return FileRecord.of(path)


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
