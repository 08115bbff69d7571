"""Finding what is wrong with a cache: `python -m shards verify`, and at a glance what a run would stumble over.

Holds a cache against its manifest, the format and each shard's record: by itself in seconds, without the values of the
shards; `--deep` reads every byte, at the speed of the disk. Damage of any kind becomes a fault, one sentence that says
where; it never raises because of what a cache contains. Whether the hidden states are the target's is the question
of `python -m extract audit`.
"""

import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shards.errors import CacheError
from shards.manifest import COMPLETE_FILE, MANIFEST_FILE, Manifest, read_json
from shards.reader import ArrayFile
from shards.record import FileRecord, ShardRecord
from shards.schema import (
    LOST_AND_FOUND,
    PLAN_DIRECTORY,
    ROW_IDS,
    SHARD_FILE,
    TARGET_DIRECTORY,
    ZARR_FILE,
    ArraySpec,
    PlanArrays,
    file_names,
    group_metadata,
    group_names,
    shard_arrays,
    shard_files,
    shard_name,
)

BF16_BITS = np.dtype("<u2")  # codes of bf16, and scales
BF16_INFINITY = 0x7F80  # from here on, the sign aside, nothing is finite


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a cache that was looked at."""

    of: str  # the shard or file, by its path in the cache, that is to blame for the faults
    num_files: int = 1
    num_shards: int = 0
    num_unmade_shards: int = 0  # that nobody said were there: no fault, but the cache is incomplete
    faults: tuple[str, ...] = ()


def check_at_a_glance(cache: Path, manifest: Manifest) -> None:
    """Raise CacheError for the first shard that is no whole shard of this cache, by sizes and small files alone.

    A millisecond a shard, whatever its size: values are left to the checksums that are compared as they are read.
    """
    plan = manifest.plan
    specs_by_num_rows = {
        len(plan.shard_rows(shard)): list(shard_arrays(manifest, shard).values())
        for shard in {0, plan.num_shards - 1}  # all have the same arrays, and only the last may have fewer rows
    }
    for shard in range(plan.num_shards):
        try:
            _check_shard_at_a_glance(cache, shard, specs_by_num_rows[len(plan.shard_rows(shard))])
        except CacheError as error:
            raise CacheError(
                f"{error}: `python -m shards repair {cache}` sets it aside, `make extract` makes it again"
            ) from None


def _check_shard_at_a_glance(cache: Path, shard: int, specs: list[ArraySpec]) -> None:
    directory = shard_name(shard)
    record = read_json(cache / directory / SHARD_FILE)
    if not isinstance(record, dict) or record.get("shard") != shard:
        raise CacheError(f"{directory}/{SHARD_FILE} is not that of shard {shard}")
    for spec in specs:
        metadata = f"{directory}/{spec.name}/{ZARR_FILE}"
        if read_json(cache / metadata) != spec.zarr_metadata():
            raise CacheError(f"{metadata} is not that of the array that this cache has there")
        _check_size(cache, f"{directory}/{spec.file_name}", spec.file_bytes)


def count_files(manifest: Manifest) -> int:
    """The files of a whole cache: what the `num_files` of all its parts add up to."""
    in_shards = (len(shard_files(shard_arrays(manifest, shard))) + 1 for shard in range(manifest.plan.num_shards))
    return len((MANIFEST_FILE, COMPLETE_FILE)) + len(manifest.checksums) + sum(in_shards)


def verify(cache: Path, manifest: Manifest, *, is_deep: bool = True) -> Iterator[Part]:
    """Look at every part of `cache`, whose manifest was read. The shards are left out if the plan contradicts it.

    Unless `is_deep`, of array files only size and index are looked at. Shards are looked at by a thread for each CPU:
    the work is reading and hashing, outside of Python.
    """
    if foreign := list(_foreign(cache)):
        yield from foreign
        return
    yield Part(of=MANIFEST_FILE)
    yield from _strays(cache, manifest)
    frozen = list(_verify_frozen(cache, manifest))
    yield from frozen
    if not any(part.faults for part in frozen):
        contradictions = _faults(_check_plan, cache, manifest)
        if contradictions:
            yield Part(of=PLAN_DIRECTORY, num_files=0, faults=contradictions)
            return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            look = partial(_verify_shard, cache, manifest, is_deep=is_deep)
            for parts in pool.map(look, range(manifest.plan.num_shards)):
                yield from parts
        finally:
            pool.shutdown(cancel_futures=True)  # when nobody wants to know the rest
    if (cache / COMPLETE_FILE).exists():
        content = {"num_shards": manifest.plan.num_shards}
        yield Part(of=COMPLETE_FILE, faults=_faults(_check_json, cache, COMPLETE_FILE, content))


def _foreign(cache: Path) -> Iterator[Part]:
    """Links lead out of the cache, and pipes and devices may never end: with one of them, nothing else is looked at."""
    for directory, inner, files in os.walk(cache):
        if Path(directory) == cache:
            inner[:] = (name for name in inner if not name.startswith("."))  # unfinished work
        for path in (Path(directory, name) for name in sorted([*inner, *files])):
            if not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISDIR(mode):
                name = path.relative_to(cache).as_posix()
                of = name if name.startswith((f"{PLAN_DIRECTORY}/", f"{TARGET_DIRECTORY}/")) else name.split("/")[0]
                fault = f"{name!r} is neither file nor directory; the rest was not looked at"
                yield Part(of=of, num_files=0, faults=(fault,))


def _strays(cache: Path, manifest: Manifest) -> Iterator[Part]:
    """What lies at the top of the cache and belongs to nothing. Hidden names are unfinished work."""
    known = {MANIFEST_FILE, COMPLETE_FILE, PLAN_DIRECTORY, TARGET_DIRECTORY, LOST_AND_FOUND}
    known |= {shard_name(shard) for shard in range(manifest.plan.num_shards)}
    for name in sorted(path.name for path in cache.iterdir()):
        if name not in known and not name.startswith("."):
            fault = f"{name!r} is no part of this cache, whose plan has {manifest.plan.num_shards} shards"
            yield Part(of=name, num_files=0, faults=(fault,))


def _verify_frozen(cache: Path, manifest: Manifest) -> Iterator[Part]:
    """plan/ and target/, whose checksums the manifest holds."""
    for name, sha256 in manifest.checksums.items():
        yield Part(of=name, faults=_faults(check_file, cache, name, sha256))
    found = {f"{top}/{name}" for top in (PLAN_DIRECTORY, TARGET_DIRECTORY) for name in file_names(cache / top)}
    for name in sorted(found - manifest.checksums.keys()):
        yield Part(of=name, num_files=0, faults=(f"{name!r}: the manifest has no such file",))


def _verify_shard(cache: Path, manifest: Manifest, shard: int, *, is_deep: bool) -> list[Part]:
    return list(_shard_parts(cache, manifest, shard, is_deep))


def _shard_parts(cache: Path, manifest: Manifest, shard: int, is_deep: bool) -> Iterator[Part]:
    directory = shard_name(shard)
    if not (cache / directory).is_dir():
        if os.path.lexists(cache / directory) or (cache / COMPLETE_FILE).exists():
            yield Part(of=directory, num_files=0, faults=(f"{directory} is missing",))
        else:
            yield Part(of=directory, num_files=0, num_unmade_shards=1)
        return
    arrays = shard_arrays(manifest, shard)
    files: dict[str, FileRecord] = {}  # stays empty when shard.json is damaged: there is nothing to compare with
    try:
        files = ShardRecord.read(cache, manifest, shard).files
        yield Part(of=directory, num_shards=1)
    except CacheError as error:
        yield Part(of=directory, num_shards=1, faults=(str(error),))
    recorded = {f"{directory}/{name}": record for name, record in files.items()}

    extra = sorted(set(file_names(cache / directory)) - shard_files(arrays) - {SHARD_FILE})
    named = (f"{directory}/{name}" for name in extra)
    yield Part(of=directory, num_files=0, faults=tuple(f"{name!r}: a shard has no such file" for name in named))
    for group in group_names(arrays):
        name = os.path.join(directory, group, ZARR_FILE)
        faults = _faults(_check_json, cache, name, group_metadata())
        yield Part(of=directory, faults=faults or _compare(cache, [name], recorded))
    for spec in arrays.values():
        # A fault found among the values says more than a wrong checksum of the file: only one of them is reported.
        metadata, values = f"{directory}/{spec.name}/{ZARR_FILE}", f"{directory}/{spec.file_name}"
        reads_values = is_deep or spec.name == ROW_IDS  # the cheapest sign of a shard in another's place
        rows = manifest.plan.shard_rows(shard) if reads_values else range(0)
        faults = tuple(_array_faults(cache / directory, spec, rows, manifest.plan.shard_rows(shard).start))
        if not faults and reads_values:
            faults = _compare(cache, [metadata, values], recorded)
        elif not faults:
            faults = _compare(cache, [metadata], recorded) + _compare_size(cache, values, recorded)
        yield Part(of=directory, num_files=2, faults=faults)


def _array_faults(directory: Path, spec: ArraySpec, row_ids: range, first_row: int) -> Iterator[str]:
    """What opening the array, and reading `row_ids` of it, would stumble over, at most one fault for each row."""
    try:
        file = ArrayFile(directory, spec, first_row)
    except CacheError as error:
        yield str(error)
        return
    with closing(file):
        values = np.empty(spec.shape[1:], spec.dtype)
        for row, row_id in enumerate(row_ids):
            faults = _faults(file.read_row, row, values)
            yield from faults
            if spec.name == ROW_IDS and not faults and values != row_id:
                yield f"{directory.name} {ROW_IDS}: row {values} in the place of row {row_id}"
            if spec.dtype == BF16_BITS and not faults and (values & 0x7FFF).max() >= BF16_INFINITY:
                bad = np.flatnonzero(((values & 0x7FFF) >= BF16_INFINITY).any(axis=-1))
                yield f"{directory.name} {spec.name} row {row_id} tokens {bad[0]}–{bad[-1]}: values that are not finite"


def _compare(cache: Path, names: list[str], recorded: dict[str, FileRecord]) -> tuple[str, ...]:
    """The faults of the files `names` against what was recorded of them."""
    known = [(name, recorded[name].sha256, recorded[name].bytes) for name in names if name in recorded]
    return tuple(fault for file in known for fault in _faults(check_file, cache, *file))


def _compare_size(cache: Path, name: str, recorded: dict[str, FileRecord]) -> tuple[str, ...]:
    """The same of the size alone."""
    return _faults(_check_size, cache, name, recorded[name].bytes) if name in recorded else ()


def _faults(check: Callable[..., object], *arguments: Any) -> tuple[str, ...]:
    """The CacheError of a check as a fault: one or none."""
    try:
        check(*arguments)
    except CacheError as error:
        return (str(error),)
    return ()


def _check_plan(cache: Path, manifest: Manifest) -> None:
    try:
        PlanArrays.read(cache / PLAN_DIRECTORY).check(manifest.plan)
    except CacheError as error:
        raise CacheError(f"{error}; the shards were not looked at") from None


def _check_json(cache: Path, name: str, expected: Any) -> None:
    found = read_json(cache / name)
    if found != expected:
        raise CacheError(f"{name} holds {found}, expected {expected}")


def _check_size(cache: Path, name: str, num_bytes: int) -> None:
    try:
        found = os.stat(cache / name).st_size
    except OSError as error:
        raise CacheError(f"{name} cannot be read: {error.strerror}") from None
    if found != num_bytes:
        raise CacheError(f"{name} has {found} bytes, expected {num_bytes}")


def check_file(cache: Path, name: str, sha256: str, num_bytes: int | None = None) -> None:
    """Raise CacheError unless the file `name` below `cache` is the one that was recorded."""
    try:
        found = FileRecord.of(cache / name)
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        raise CacheError(f"{name} cannot be read: {error}") from None
    if num_bytes not in (None, found.bytes):
        raise CacheError(f"{name} has {found.bytes} bytes, expected {num_bytes}")
    if found.sha256 != sha256:
        raise CacheError(f"{name}: sha256 is {found.sha256}, expected {sha256}")
