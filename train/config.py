"""The configuration of training: what its sections must be for each other.

Everything that can be known to be wrong without reading a shard is refused before a worker starts: of one section by
itself where it is defined, of several together here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shards.codec import CODECS
from shards.config import CacheConfig, DataConfig, TargetConfig, check_codec, check_layers
from shards.config_file import ConfigFile
from shards.errors import UsageError
from shards.sections import DrafterConfig, TrainConfig

DEFAULT_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0, 7: 4.0}  # block size → decay of the slot weights, from the paper


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that a training run reads of its config file."""

    target: TargetConfig
    data: DataConfig
    cache: CacheConfig
    drafter: DrafterConfig
    train: TrainConfig

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        file = ConfigFile.load(path, overrides)
        return cls(
            target=file.section("target", TargetConfig),
            data=file.section("data", DataConfig),
            cache=file.section("cache", CacheConfig),
            drafter=file.section("drafter", DrafterConfig),
            train=file.section("train", TrainConfig),
        )

    def __post_init__(self) -> None:
        check_layers("drafter.target_layer_ids", self.drafter.target_layer_ids, self.target)
        check_layers("cache.layers", self.cache.layers, self.target)
        check_codec(self.cache, self.target)
        if CODECS[self.cache.codec].is_compressed:
            raise UsageError(
                f"cache.codec {self.cache.codec!r} is for archives and transport: recode first, with "
                "`python -m shards recode CACHE DEST --codec bf16`"
            )
        missing = [layer for layer in self.drafter.target_layer_ids if layer not in self.cache.layers]
        if missing:
            raise UsageError(
                f"drafter.target_layer_ids has layers {missing} that are not in cache.layers, {list(self.cache.layers)}"
            )
        for name, size in (
            ("train.num_anchors", self.train.num_anchors),
            ("drafter.block_size", self.drafter.block_size),
        ):
            if size > self.cache.row_tokens:
                raise UsageError(f"{name} is {size}: a row has only {self.cache.row_tokens} tokens")
        if self.train.gamma is None and self.drafter.block_size not in DEFAULT_GAMMA:
            raise UsageError(
                f"train.gamma has no default for drafter.block_size {self.drafter.block_size} "
                f"(only for {sorted(DEFAULT_GAMMA)}): set it"
            )

    @property
    def gamma(self) -> float:
        """Decay of the slot weights: as set, or the paper's for the block size."""
        return DEFAULT_GAMMA[self.drafter.block_size] if self.train.gamma is None else self.train.gamma


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The published choice of context layers: spread from layer 1 to layer N−3 (DFLASH.md; Python's rounding)."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    spacing = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * spacing) for i in range(num_draft_layers))
