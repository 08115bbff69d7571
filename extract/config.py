"""The `[extract]` section: on what the target runs. Nothing in it changes what a cache contains."""

from dataclasses import dataclass

from shards.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    gpus: tuple[int, ...] | None = None  # one worker each; default: all visible ones, and without any one on the CPU

    def __post_init__(self) -> None:
        if self.gpus is not None and (not self.gpus or len(set(self.gpus)) < len(self.gpus) or min(self.gpus) < 0):
            raise UsageError(f"extract.gpus is {list(self.gpus)}: name at least one GPU, each once, counted from 0")
