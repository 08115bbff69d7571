"""Whether data and target are still what a cache was made from, without reading again what has not changed.

Both are hashed when a cache is begun, and later only when the file system says that one of their files is another than
when it was last found right. That is remembered in a hidden file of the cache. It holds paths and times of this machine
and is no part of the cache: without it, or with a copy of it elsewhere, everything is hashed once more.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from extract.files import STDIN, absent, expand
from extract.job import Job
from shards.durable import write_json
from shards.manifest import Manifest

SEEN_FILE = ".sources.json"
States = dict[str, list[list[Any]]]  # by part, "data" or "target": path, size, times and inode of each file


def file_states(job: Job, without: Sequence[str] = ()) -> States:
    """What the file system says of the files that the data and the target consist of, in order, by part."""
    files = {"data": lambda: expand(job.data.files), "target": lambda: sorted(Path(job.target.path).rglob("*"))}
    return {part: _states(list_files()) for part, list_files in files.items() if part not in without}


def check_sources(job: Job, manifest: Manifest, *, needed: bool = True, weights: bool = True) -> None:
    """Raise CacheError naming what is not that which the cache of `job` was made from, UsageError if it isn't there.

    Unless it is `needed`, what has gone since then from where the manifest says it was is passed over, and said to be;
    so is standard input in any case, since the plan has all that was read from it. Without `weights` these are not
    read, and nothing is remembered.
    """
    states = file_states(job, without=_gone(job, manifest, needed=needed))
    seen = _read(job.directory, manifest)
    changed = [part for part in states if seen.get(part) != states[part]]
    if changed:
        from extract.identity import check_data, check_target  # imports transformers

        if "data" in changed:
            check_data(job, manifest)
        if "target" in changed:
            check_target(job, manifest, weights=weights)
        if weights:
            remember_sources(job, manifest, seen | states)


def remember_sources(job: Job, manifest: Manifest, states: States) -> None:
    """Say that files in these states are what the cache was made from."""
    with contextlib.suppress(OSError):  # a cache that can't be written to: it costs another hashing, no more
        write_json(job.directory / SEEN_FILE, {"identity": dataclasses.asdict(manifest.identity)} | states)


def _read(cache: Path, manifest: Manifest) -> States:
    """What was remembered of this very cache; nothing if that can't be told."""
    try:
        seen = json.loads((cache / SEEN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(seen, dict) or seen.pop("identity", None) != dataclasses.asdict(manifest.identity):
        return {}
    return seen


def _gone(job: Job, manifest: Manifest, *, needed: bool) -> list[str]:
    """The parts that have gone from where they were when the cache was made and where the config still has them."""
    gone = {"data": [STDIN] if STDIN in job.data.files else []}
    if not needed:
        if job.data.files == manifest.data.files:
            gone["data"] += absent(job.data.files)
        if job.target.path == manifest.target.path:
            gone["target"] = absent([job.target.path])
    for missing in filter(None, gone.values()):
        name = "standard input" if missing[0] == STDIN else missing[0]
        print(f"extract: {name} has gone, so it is not compared with {job.directory}", flush=True)
    return [part for part, missing in gone.items() if missing]


def _states(files: Iterable[Path]) -> list[list[Any]]:
    states = []
    for path in files:
        with contextlib.suppress(OSError):  # whoever reads it says so
            status = path.stat()
            times = [status.st_mtime_ns, status.st_ctime_ns]
            states.append([str(path.absolute()), status.st_size, *times, status.st_ino])
    return states
