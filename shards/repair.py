"""`python -m shards repair`: sets aside what is wrong, so that it can be made again.

Nothing is deleted: what is faulty moves into a hidden directory of the cache. A cache without some of its shards is
unfinished, no more, and the command that made it makes those again, with the same bytes. What the manifest vouches for,
plan/ and target/, can't be had again without changing what the cache is: that is only told.
"""

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shards.durable import sync_directory
from shards.errors import RunError
from shards.manifest import COMPLETE_FILE, MANIFEST_FILE, Manifest
from shards.schema import PLAN_DIRECTORY, missing_shards
from shards.verify import Part

ASIDE_DIRECTORY = ".set-aside"


@dataclass(frozen=True, kw_only=True)
class Repaired:
    faults: list[str]  # all that were found
    set_aside: dict[str, str]  # path in the cache → where it is now, in the cache
    missing_shards: list[int]  # that are to be made
    not_repairable: list[str]  # the faults that are still there


def repair(cache: Path, parts: Iterable[Part]) -> Repaired:
    """Set aside what is faulty in the `parts` of the cache, which `verify` looked at."""
    faults = defaultdict(list)
    for part in parts:
        faults[part.of] += part.faults
    if faults[MANIFEST_FILE]:
        found = faults[MANIFEST_FILE]
        return Repaired(faults=found, set_aside={}, missing_shards=[], not_repairable=found)
    manifest = Manifest.read(cache)
    frozen = {PLAN_DIRECTORY, *manifest.checksums}
    bad = [name for name, found in faults.items() if found and name not in frozen and os.path.lexists(cache / name)]
    if COMPLETE_FILE not in bad and (cache / COMPLETE_FILE).exists() and (bad or missing_shards(cache, manifest)):
        bad.append(COMPLETE_FILE)
    bad.sort(key=lambda name: name != COMPLETE_FILE)  # that all shards are there is no longer said before one goes
    return Repaired(
        faults=[fault for found in faults.values() for fault in found],
        set_aside={name: _set_aside(cache, name) for name in bad},
        missing_shards=missing_shards(cache, manifest),
        not_repairable=[fault for name in frozen for fault in faults[name]],
    )


def describe_repair(cache: Path, repaired: Repaired) -> list[str]:
    lines = [f"{name} is set aside: {cache / place}" for name, place in repaired.set_aside.items()]
    if repaired.missing_shards:
        lines.append(
            f"{len(repaired.missing_shards)} shards are to be made: run the command that made the cache again "
            "(`make extract`, or the `python -m shards` command)"
        )
    if repaired.not_repairable:
        lines.append(
            f"{len(repaired.not_repairable)} faults can't be repaired, for the manifest vouches for those files: "
            "take them from a copy of the cache, or make another cache"
        )
    return lines or [f"{cache} has no faults: there is nothing to repair"]


def _set_aside(cache: Path, name: str) -> str:
    """Move what is at `name` and return its new path in the cache."""
    place = f"{ASIDE_DIRECTORY}/{name}"
    number = 1
    while os.path.lexists(cache / place):
        number += 1
        place = f"{ASIDE_DIRECTORY}/{name}.{number}"
    try:
        (cache / place).parent.mkdir(parents=True, exist_ok=True)
        os.rename(cache / name, cache / place)
        sync_directory((cache / place).parent)
        sync_directory((cache / name).parent)
    except OSError as error:
        raise RunError(
            f"{cache / name} could not be set aside: {error}; make {cache} writable and run it again"
        ) from None
    return place
