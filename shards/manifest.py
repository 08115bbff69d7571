"""The manifest: what a cache is, what it is of, and which rows and shards it will hold.

`manifest.json` is written once, after `plan/` and `target/` are in place, and never changes. A directory without one
is no cache. FORMAT.md specifies the file; this module reads, validates and compares it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self

from shards.config import CacheConfig, DataConfig, TargetConfig, build_section, check_codec, shown, to_json
from shards.durable import json_text
from shards.errors import CacheError, UsageError, reason

FORMAT_NAME = "dflash-cache"
FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
COMPLETE_FILE = "complete.json"
SEAL = "seal"  # key of a JSON object's own checksum
UNSEALED = "0" * 64  # in its place while it is computed
MAX_SHARDS = 100_000  # their names have five digits
NOT_IDENTITY = ("target.path", "data.files")  # where things lie is no part of what they are


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Content hashes (sha256, hex) of what the cache was made from."""

    target: str  # weights and configuration
    tokenizer: str
    chat_template: str
    data: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sizes of the plan. Rows 0..num_train_rows−1 are for training, the rest hold the held-out documents.

    Shard i holds rows i·rows_per_shard up to, not including, min((i+1)·rows_per_shard, num_rows).
    """

    num_rows: int
    num_train_rows: int
    rows_per_shard: int
    num_documents: int
    num_heldout_documents: int
    num_tokens: int
    num_supervised_tokens: int
    sources: tuple[str, ...]  # names; a document's source_id indexes this
    num_left_out: dict[str, int]  # documents that are not in the plan, by reason
    num_truncated: int

    def __post_init__(self) -> None:
        if self.rows_per_shard < 1 or not 0 <= self.num_train_rows <= self.num_rows:
            raise CacheError(
                f"the plan has {self.num_rows} rows, {self.num_train_rows} of them for training, "
                f"{self.rows_per_shard} to a shard: these can't all be true"
            )
        if self.num_shards > MAX_SHARDS:
            raise CacheError(
                f"the plan has {self.num_shards} shards, at most {MAX_SHARDS} fit: raise cache.shard_bytes"
            )

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.rows_per_shard)

    def shard_rows(self, shard: int) -> range:
        start = shard * self.rows_per_shard
        return range(start, min(start + self.rows_per_shard, self.num_rows))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    target: TargetConfig
    data: DataConfig
    cache: CacheConfig
    identity: Identity
    plan: Plan
    checksums: dict[str, str]  # file below plan/ or target/, with forward slashes → sha256, hex
    software: dict[str, str]  # recorded, never compared
    history: tuple[str, ...] = ()  # what tools did to the states since the target gave them; recorded, never compared

    def __post_init__(self) -> None:
        check_codec(self.cache, self.target)

    def to_json(self) -> dict[str, Any]:
        fields = json.loads(json.dumps(dataclasses.asdict(self)))
        return sealed({"format": FORMAT_NAME, "version": FORMAT_VERSION, **fields})

    @classmethod
    def from_json(cls, value: dict[str, Any], where: Path) -> Self:
        """Build the manifest from the content of its file `where`; raise CacheError naming what is wrong."""
        fields = {key: item for key, item in value.items() if key not in ("format", "version", SEAL)}
        try:
            manifest = build_section("manifest", cls, fields, where)
        except (UsageError, CacheError) as error:
            raise CacheError(f"{where} is damaged: {error}") from None
        for name in manifest.checksums:
            if name.split("/")[0] not in ("plan", "target") or ".." in name.split("/"):
                raise CacheError(f"{where} is damaged: checksums names {name!r}, which is not below plan/ or target/")
        return manifest

    @classmethod
    def read(cls, cache: Path) -> Self:
        """The manifest of `cache`; raise CacheError if that is no cache, or the manifest is not as it was written."""
        path = cache / MANIFEST_FILE
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise CacheError(f"{cache} is not a cache: it has no {MANIFEST_FILE}; run `make extract` first") from None
        except OSError as error:
            raise CacheError(f"{path} cannot be read: {error.strerror}") from None
        value = read_json(path)
        if not isinstance(value, dict) or value.get("format") != FORMAT_NAME:
            raise CacheError(f"{path} is not the manifest of a {FORMAT_NAME}")
        if value.get("version") != FORMAT_VERSION:
            raise CacheError(
                f"{path} has version {shown(value.get('version'))}, this program reads version {FORMAT_VERSION}: "
                "extract again, or use the program that wrote it"
            )
        check_seal(value, path)
        return cls.from_json(value, path)

    @property
    def plan_hash(self) -> str:
        """Of the columns of plan/: a slice of a cache has its identity, but other rows."""
        columns = {name: sha256 for name, sha256 in self.checksums.items() if fnmatch(name, "plan/*.npy")}
        return hashlib.sha256(json_text(columns).encode()).hexdigest()

    @property
    def seal(self) -> str:
        """The checksum by which the file vouches for itself: it tells any two caches apart."""
        return self.to_json()[SEAL]

    def check_config(self, target: TargetConfig, data: DataConfig, cache: CacheConfig, where: Path) -> None:
        """Raise CacheError naming the first key in which a config differs from the one this cache was made with."""
        for key, made_with, wanted in self._differences(target, data, cache):
            if key not in NOT_IDENTITY:
                other = "`python -m shards recode` it" if key == "cache.codec" else "extract into another directory"
                raise CacheError(
                    f"{where} was made with {key} = {shown(made_with)}, the config says {shown(wanted)}: "
                    f"use the config it was made with, or {other}"
                )

    def moved(self, target: TargetConfig, data: DataConfig) -> list[str]:
        """A sentence for each place where a config looks for what this cache was made from elsewhere."""
        return [
            f"the cache was made with {key} = {shown(made_with)}, the config says {shown(wanted)}: "
            "the cache stays what it is, and `make extract` tells whether these are the same"
            for key, made_with, wanted in self._differences(target, data, self.cache)
            if key in NOT_IDENTITY
        ]

    def _differences(
        self, target: TargetConfig, data: DataConfig, cache: CacheConfig
    ) -> Iterator[tuple[str, Any, Any]]:
        """Each key of the three sections in which they differ from this manifest's: its name, value here and there."""
        for name, section in (("target", target), ("data", data), ("cache", cache)):
            made_with, wanted = to_json(getattr(self, name)), to_json(section)
            yield from (
                (f"{name}.{key}", made_with[key], wanted[key]) for key in wanted if made_with[key] != wanted[key]
            )


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """`value` with its own checksum: sha256 of the file that holds it, the checksum's 64 digits taken as zeros."""
    unsealed = json_text({**value, SEAL: UNSEALED})
    return {**value, SEAL: hashlib.sha256(unsealed.encode()).hexdigest()}


def check_seal(value: dict[str, Any], path: Path) -> None:
    """Raise CacheError unless every byte of the file `path`, whose content is `value`, is as it was sealed."""
    seal = value.get(SEAL)
    unsealed = path.read_bytes().replace(f'"{seal}"'.encode(), f'"{UNSEALED}"'.encode(), 1)
    expected = hashlib.sha256(unsealed).hexdigest()
    if seal != expected:
        raise CacheError(f"{path} is damaged or was edited: its {SEAL} is {shown(seal)}, expected {expected!r}")


def read_json(path: Path) -> Any:
    """The content of a JSON file of a cache; raise CacheError naming `path` if it can't be had."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: invalid JSON or UTF-8
        raise CacheError(f"{path} cannot be read: {reason(error)}") from None
