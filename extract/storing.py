"""Storing beside the target: rows go into memory that a second process shares, and that process writes the shards.

So statistics, checksums and the disk hold the target up only when all of that memory is full, and how long they do is
measured. The writer is forked before this process has touched a GPU. It ends when its worker does, however that ends,
and drops the shard that it was at; no signal but SIGKILL ends it earlier.
"""

import collections
import contextlib
import gc
import itertools
import mmap
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn, Self

import numpy as np
import torch

from extract.sizes import shards_bytes
from shards.errors import EXIT_FAILED, EXPECTED_ERRORS, RunError
from shards.manifest import Manifest
from shards.record import Quarantined
from shards.room import free_bytes
from shards.schema import ArraySpec, missing_shards, shard_arrays
from shards.writer import ShardRow, write_shard

Arrays = dict[str, np.ndarray]  # by the name of the array that they are stored in

# One is written, two wait while a shard is made durable, one is being filled.
NUM_SLOTS = 4
ALIGNMENT = 4096
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # the worker's business
STDERR = 2


class Storing:
    """The writer of one worker, and the memory that both share: a row's arrays, NUM_SLOTS times.

    The rows of `shards` are to be filled in and submitted in the order of the plan. Raises RunError, at the latest with
    `finish`, when they could not be stored.
    """

    def __init__(self, cache: Path, manifest: Manifest, shards: Sequence[int], *, num_workers: int = 1) -> None:
        self._slots, self._memory = _shared_slots(shard_arrays(manifest, 0))
        self._is_page_locked = False
        self._num_taken = self._num_written = 0
        self.waited_s = 0.0  # while the target had nothing to do
        self._connection, writers_end = Pipe()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        self.writer = os.fork()
        if self.writer == 0:
            _live(writers_end, lambda: _write_shards(writers_end, cache, manifest, shards, self._slots, num_workers))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        writers_end.close()
        self._exit_code: int | None = None

    def page_lock(self) -> None:
        """Let a GPU copy into the shared memory beside its work. Takes it from the machine here, all at once."""
        address, num_bytes = self._memory.ctypes.data, self._memory.nbytes
        error = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
        if error != torch.cuda.cudart().cudaError.success:
            raise RunError(
                f"{num_bytes / 1e9:.1f} GB of this machine's memory, where rows are written from, could not be "
                f"page-locked ({error}): free as much, or raise the limit that `ulimit -l` shows"
            )
        self._is_page_locked = True

    @property
    def is_full(self) -> bool:
        """Whether `take` would wait."""
        while self._num_taken - self._num_written == NUM_SLOTS and self._connection.poll():
            self._receive()
        return self._num_taken - self._num_written == NUM_SLOTS

    def take(self) -> Arrays:
        """The arrays of the next row, to fill in; waits until the writer has done with what they held before."""
        started_s = time.monotonic()
        if self.is_full:
            self._receive()
            self.waited_s += time.monotonic() - started_s
        self._num_taken += 1
        return self._slots[(self._num_taken - 1) % NUM_SLOTS]

    def submit(self, quarantined: tuple[Quarantined, ...]) -> None:
        """Have the writer store the earliest row that was taken and not yet submitted."""
        try:
            self._connection.send(quarantined)
        except OSError:
            while True:
                self._receive()  # raises what nobody listens for any more

    def finish(self) -> None:
        """Return when all shards are published."""
        while self._num_written < self._num_taken:
            self._receive()
        self._receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End the writer, which drops a shard that is not whole."""
        self._connection.close()
        self._wait_for_writer()
        if self._is_page_locked:
            torch.cuda.cudart().cudaHostUnregister(self._memory.ctypes.data)

    def _receive(self) -> None:
        """Wait for one more row to be written, or the last shard to be published."""
        try:
            error = self._connection.recv()
        except (EOFError, OSError):
            code = self._wait_for_writer()
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            raise RunError(
                f"its writer, process {self.writer}, was ended ({how}); published shards are kept, "
                "the same command continues"
            ) from None
        if error:
            raise error
        self._num_written += 1

    def _wait_for_writer(self) -> int:
        if self._exit_code is None:
            self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self.writer, 0)[1])
        return self._exit_code


def _shared_slots(arrays: dict[str, ArraySpec]) -> tuple[list[Arrays], np.ndarray]:
    """Views of memory that a fork shares, and all of it. It has no file, and becomes real where it is written to."""
    sizes = {name: int(np.prod(spec.row_shape, dtype=np.int64)) * spec.dtype.itemsize for name, spec in arrays.items()}
    slot_bytes = sum(_aligned(size) for size in sizes.values())
    memory = np.frombuffer(mmap.mmap(-1, NUM_SLOTS * slot_bytes), np.uint8)
    slots = []
    for offset in range(0, len(memory), slot_bytes):
        slot = {}
        for name, spec in arrays.items():
            slot[name] = memory[offset : offset + sizes[name]].view(spec.dtype).reshape(spec.row_shape)
            offset += _aligned(sizes[name])
        slots.append(slot)
    return slots, memory


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _live(connection: Connection, write_shards: Callable[[], None]) -> NoReturn:
    """The life of the writer process: an error that is a message to the user goes to the worker."""
    code = EXIT_FAILED
    try:
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        gc.freeze()  # what was the worker's is not this process's to collect: it may lie on a GPU
        _close_all_but(connection.fileno())  # else who waits for the worker's end would wait for its writer's, too
        write_shards()
        code = 0
    except EXPECTED_ERRORS as error:
        with contextlib.suppress(OSError):  # the worker is gone
            connection.send(error)
    except (EOFError, OSError):
        pass  # the same
    except BaseException:
        os.write(STDERR, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _close_all_but(descriptor: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > STDERR and int(name) != descriptor:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(name))


def _write_shards(
    connection: Connection,
    cache: Path,
    manifest: Manifest,
    shards: Sequence[int],
    slots: Sequence[Arrays],
    num_workers: int,
) -> None:
    """For each row that comes in, and after the last shard, None goes out."""
    order = itertools.cycle(slots)

    def receive(shard: int) -> Iterator[ShardRow]:
        for _ in manifest.plan.shard_rows(shard):
            yield ShardRow(arrays=next(order), quarantined=connection.recv())
            connection.send(None)

    for shard in shards:
        rows = receive(shard)
        _require_room(cache, manifest, num_workers)
        write_shard(cache, manifest, shard, rows)
        collections.deque(rows, maxlen=0)  # of a shard that was there already, nobody looked at them
    connection.send(None)


def _require_room(cache: Path, manifest: Manifest, num_workers: int) -> None:
    """Raise RunError unless the disk has room for a shard of each worker."""
    missing = missing_shards(cache, manifest)
    free = free_bytes(cache)
    next_bytes, all_bytes = (
        shards_bytes(manifest.target, manifest.cache, manifest.plan, shards)
        for shards in (missing[:num_workers], missing)
    )
    if free < next_bytes:
        raise RunError(
            f"the disk of {cache} has {free:,} bytes free, the {len(missing):,} shards that are missing need "
            f"{all_bytes:,}, {all_bytes - free:,} more: stopped after a whole shard; make room, then run the same "
            "command again"
        )
