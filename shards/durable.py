"""Files and directories that are whole or absent: written beside, synced, renamed into place."""

import json
import os
import socket
from pathlib import Path
from typing import Any


def json_text(value: Any) -> str:
    """JSON as a cache stores it: the same value has the same bytes."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that `path` is at any time absent, the old file or the new one, and survives a power cut."""
    temporary = temporary_beside(path)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(json_text(value))
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def temporary_beside(path: Path) -> Path:
    """A hidden name next to `path` that only this process uses, on this host and any other that shares the disk."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


def sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable (a rename is only that once its directory is synced)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Make every file and every name below `directory` durable."""
    for parent, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync_file(Path(parent, name))
        sync_directory(Path(parent))
