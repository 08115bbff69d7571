"""The feed: rows from disk into page-locked slots, and from there to the tensors of the step. One thread.

Reading the next rows happens while the device replays the step before; two slots bound how far the host runs ahead.
"""

import time
from collections.abc import Sequence

import torch

from shards.reader import CacheReader
from train.order import NO_ROW
from train.runtime import wait_for
from train.staging import StagedRows

NUM_SLOTS = 2


class Feed:
    """Fills `staged`. Owns the host slots and the clock that says how long the device waited for data."""

    def __init__(self, reader: CacheReader, layers: Sequence[int], staged: StagedRows) -> None:
        self.reader = reader
        self.layers = tuple(layers)
        self.staged = staged
        self.device = staged.epoch.device
        on_gpu = self.device.type == "cuda"
        self.slots = [staged.allocate_host(pinned=on_gpu) for _ in range(NUM_SLOTS)]
        self.copied = [torch.cuda.Event() for _ in range(NUM_SLOTS)] if on_gpu else []
        self.turn = 0
        self.wait = DeviceWait() if on_gpu else HostWait()

    def load(self, rows: Sequence[int], *, epoch: int, feature_rows: Sequence[int] | None = None) -> None:
        """Stage `rows`; NO_ROW entries, and those that are lacking, become rows without supervised tokens.

        `feature_rows`: whose features each row gets instead of its own.
        """
        self.wait.begin()
        index = self.turn % NUM_SLOTS
        slot = self.slots[index]
        if self.copied:
            wait_for(self.copied[index])  # until the copy of two loads ago has left the slot
        slot.epoch.fill_(epoch)
        for i in range(len(slot.row_ids_R)):
            row = rows[i] if i < len(rows) else NO_ROW
            self._fill(slot, i, row, row if feature_rows is None or row == NO_ROW else feature_rows[i])
        self.wait.end()
        self.staged.copy_from(slot)
        if self.copied:
            self.copied[index].record()
        self.turn += 1

    def _fill(self, slot: StagedRows, i: int, row: int, feature_row: int) -> None:
        slot.row_ids_R[i] = row
        if row == NO_ROW:
            slot.loss_mask_RT[i].zero_()
            return
        self.reader.read_row(feature_row, self.layers, slot.row_buffers(i, num_layers=len(self.layers)))
        if feature_row != row:
            self.reader.read_row(row, (), slot.row_buffers(i, num_layers=0))


class HostWait:
    """On the CPU nothing overlaps: all time spent reading is waiting."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def begin(self) -> None:
        self.started = time.perf_counter()

    def end(self) -> None:
        self.seconds += time.perf_counter() - self.started

    def finish_step(self) -> None:
        pass

    def take(self) -> float:
        """Seconds waited since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class DeviceWait:
    """On the GPU: the time on the device's own timeline between the end of a step and the start of the next copy."""

    def __init__(self) -> None:
        self.gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.step_end: torch.cuda.Event | None = None

    def begin(self) -> None:
        pass

    def end(self) -> None:
        if self.step_end is not None:
            self.gaps.append((self.step_end, _record()))
            self.step_end = None

    def finish_step(self) -> None:
        self.step_end = _record()

    def take(self) -> float:
        """Seconds waited since the last call. The device must have been synchronised."""
        milliseconds = sum(end.elapsed_time(start) for end, start in self.gaps)
        self.gaps.clear()
        return milliseconds / 1000


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
