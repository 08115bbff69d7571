"""A tool that can be told where to stop: `python -m tests.shards.tool_process N DEST COMMAND …`, as `python -m shards`.

Before it touches something in DEST for the N-th time it writes a byte to stderr and waits, so that whoever reads the
byte can kill it there. With N = 0 it runs to its end and writes how many times it touched something.
"""

import os
import sys
import threading

from shards.__main__ import main

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def watch(stop_at: int, directory: str) -> list[int]:
    num_events = [0]
    lock = threading.Lock()

    def count(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS and str(arguments[0]).startswith(directory):
            with lock:  # all threads stop together
                num_events[0] += 1
                if num_events[0] == stop_at:
                    os.write(2, b".")
                    os.read(0, 1)

    sys.addaudithook(count)
    return num_events


if __name__ == "__main__":
    stop_at, destination = int(sys.argv.pop(1)), sys.argv.pop(1)
    num_events = watch(stop_at, destination)
    code = main()
    os.write(2, str(num_events[0]).encode())
    sys.exit(code)
