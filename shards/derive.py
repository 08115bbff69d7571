"""A new cache from documents whose hidden states are on the disk already: what all tools that make one have in common.

A tool says what the cache is to be (a manifest and a plan) and where the states of each document come from; here the
rows are laid out as the plan says and written, shard by shard, on all cores. A cache that was begun by the same command
is continued: only the shards that are missing are made. What is read is never changed.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shards.errors import CacheError, RunError, UsageError
from shards.manifest import MANIFEST_FILE, Manifest
from shards.progress import Progress
from shards.record import Quarantined, count_quarantined
from shards.room import require_room
from shards.schema import (
    PLAN_COLUMNS,
    PLAN_DIRECTORY,
    ROW_IDS,
    TARGET_DIRECTORY,
    PlanArrays,
    missing_shards,
    shard_arrays,
)
from shards.writer import ShardRow, check_vacant, mark_complete, new_cache, publish_cache, write_shard

MAX_THREADS = 16  # each has a row or two in memory
SHARD_OVERHEAD_BYTES = 1 << 18  # metadata, checksums, and the last block of each file
POLL_S = 0.2

States = dict[str, np.ndarray]  # of one document, by array: codes or scales [tokens, width]


class Documents(Protocol):
    """Where the states of the new cache's documents come from. Each thread opens its own."""

    def read(self, document: int) -> States | Quarantined: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A cache that is to be made."""

    manifest: Manifest  # its checksums are not looked at: they are known once the files are written
    plan: PlanArrays
    target: Path  # directory whose target/ the cache gets a copy of
    open_documents: Callable[[], Documents]


@dataclass(frozen=True, kw_only=True)
class Made:
    """What came of it."""

    manifest: Manifest
    num_new_shards: int
    num_quarantined: int

    def to_json(self) -> dict[str, Any]:
        plan = self.manifest.plan
        return {
            "shards": plan.num_shards,
            "new_shards": self.num_new_shards,
            "rows": plan.num_rows,
            "train_rows": plan.num_train_rows,
            "documents": plan.num_documents,
            "quarantined_documents": self.num_quarantined,
            "tokens": plan.num_tokens,
        }


def make_cache(destination: Path, blueprint: Blueprint) -> Made:
    """Make the cache, or what is missing of it.

    Raises UsageError if `destination` holds another cache, or this one already, or has too little room.
    """
    manifest = _continued(destination, blueprint)
    missing = missing_shards(destination, manifest) if manifest else list(range(blueprint.manifest.plan.num_shards))
    require_room(
        destination, _needed_bytes(blueprint, missing, is_begun=manifest is not None), advice="or name another"
    )
    manifest = manifest or _begin(destination, blueprint)
    _write_shards(destination, manifest, blueprint, missing)
    num_quarantined = count_quarantined(destination, manifest)
    if num_quarantined < manifest.plan.num_documents:  # of nothing but quarantine, no cache is complete
        mark_complete(destination, manifest)
    return Made(manifest=manifest, num_new_shards=len(missing), num_quarantined=num_quarantined)


def check_outside(destination: Path, source: Path) -> None:
    """Raise UsageError if making `destination` would change `source`."""
    if destination.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{destination} lies in {source}, which is only read: name another directory")


def _continued(destination: Path, blueprint: Blueprint) -> Manifest | None:
    """The manifest of the cache that was begun at `destination`, None if there is none."""
    if not os.path.exists(destination / MANIFEST_FILE):  # Path.exists raises where the path can't be
        check_vacant(destination)
        return None
    found = Manifest.read(destination)
    if found != replace(blueprint.manifest, checksums=found.checksums) or not _has_plan(destination, blueprint.plan):
        raise UsageError(f"{destination} holds another cache, and none is overwritten: name another directory")
    if not missing_shards(destination, found):
        raise UsageError(f"{destination} holds this very cache, complete: there is nothing to do")
    return found


def _has_plan(cache: Path, plan: PlanArrays) -> bool:
    found = PlanArrays.read(cache / PLAN_DIRECTORY)
    return all(np.array_equal(getattr(found, name), getattr(plan, name)) for name in PLAN_COLUMNS)


def _needed_bytes(blueprint: Blueprint, missing: list[int], *, is_begun: bool) -> int:
    """At most, where chunks are compressed."""
    needed = len(missing) * SHARD_OVERHEAD_BYTES
    for shard in missing:
        needed += sum(spec.file_bytes for spec in shard_arrays(blueprint.manifest, shard).values())
    if not is_begun:
        needed += sum(getattr(blueprint.plan, name).nbytes for name in PLAN_COLUMNS)
        needed += sum(path.stat().st_size for path in (blueprint.target / TARGET_DIRECTORY).rglob("*"))
    return needed


def _begin(destination: Path, blueprint: Blueprint) -> Manifest:
    with new_cache(destination) as staging:
        blueprint.plan.write(staging / PLAN_DIRECTORY)
        shutil.copytree(
            blueprint.target / TARGET_DIRECTORY,
            staging / TARGET_DIRECTORY,
            copy_function=shutil.copyfile,
            dirs_exist_ok=True,
        )
        return publish_cache(destination, staging, blueprint.manifest)


def _write_shards(destination: Path, manifest: Manifest, blueprint: Blueprint, missing: list[int]) -> None:
    """Write the missing shards on all cores: threads, since what takes time here is numpy, checksums and the disk."""
    counter = _Counter()
    num_rows = sum(len(manifest.plan.shard_rows(shard)) for shard in missing)

    def write(shard: int) -> None:
        with closing(blueprint.open_documents()) as documents:
            rows = (_make_row(manifest, blueprint.plan, row, documents) for row in manifest.plan.shard_rows(shard))
            write_shard(destination, manifest, shard, counter.watch(rows))

    with Progress(num_rows, unit="row", name=str(destination)) as progress:
        pool = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))))
        try:
            _wait([pool.submit(write, shard) for shard in missing], counter, progress)
        finally:
            counter.is_stopped = True
            pool.shutdown(cancel_futures=True)


def _wait(futures: list[Future[None]], counter: "_Counter", progress: Progress) -> None:
    """Show how far the threads are until all are done or one has failed."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, POLL_S, FIRST_EXCEPTION)
        for future in done:
            _result(future)
        progress.show(counter.num_rows)


def _result(future: Future[None]) -> None:
    try:
        future.result()
    except CacheError as error:  # found in a source while its rows were read
        raise RunError(f"{error}; the shards made so far are kept, the same command goes on from them") from None


class _Stopped(Exception):  # noqa: N818 - not an error: another thread had one
    pass


class _Counter:
    """Counts the rows of all threads, and stops them at their next row."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.is_stopped = False
        self._lock = threading.Lock()

    def watch(self, rows: Iterator[ShardRow]) -> Iterator[ShardRow]:
        for row in rows:
            if self.is_stopped:
                raise _Stopped
            yield row
            with self._lock:
                self.num_rows += 1


def _make_row(manifest: Manifest, plan: PlanArrays, row: int, documents: Documents) -> ShardRow:
    """Lay the states of the row's documents where the plan has them."""
    slots = vars(plan.row_arrays(row, manifest.cache.row_tokens))
    states = {
        name: np.zeros(spec.row_shape, spec.dtype)
        for name, spec in shard_arrays(manifest, row // manifest.plan.rows_per_shard).items()
        if name != ROW_IDS and name not in slots
    }
    quarantined = []
    for document in plan.row_documents(row).tolist():
        start, num_tokens = int(plan.document_start[document]), int(plan.document_tokens[document])
        found = documents.read(document)
        if isinstance(found, Quarantined):
            slots["loss_mask"][start : start + num_tokens] = 0
            quarantined.append(found)
            continue
        for name, values in found.items():
            states[name][start : start + num_tokens] = values
    arrays = {ROW_IDS: np.array(row, np.int64)} | slots | states
    return ShardRow(arrays=arrays, quarantined=tuple(quarantined))
