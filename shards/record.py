"""shard.json: what a shard says about itself.

Sizes and checksums of its files, documents in quarantine, statistics of its hidden states; nothing that varies between
runs, because a shard's bytes are a function of the plan. Written last into a shard, read by `stats` and `verify`.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from shards.config import build_section
from shards.errors import CacheError, UsageError
from shards.manifest import SEAL, Manifest, check_seal, read_json, sealed
from shards.schema import SHARD_FILE, published_shards, shard_arrays, shard_files, shard_name


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    bytes: int
    # Not a crc32c of the file: where each chunk is followed by its own crc32c, that would be the same for any values.
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(bytes=os.fstat(file.fileno()).st_size, sha256=digest)


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """A document whose hidden states are not all finite: it keeps its slots, with loss mask 0 and zero codes."""

    document: int
    layer: int  # the first decoder layer with such a value; the target's num_layers stands for the final hidden state
    position: int  # of the first such value in that layer, counted in the document


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Over all values of one array of hidden states in this shard, padding and quarantine excluded."""

    rms: float
    max_abs: float


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    shard: int
    num_measured_tokens: int  # the tokens that the statistics are of
    statistics: dict[str, Statistics]  # by array: hidden/9
    quarantined: tuple[Quarantined, ...]
    files: dict[str, FileRecord]  # every file of the shard but shard.json, by path with forward slashes

    def to_json(self) -> dict[str, Any]:
        return sealed(json.loads(json.dumps(asdict(self))))

    @classmethod
    def read(cls, cache: Path, manifest: Manifest, shard: int) -> Self:
        """Read the record of a published shard; raise CacheError if it is damaged or another shard's."""
        path = cache / shard_name(shard) / SHARD_FILE
        where = f"{shard_name(shard)}: {SHARD_FILE}"
        value = read_json(path)
        if not isinstance(value, dict):
            raise CacheError(f"{where} is damaged: it holds no object")
        check_seal(value, path)
        files = _file_records(value.get("files"))
        if files is not None:
            value = {**value, "files": {}}
        try:
            record = build_section("shard", cls, {key: item for key, item in value.items() if key != SEAL}, path)
        except UsageError as error:
            raise CacheError(f"{where} is damaged: {error}") from None
        record = record if files is None else replace(record, files=files)
        arrays = shard_arrays(manifest, shard)
        found = {"shard": record.shard, "files": sorted(record.files), "statistics": sorted(record.statistics)}
        expected = {
            "shard": shard,
            "files": sorted(shard_files(arrays)),
            "statistics": sorted(name for name, array in arrays.items() if array.holds_states),
        }
        for key in expected:
            if found[key] != expected[key]:
                raise CacheError(f"{where} is of {key} {found[key]}, expected {expected[key]}")
        return record


def _file_records(value: Any) -> dict[str, FileRecord] | None:
    """Most of a record, built here because `build_section` takes its time; None where that is to say what is wrong."""
    if not isinstance(value, dict):
        return None
    for of in value.values():
        is_record = isinstance(of, dict) and of.keys() == {"bytes", "sha256"}
        if not (is_record and type(of["bytes"]) is int and 0 <= of["bytes"] < 1 << 63 and type(of["sha256"]) is str):
            return None
    return {name: FileRecord(**of) for name, of in value.items()}


def count_quarantined(cache: Path, manifest: Manifest) -> int:
    """The documents in quarantine of all published shards."""
    return sum(len(ShardRecord.read(cache, manifest, i).quarantined) for i in published_shards(cache, manifest))
