"""How far a command is: a bar on a terminal, else a plain line every few seconds."""

import sys
import time
from typing import Self

from tqdm import tqdm

LINE_INTERVAL_S = 10.0
tqdm.monitor_interval = 0  # it would start a thread


class Progress:
    """Owns the bar; a context manager. Writes to stderr: stdout is for results."""

    def __init__(self, total: int, *, unit: str, name: str) -> None:
        self.total, self.unit, self.name = total, unit, name
        self.started_at_s = self.shown_at_s = time.monotonic()
        self.bar = tqdm(total=total, unit=unit, desc=name) if sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, count: int) -> None:
        """Say that `count` of the units are done."""
        now_s = time.monotonic()
        if self.bar is not None:
            self.bar.update(count - self.bar.n)
        elif now_s - self.shown_at_s >= LINE_INTERVAL_S:
            self.shown_at_s = now_s
            left_s = (self.total - count) * (now_s - self.started_at_s) / max(1, count)
            print(f"{self.name}: {count}/{self.total} {self.unit}s, {left_s:,.0f} s left", file=sys.stderr, flush=True)
