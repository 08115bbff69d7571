"""One process at a time: an extraction in its cache, a build of the embedded default. As far as this host can tell.

The kernel ends a lock with its process, however that ends, so there is no stale one. Of a cache the directory itself is
locked, so there is no file to be left behind. Extractions on several hosts that share a disk don't see it: what two of
them do twice has the same bytes.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from shards.errors import UsageError


@contextlib.contextmanager
def sole_extraction(cache: Path) -> Iterator[None]:
    """Hold `cache`, a directory that is made if need be, and goes again if nothing was written into it.

    Raises UsageError if it can't be written to, or if another process holds it.
    """
    made = [path for path in (cache, *cache.parents) if not path.exists()]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(f"{cache} cannot be used: {error.strerror}") from None
    try:
        if not os.access(cache, os.W_OK | os.X_OK):
            raise UsageError(f"{cache} cannot be written to: make it writable, or extract into another directory")
        _lock(descriptor, cache)
        yield
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # not empty: there is something in it to keep
                path.rmdir()
        os.close(descriptor)


def _lock(descriptor: int, cache: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"another extraction is at work in {cache}: wait until it ends, or stop it") from None
    except OSError as error:
        print(f"extract: {cache} can't be locked ({error.strerror}): see that nobody else extracts into it", flush=True)


@contextlib.contextmanager
def one_after_another(file: Path, name: str) -> Iterator[None]:
    """Hold `file`, which stays, as soon as nobody else does. What is started here holds it, too: it may live longer."""
    with open(file, "ab") as held:
        os.set_inheritable(held.fileno(), True)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{name}: another process is at work on it: waiting until it ends", flush=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        except OSError as error:
            print(f"{name}: {file} can't be locked ({error.strerror}): see that nobody else builds it", flush=True)
        yield
