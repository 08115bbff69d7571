"""Whether a disk has room for what is to be written, before the work begins."""

import shutil
from pathlib import Path

from shards.errors import UsageError


def free_bytes(directory: Path) -> int:
    """Free on the disk that holds `directory`, or will."""
    return shutil.disk_usage(existing_parent(directory)).free


def existing_parent(directory: Path) -> Path:
    """The directory, or what there is already of where it will be."""
    while not directory.exists():
        directory = directory.absolute().parent
    return directory


def require_room(directory: Path, needed_bytes: int, *, advice: str) -> None:
    """Raise UsageError unless the disk of `directory` has room for `needed_bytes` more."""
    free = free_bytes(directory)
    if needed_bytes > free:
        raise UsageError(
            f"{directory} needs {needed_bytes:,} bytes more and its disk has {free:,} free, "
            f"{needed_bytes - free:,} too few: make room, {advice}"
        )
