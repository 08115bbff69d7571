"""Workers through torch's elastic launcher: one for each GPU, or one on the CPU of a machine without."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.popen_spawn_posix import Popen
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from extract.job import Job
from extract.worker import work
from shards.errors import EXIT_FAILED, CacheError, Interrupted, RunError, UsageError
from shards.sections import ExtractConfig

PR_SET_PDEATHSIG = 1  # linux/prctl.h
RETRY_S = 0.05  # after which an interrupt that came at a bad moment is answered
TERMINATING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
ENDING_A_WORKER = (signal.SIGINT, signal.SIGTERM)  # the first when the launcher dies, the second from the launcher
EXPECTED = tuple(kind.__name__ for kind in (UsageError, CacheError, RunError))  # they say all there is to be said


def find_gpus(config: ExtractConfig) -> list[str]:
    """The GPUs to work on, as CUDA_VISIBLE_DEVICES names them: extract.gpus, else all that are visible; [] without any.

    Does not initialise CUDA. Raises UsageError when extract.gpus names some that this machine does not show.
    """
    num_visible = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",")[:num_visible] if named else [str(gpu) for gpu in range(num_visible)]
    if config.gpus is None:
        return visible
    if absent := [gpu for gpu in config.gpus if gpu >= num_visible]:
        shown = f"{num_visible}, 0..{num_visible - 1}" if num_visible else "none"
        raise UsageError(f"extract.gpus names GPUs {absent}: this machine shows {shown}")
    return [visible[gpu] for gpu in config.gpus]


def stop_with_launcher() -> None:
    """Have the kernel send SIGTERM when `torchrun` dies, however it does. For workers of `launch` torch does such."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def launch(job: Job, missing: Sequence[int], gpus: Sequence[str]) -> None:
    """Start the workers and wait for them; raise RunError if one fails, after the others have been ended."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=max(1, len(gpus)),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle="",  # here, because torch would break off the start of a worker
    )
    # It would log a traceback of its own for every failure; what is to be said about one is said below.
    for module in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.CRITICAL)
    try:
        with _interruptible():
            elastic_launch(config, _worker)(job, missing, gpus)
    except SignalException:
        raise Interrupted from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RunError(f"worker {rank} failed: {_describe(failure.message)}") from None


def _describe(message: str | dict[str, Any]) -> str:
    """What a worker died of. Its traceback goes to stderr, unless the error is a message to the user."""
    if isinstance(message, dict):
        kind, _, sentence = message["message"].partition(": ")
        if kind in EXPECTED:
            return sentence
        print(message["extraInfo"]["py_callstack"], file=sys.stderr)
        message = message["message"]
    return f"{message}; published shards are kept, the same command continues"


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let every signal that ends the launcher end the workers, too, by SIGTERM, and only the launcher speak of it.

    A terminal sends SIGINT to workers, too, and one that is still importing would answer with a traceback. So they
    start with the signal blocked: the launcher blocks it in this thread, and has another one to receive it.
    """

    def interrupt(_number: int, frame: FrameType | None) -> None:
        if _is_starting_a_process(frame):  # which would read half of what it is sent, and complain
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)
            return
        raise SignalException("interrupted", signal.SIGTERM)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM, *TERMINATING)}
    for number, handler in handlers.items():
        if number not in TERMINATING or handler is not signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, interrupt)
    resource_tracker.ensure_running()  # which unblocks SIGINT in this thread, and is started before the first worker
    threading.Thread(target=signal.pause, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _is_starting_a_process(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is Popen._launch.__code__:
            return True
        frame = frame.f_back
    return False


@record  # what it raises reaches the launcher with its traceback
def _worker(job: Job, missing: Sequence[int], gpus: Sequence[str]) -> None:
    for number in ENDING_A_WORKER:
        signal.signal(number, _exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    work(job, missing, gpus)


def _exit(_number: int, _frame: FrameType | None) -> None:
    """Let a worker end as from an error, so that it waits for its writer, and the launcher counts what is kept."""
    for number in ENDING_A_WORKER:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(EXIT_FAILED)
