"""No process outlives the one that started it, however that one ends."""

import ctypes
import os
import signal

from shards.errors import EXIT_FAILED

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send the signal `number` to this process when process `parent`, its parent, dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)  # it was dead before the kernel was told
