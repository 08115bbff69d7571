"""How far a cache is: complete, incomplete because what makes it was stopped, or being extracted at this moment."""

import fcntl
import os
from pathlib import Path
from typing import Literal

State = Literal["complete", "incomplete", "extracting"]
WHAT_THEN = {
    "incomplete": "the command that makes the cache (`make extract`) goes on from them",
    "extracting": "an extraction is at work on the others",
}


def cache_state(cache: Path, num_missing_shards: int) -> State:
    """Of an extraction on another host, which may share the disk, nothing can be told."""
    if not num_missing_shards:
        return "complete"
    return "extracting" if _is_locked(cache) else "incomplete"


def describe_incomplete(state: State, num_shards: int, num_planned_shards: int) -> str:
    """One sentence on a cache that is not complete."""
    return f"incomplete: {num_shards:,} of {num_planned_shards:,} shards are there; {WHAT_THEN[state]}"


def _is_locked(cache: Path) -> bool:
    """Whether an extraction holds the directory, as it does while it lives."""
    descriptor = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False
