"""Workers through torch's elastic launcher: one for each GPU, or one on the CPU of a machine without."""

import ctypes
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from extract.config import ExtractConfig
from extract.job import Job
from extract.worker import work
from shards.errors import RunError, UsageError

PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
    )
    # It would log a traceback of its own for every failure; what is to be said about one is said below.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, _worker)(job, missing, gpus)
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message
        if isinstance(message, dict):
            print(message["extraInfo"]["py_callstack"], file=sys.stderr)
            message = message["message"]
        raise RunError(
            f"worker {rank} failed: {message}; published shards are kept, the same command continues"
        ) from None


@record  # what it raises reaches the launcher with its traceback
def _worker(job: Job, missing: Sequence[int], gpus: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is to be said about an interrupt, the launcher says
    work(job, missing, gpus)
