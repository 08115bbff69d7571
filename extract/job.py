"""One extraction as it was asked for: the configuration's sections and the directory of the cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from extract.config import ExtractConfig
from shards.config import CacheConfig, ConfigFile, DataConfig, TargetConfig, check_codec, check_layers
from shards.manifest import COMPLETE_FILE, Manifest
from shards.schema import missing_shards


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

    def is_complete(self) -> bool:
        """Whether there is nothing to do. Hashes nothing; raises CacheError for the cache of another configuration."""
        if not (self.directory / COMPLETE_FILE).exists():
            return False
        manifest = Manifest.read(self.directory)
        manifest.check_config(self.target, self.data, self.cache, self.directory)
        return not missing_shards(self.directory, manifest)
