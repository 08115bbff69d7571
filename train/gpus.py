"""Which GPUs of the machine are trained on, and which one is this worker's. Nothing here initialises CUDA."""

import os
from collections.abc import Sequence

import torch

from shards.errors import UsageError
from shards.sections import TrainConfig


def find_gpus(settings: TrainConfig) -> list[str]:
    """The GPUs to train on, as CUDA_VISIBLE_DEVICES names them: train.gpus, else all that are visible; [] without any.

    Raises UsageError when train.gpus names some that this machine does not show.
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
    """Let this process, the LOCAL_RANK-th of its machine, see its own GPU only. Before anything uses CUDA."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if gpus and local_rank >= len(gpus):
        raise UsageError(f"there are more workers than GPUs: local rank {local_rank}, GPUs {', '.join(gpus)}")
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank]
