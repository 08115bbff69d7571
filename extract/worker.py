"""One worker: one process with one device, which makes the shards it is given."""

import os
from collections.abc import Sequence

import torch

from extract.capture import capture_rows
from extract.job import Job
from extract.progress import Progress
from extract.target import Target, read_architecture
from shards.errors import UsageError
from shards.manifest import Manifest
from shards.schema import PLAN_DIRECTORY, PlanArrays
from shards.writer import write_shard


def work(job: Job, missing: Sequence[int], gpus: Sequence[str]) -> None:
    """Make every W-th shard of `missing`, as the one of W workers that the launcher's environment describes.

    `gpus` are those of this machine's workers, as CUDA_VISIBLE_DEVICES names them; without any, the CPU is used.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _claim_device(gpus)
    manifest = Manifest.read(job.directory)
    if shards := missing[rank::world_size]:
        target = Target(read_architecture(job.target, job.cache), job.cache, device)
        plan = PlanArrays.read(job.directory / PLAN_DIRECTORY)
        with Progress(job.directory, manifest, plan, is_shown=rank == 0) as progress:
            for shard in shards:
                make_shard(job, manifest, plan, target, shard, progress)


def make_shard(job: Job, manifest: Manifest, plan: PlanArrays, target: Target, shard: int, progress: Progress) -> None:
    """Run the rows of one shard through the target and publish them."""
    row_ids = manifest.plan.shard_rows(shard)
    rows = capture_rows(
        target,
        row_ids,
        [plan.row_arrays(row, job.cache.row_tokens) for row in row_ids],
        codec=job.cache.codec,
        on_row=lambda num_rows: progress.update(shard, num_rows),
    )
    write_shard(job.directory, manifest, shard, rows)
    progress.update(shard, len(row_ids))


def _claim_device(gpus: Sequence[str]) -> torch.device:
    """Let this process see its own GPU only; to be called before anything initialises CUDA."""
    if not gpus:
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank >= len(gpus):
        raise UsageError(f"there are more workers than GPUs: local rank {local_rank}, GPUs {', '.join(gpus)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank]
    return torch.device("cuda", 0)
