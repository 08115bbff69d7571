"""What a run shows of itself: a bar on a terminal, else a plain line every few seconds.

Counts all workers: the rows of every published shard, whoever made it, and those that this process has in hand.
"""

import sys
import time
from pathlib import Path
from typing import Self

import numpy as np
from tqdm import tqdm

from shards.manifest import Manifest
from shards.schema import PlanArrays, published_shards

BAR_INTERVAL_S = 0.5
LINE_INTERVAL_S = 10.0
MENTIONED_WAITING = 0.03  # of the time


class Progress:
    """Owns the bar, and counts; a context manager. Silent unless `is_shown`: one worker speaks for all."""

    def __init__(self, cache: Path, manifest: Manifest, plan: PlanArrays, *, is_shown: bool) -> None:
        self.cache, self.manifest, self.is_shown = cache, manifest, is_shown
        self.tokens_by_row = np.bincount(plan.document_row, plan.document_tokens, minlength=manifest.plan.num_rows)
        num_rows, self.tokens_at_start, _ = self._count(None, 0)
        self.shown_at_s = self.started_at_s = time.monotonic()
        self.waited_s = 0.0
        self.bar = None
        if is_shown and sys.stderr.isatty():
            self.bar = tqdm(total=manifest.plan.num_rows, initial=num_rows, desc="extract", unit="row")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.is_shown:
            self._show(None, 0)
        if self.bar is not None:
            self.bar.close()

    def update(self, shard: int, num_rows: int, *, waited_s: float) -> None:
        """Say that the first `num_rows` rows of `shard` are through the target, which waited for the disk so long."""
        self.waited_s = waited_s
        interval_s = LINE_INTERVAL_S if self.bar is None else BAR_INTERVAL_S
        if self.is_shown and time.monotonic() - self.shown_at_s >= interval_s:
            self._show(shard, num_rows)

    def _show(self, shard: int | None, num_rows_in_hand: int) -> None:
        num_rows, num_tokens, num_shards = self._count(shard, num_rows_in_hand)
        self.shown_at_s = time.monotonic()
        tokens_per_s = (num_tokens - self.tokens_at_start) / max(1e-9, self.shown_at_s - self.started_at_s)
        shards = f"{num_shards}/{self.manifest.plan.num_shards} shards"
        waiting = self.waited_s / max(1e-9, self.shown_at_s - self.started_at_s)
        waits = f", the target waits for the disk {waiting:.0%} of the time" if waiting >= MENTIONED_WAITING else ""
        if self.bar is not None:
            self.bar.n = num_rows
            self.bar.set_postfix_str(f"{shards}, {tokens_per_s:,.0f} tok/s{waits}")
        else:
            left_s = (self.tokens_by_row.sum() - num_tokens) / max(1e-9, tokens_per_s)
            rows = f"{num_rows}/{self.manifest.plan.num_rows} rows"
            print(f"extract: {rows}, {shards}, {tokens_per_s:,.0f} tok/s, {left_s:,.0f} s left{waits}", flush=True)

    def _count(self, shard: int | None, num_rows_in_hand: int) -> tuple[int, float, int]:
        """Rows, real tokens and published shards so far."""
        plan, published = self.manifest.plan, published_shards(self.cache, self.manifest)
        parts = [plan.shard_rows(done) for done in published]
        if shard is not None and shard not in published:
            parts.append(plan.shard_rows(shard)[:num_rows_in_hand])
        num_tokens = sum(self.tokens_by_row[part.start : part.stop].sum() for part in parts)
        return sum(len(part) for part in parts), num_tokens, len(published)
