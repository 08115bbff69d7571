"""One training run per run directory: its first rank, which alone writes there, holds a lock while it lives.

The kernel releases the lock however the process ends, so there is no stale one.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shards.errors import RunError, UsageError

LOCK_FILE = ".lock"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold `run`, which is made if need be; raise UsageError if another run has it.

    A directory in which nothing was written is not left behind.
    """
    try:
        file = _claim(run)
    except OSError as error:
        raise RunError(f"{run} can't be written to: {error.strerror}; --run names another directory") from error
    with file:
        try:
            yield
        finally:
            if [path.name for path in run.iterdir()] == [LOCK_FILE]:
                (run / LOCK_FILE).unlink()
                run.rmdir()


def _claim(run: Path) -> IO[bytes]:
    """The lock file, locked, with the process that holds it named in it."""
    run.mkdir(parents=True, exist_ok=True)
    file = open(run / LOCK_FILE, "ab+", buffering=0)  # noqa: SIM115 - it is open while the run is
    _take(file, run)
    file.truncate(0)
    # The parent is the launcher, or torchrun: the process to stop.
    file.write(f"process {os.getppid()} on {socket.gethostname()}".encode())
    return file


def holder(run: Path) -> str | None:
    """Who trains in `run` now, None if nobody does. Writes nothing."""
    try:
        with open(run / LOCK_FILE, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return (run / LOCK_FILE).read_text(encoding="utf-8") or "another process"
    except OSError:  # there is no lock, or this file system has none
        return None
    return None


def refuse_if_locked(run: Path) -> None:
    """Raise UsageError if a training run has `run` now. Writes nothing."""
    path = run / LOCK_FILE
    if os.path.isfile(path) and os.access(path, os.W_OK):
        with open(path, "rb+") as file:
            _take(file, run)


def _take(file: IO[bytes], run: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UsageError(
            f"{run} is in use: {file.read().decode() or 'another process'} is training there; wait for it or stop it, "
            "or name another directory with --run (RUN= of make)"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{run} can't be locked ({error.strerror}), and two runs in one directory would destroy each other's "
            "checkpoints: name a directory on a file system that has flock"
        ) from None
