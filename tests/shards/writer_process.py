"""A process that completes a cache and can be told where to stop: `python -m tests.shards.writer_process CACHE N`.

Before it touches the file system for the N-th time it writes a byte to stdout and waits, so that whoever reads the byte
can kill it there. With N = 0 it runs to its end and writes how many times it touched the file system.
"""

import os
import sys
import threading
from pathlib import Path

from tests.shards.caches import CacheShape, make_cache

SHAPE = CacheShape(num_rows=4, rows_per_shard=2, layers=(1, 4))
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def main(cache: Path, stop_at: int) -> None:
    num_events = 0
    lock = threading.Lock()

    def watch(event: str, _: tuple[object, ...]) -> None:
        nonlocal num_events
        if event in EVENTS:
            with lock:  # all threads stop together
                num_events += 1
                if num_events == stop_at:
                    os.write(1, b".")
                    os.read(0, 1)

    sys.addaudithook(watch)
    make_cache(cache, SHAPE)
    print(num_events)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
