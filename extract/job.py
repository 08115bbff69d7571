"""One extraction as it was asked for: the configuration's sections and the directory of the cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shards.config import CacheConfig, DataConfig, TargetConfig, check_codec, check_layers
from shards.config_file import ConfigFile
from shards.manifest import COMPLETE_FILE, MANIFEST_FILE, Manifest
from shards.schema import missing_shards
from shards.sections import ExtractConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    target: TargetConfig
    data: DataConfig
    cache: CacheConfig
    extract: ExtractConfig
    directory: Path

    @classmethod
    def load(cls, config: Path, overrides: Sequence[str] = (), directory: Path | None = None) -> Self:
        """Read and validate a configuration file; `directory` defaults to caches/<its name>."""
        file = ConfigFile.load(config, overrides)
        job = cls(
            target=file.section("target", TargetConfig),
            data=file.section("data", DataConfig),
            cache=file.section("cache", CacheConfig),
            extract=file.section("extract", ExtractConfig),
            directory=directory or Path("caches") / config.stem,
        )
        check_layers("cache.layers", job.cache.layers, job.target)
        check_codec(job.cache, job.target)
        return job

    def read_manifest(self) -> Manifest | None:
        """That of the cache that was begun, if one was; raise CacheError if it is another configuration's."""
        if not (self.directory / MANIFEST_FILE).exists():
            return None
        manifest = Manifest.read(self.directory)
        manifest.check_config(self.target, self.data, self.cache, self.directory)
        return manifest

    def complete_manifest(self) -> Manifest | None:
        """That of the cache if nothing is missing of it; raise CacheError if it is another configuration's."""
        manifest = self.read_manifest()
        is_marked = (self.directory / COMPLETE_FILE).exists()
        return manifest if manifest and is_marked and not missing_shards(self.directory, manifest) else None
