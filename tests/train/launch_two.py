"""`python -m tests.train.launch_two`: as `python -m train` on a machine with two GPUs, but on the CPU.

What the launcher itself refuses is left out.
"""

import sys

from shards.errors import run_command
from train.__main__ import INTERRUPTED, parse_arguments
from train.launch import run_workers

if __name__ == "__main__":
    run = parse_arguments().run
    sys.exit(run_command(lambda: run_workers(sys.argv[1:], run, num_workers=2), interrupted=INTERRUPTED))
