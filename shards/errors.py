"""The errors that are messages to the user, and the exit codes they become.

An error names what, what was expected, what was found, where, and what to do.
"""

import os
import signal
import sys
from collections.abc import Callable

EXIT_FAILED = 1
EXIT_USAGE = 2


class UsageError(ValueError):
    """The command, the configuration or its inputs are wrong: nothing was started, nothing was written. Exit 2."""

    exit_code = EXIT_USAGE


class CacheError(ValueError):
    """A cache, or a part of it, is not what its format or its manifest promises.

    Before a run has begun a bad cache is a usage error like any other: exit 2.
    """

    exit_code = EXIT_USAGE


class RunError(RuntimeError):
    """A run that began could not go on. Exit 1."""

    exit_code = EXIT_FAILED


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM; its text, if it has one, is the sentence to end with.

    Not KeyboardInterrupt itself: once that has passed through an `exec`, as in the making of a dataclass, CPython ends
    `python -m` by SIGINT after all, though it was caught. And with an __init__, else a codec would put words of its own
    in the place of the sentence."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(sentence)


EXPECTED_ERRORS = (UsageError, CacheError, RunError)


def reason(error: Exception) -> str:
    """Why, for a sentence that has named the file already."""
    return getattr(error, "strerror", None) or str(error)


def run_command(command: Callable[[], int | None], *, interrupted: str = "interrupted") -> int:
    """Call `command` and return its exit code; an expected error becomes one sentence on stderr.

    From here on SIGTERM raises KeyboardInterrupt as Ctrl-C does, and either ends with a sentence, `interrupted`
    unless it brings its own. So a program calls this first, and imports what takes time in `command`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):  # once is enough
            signal.signal(number, signal.SIG_IGN)
        return _end(str(interrupt) or interrupted, EXIT_FAILED)
    except EXPECTED_ERRORS as error:
        return _end(f"error: {error}", error.exit_code)
    except BrokenPipeError:
        return _end("", EXIT_FAILED)
    except OSError as error:  # the disk, or permissions, where nobody had more to say about it
        return _end(f"error: {error}", EXIT_FAILED)


def _interrupt(number: int, frame: object) -> None:
    raise Interrupted


def _end(sentence: str, code: int) -> int:
    """Say what is to be said, unless nobody reads it any more: `| head` is no failure that needs a traceback."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, sentence and f"{sentence}\n")):
        try:
            stream.write(text)
            stream.flush()
        except OSError:  # Python would complain at exit that it can't flush
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code
