"""Which GPUs, and a worker for each through torch's elastic launcher: `python -m train` again."""

import os
import sys
import uuid
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shards.errors import RunError, UsageError
from train.config import TrainConfig


def run_workers(arguments: Sequence[str], *, num_workers: int) -> None:
    """Start the workers and wait for them; raise RunError when one fails, after the others have been ended.

    A worker's own message or traceback is on stderr before that. Each is a fresh interpreter, not a fork of this one.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "train", *arguments)
    except SignalException:
        raise RunError("interrupted; --resume continues") from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RunError(f"the worker of rank {rank} ended with exit code {failure.exitcode}") from None


def find_gpus(settings: TrainConfig) -> list[str]:
    """The GPUs to train on, as CUDA_VISIBLE_DEVICES names them: train.gpus, else all that are visible; [] without any.

    Does not initialise CUDA. Raises UsageError when train.gpus names some that this machine does not show.
    """
    num_visible = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",")[:num_visible] if named else [str(gpu) for gpu in range(num_visible)]
    if settings.gpus is None:
        return visible
    if absent := [gpu for gpu in settings.gpus if gpu >= num_visible]:
        shown = f"{num_visible}, 0..{num_visible - 1}" if num_visible else "none"
        raise UsageError(f"train.gpus names GPUs {absent}: this machine shows {shown}")
    return [visible[gpu] for gpu in settings.gpus]


def claim_gpu(gpus: Sequence[str]) -> None:
    """Let this process, the LOCAL_RANK-th of its machine, see its own GPU only. Before anything initialises CUDA."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if gpus and local_rank >= len(gpus):
        raise UsageError(f"there are more workers than GPUs: local rank {local_rank}, GPUs {', '.join(gpus)}")
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank]
