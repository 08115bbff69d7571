"""The errors that are messages to the user, and the exit codes they become.

An error names what, what was expected, what was found, where, and what to do.
"""

import os
import sys
from collections.abc import Callable

EXIT_FAILED = 1
EXIT_USAGE = 2


class UsageError(ValueError):
    """The command, the configuration or its inputs are wrong: nothing was started, nothing was written. Exit 2."""


class CacheError(ValueError):
    """A cache, or a part of it, is not what its format or its manifest promises."""


class RunError(RuntimeError):
    """A run that began could not go on. Exit 1."""


def run_command(command: Callable[[], int | None]) -> int:
    """Call `command` and return its exit code; an expected error becomes one sentence on stderr.

    Before a run has begun a bad cache is a usage error like any other, so CacheError exits with 2 here.
    """
    try:
        return command() or 0
    except (UsageError, CacheError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:  # the reader of our output has gone: nothing is left to be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
