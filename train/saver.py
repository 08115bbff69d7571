"""Saving beside training: the state is copied to memory that a second process shares, and that process writes it.

A save stops training for the copy, which on a GPU goes at the speed of its bus. The writer is forked before this
process has a second thread or has touched the GPU; it computes on one thread and ends with this process, however that
ends. What it was writing then is no checkpoint.
"""

import mmap
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from shards.errors import EXIT_FAILED, RunError
from train.checkpoint import Contents, write_checkpoint
from train.config import RunConfig
from train.drafter import Drafter
from train.optimizer import STATE_NAMES, flat_length
from train.parent import end_with_parent
from train.ranks import Ranks
from train.trainer import Trainer

NICENESS = 10  # the writer gives way to the trainers of the machine


class Saver:
    """The first rank's. Raises RunError, at the latest with `finish`, when a checkpoint could not be written."""

    def __init__(self, run: Path, config: RunConfig) -> None:
        self.config = config
        self.run = run
        with torch.device("meta"):
            length = flat_length(Drafter(config.drafter, config.target.hidden_size).parameters())
        self.state = {name: _shared_memory(length) for name in STATE_NAMES}
        self.connection, writers_end = Pipe()
        parent = os.getpid()
        self.writer = os.fork()
        if self.writer == 0:
            self.connection.close()
            _write_for(parent, writers_end, run, config, self.state)
        writers_end.close()
        self.step_in_writing: int | None = None
        self.last_begun = time.monotonic()
        self.stall_seconds = 0.0

    def page_lock(self) -> None:
        """Let the GPU copy to the shared memory at full speed. It is taken from the machine here, all at once."""
        for tensor in self.state.values():
            error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
            if error != torch.cuda.cudart().cudaError.success:
                raise RunError(
                    f"{sum(tensor.nbytes for tensor in self.state.values()) / 1e9:.1f} GB of this machine's memory, "
                    f"where checkpoints are written from, could not be page-locked ({error}): free as much"
                )

    def is_due(self, done: int) -> bool:
        """Whether it is time to save after step `done`, by steps or by the clock."""
        settings = self.config.train
        return done % settings.save_every == 0 or time.monotonic() - self.last_begun >= settings.save_seconds

    def save(self, trainer: Trainer, ranks: Ranks, *, is_best: bool, say: Callable[[str], None]) -> None:
        """Begin to write the checkpoint of the trainer's step, once the one before it is written."""
        started = time.monotonic()
        contents = Contents.of(trainer, self.config, is_best=is_best)
        if self.step_in_writing is not None and not self.connection.poll():
            say(
                f"step {contents.step} waits to be saved until step {self.step_in_writing} is, which began "
                f"{started - self.last_begun:.0f} s ago: the disk is slower than checkpoints come"
            )
        self.finish()
        for name, tensor in trainer.flat.state().items():
            self.state[name].copy_(tensor, non_blocking=True)
        ranks.wait_for_device()
        self._in_contact(lambda: self.connection.send(contents))
        self.step_in_writing = contents.step
        self.last_begun = time.monotonic()
        self.stall_seconds += self.last_begun - started

    def check(self) -> None:
        """Raise RunError if the writer has failed meanwhile; waits for nothing."""
        if self.connection.poll():
            self.finish()

    def finish(self) -> None:
        """Return when the checkpoint that was begun last is on the disk."""
        if self.step_in_writing is None:
            return
        error = self._in_contact(self.connection.recv)
        self.step_in_writing = None
        if error:
            raise RunError(error)

    def take_stall(self) -> float:
        """Seconds that training stood still for saving since the last call."""
        seconds, self.stall_seconds = self.stall_seconds, 0.0
        return seconds

    def close(self) -> None:
        """End the writer; all must be written."""
        self.connection.close()
        os.waitpid(self.writer, 0)

    def _in_contact(self, communicate: Callable[[], str | None]) -> str | None:
        try:
            return communicate()
        except (EOFError, OSError):
            _, status = os.waitpid(self.writer, 0)
            code = os.waitstatus_to_exitcode(status)
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            raise RunError(
                f"the process that writes the checkpoints of {self.run} was ended ({how}); those that are there are "
                "intact, --resume continues"
            ) from None


def _shared_memory(length: int) -> Tensor:
    """fp32 that a fork shares, without a file; it becomes real memory where it is written to."""
    return torch.frombuffer(mmap.mmap(-1, 4 * length), dtype=torch.float32)


def _write_for(parent: int, connection: Connection, run: Path, config: RunConfig, state: dict[str, Tensor]) -> NoReturn:
    """The writer's life: contents come in, a checkpoint is written, what went wrong or None goes out."""
    code = EXIT_FAILED
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # to save after one is the trainer's business
            signal.signal(number, signal.SIG_IGN)
        end_with_parent(parent, signal.SIGKILL)
        os.nice(NICENESS)
        torch.set_num_threads(1)
        while True:
            contents = connection.recv()
            error = None
            try:
                write_checkpoint(run, config, state, contents)
            except RunError as failed:
                error = str(failed)
            connection.send(error)
    except (EOFError, BrokenPipeError):  # the trainer is done, or gone
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
