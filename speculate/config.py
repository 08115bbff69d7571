"""The `[speculate]` section: what live decoding is measured on."""

from dataclasses import dataclass

from shards.config import require_path, require_positive
from shards.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SpeculateConfig:
    prompts: str  # JSONL; each line has `messages` (ending with the user's turn) or `text` (to be continued)
    num_prompts: int | None = None  # the first so many; None: all
    max_new_tokens: int = 256  # of one answer
    temperature: float = 0.0  # 0: greedy
    seed: int = 0  # of the draws at a temperature

    def __post_init__(self) -> None:
        require_path("speculate.prompts", self.prompts)
        require_positive(self, "speculate", "max_new_tokens")
        if self.temperature != 0.0:
            require_positive(self, "speculate", "temperature")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"speculate.seed is {self.seed}: it must be in 0..2^63 − 1")
        if self.num_prompts is not None:
            require_positive(self, "speculate", "num_prompts")
        if self.max_new_tokens < 2:
            raise UsageError(
                f"speculate.max_new_tokens is {self.max_new_tokens}: it must be at least 2, "
                "because the first token of an answer needs no drafter"
            )
