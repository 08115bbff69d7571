"""The feed: rows from disk into page-locked slots, and from there to the tensors of the step. One thread.

Reading rows and copying them to the device both happen while the device replays the step before: the copy goes on a
stream of its own, to where the step does not look. Two slots bound how far the host runs ahead.
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
    """Fills `staged`. Owns the way there and the clock that says how long the device waited for data."""

    def __init__(self, reader: CacheReader, layers: Sequence[int], staged: StagedRows) -> None:
        self.reader = reader
        self.layers = tuple(layers)
        self.staged = staged
        on_gpu = staged.epoch.is_cuda
        self.transfer = DeviceTransfer(staged) if on_gpu else HostTransfer(staged)
        self.wait = DeviceWait() if on_gpu else HostWait()

    def load(self, rows: Sequence[int], *, epoch: int, feature_rows: Sequence[int] | None = None) -> None:
        """Stage `rows`; NO_ROW entries, and those that are lacking, become rows without supervised tokens.

        `feature_rows`: whose features each row gets instead of its own.
        """
        self.wait.begin()
        slot = self.transfer.next_slot()
        slot.epoch.fill_(epoch)
        for i in range(len(slot.row_ids_R)):
            row = rows[i] if i < len(rows) else NO_ROW
            self._fill(slot, i, row, row if feature_rows is None or row == NO_ROW else feature_rows[i])
        self.transfer.send()
        self.wait.end()
        self.transfer.stage()

    def _fill(self, slot: StagedRows, i: int, row: int, feature_row: int) -> None:
        slot.row_ids_R[i] = row
        if row == NO_ROW:
            slot.loss_mask_RT[i].zero_()
            return
        self.reader.read_row(feature_row, self.layers, slot.row_buffers(i, num_layers=len(self.layers)))
        if feature_row != row:
            self.reader.read_row(row, (), slot.row_buffers(i, num_layers=0))


class HostTransfer:
    """On the CPU rows are read straight to where the step looks."""

    def __init__(self, staged: StagedRows) -> None:
        self.staged = staged

    def next_slot(self) -> StagedRows:
        return self.staged

    def send(self) -> None:
        pass

    def stage(self) -> None:
        pass


class DeviceTransfer:
    """Slots of the host → the landing on the device, on a stream of its own → what the step reads, before the step."""

    def __init__(self, staged: StagedRows) -> None:
        self.staged = staged
        self.slots = [staged.allocate_like("cpu", pinned=True) for _ in range(NUM_SLOTS)]
        self.landing = staged.allocate_like(staged.epoch.device)
        self.sent = [torch.cuda.Event() for _ in range(NUM_SLOTS)]
        self.staged_last = torch.cuda.Event()
        self.stream = torch.cuda.Stream()
        self.turn = 0

    def next_slot(self) -> StagedRows:
        """The slot of two loads ago, once its rows have left it."""
        index = self.turn % NUM_SLOTS
        wait_for(self.sent[index])
        return self.slots[index]

    def send(self) -> None:
        """Enqueue the slot's copy; the step's stream goes on when it has landed."""
        index = self.turn % NUM_SLOTS
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.staged_last)
            self.landing.copy_from(self.slots[index])
            self.sent[index].record()
        torch.cuda.current_stream().wait_event(self.sent[index])
        self.turn += 1

    def stage(self) -> None:
        self.staged.copy_from(self.landing)
        self.staged_last.record()


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
    """On the GPU: the time on the device's own timeline between the end of a step and the landing of the next rows."""

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
