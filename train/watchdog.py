"""A run that makes no step is not waited for: it says where each thread stands, and ends.

The watch is kept by a native thread of faulthandler's, so that it sees a process that hangs in native code, too.
"""

import faulthandler


def expect_a_step_within(seconds: float) -> None:
    """Unless this or `rest` is called in time: the stacks of all threads on stderr, and an end with exit code 1."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def rest() -> None:
    """Expect nothing from now on."""
    faulthandler.cancel_dump_traceback_later()
