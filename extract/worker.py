"""One worker: one process with one device, which makes the shards it is given.

What the target computes and what is stored of it go on at the same time, a few rows apart: memory holds these, never a
shard.
"""

import collections
import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from extract.capture import capture_row
from extract.job import Job
from extract.progress import Progress
from extract.target import Target, read_architecture
from shards.errors import UsageError
from shards.manifest import Manifest
from shards.schema import PLAN_DIRECTORY, PlanArrays
from shards.writer import ShardRow, write_shard

ROWS_AHEAD = 2  # in memory beside the one that is being stored


def work(job: Job, missing: Sequence[int], gpus: Sequence[str]) -> None:
    """Make every W-th shard of `missing`, as the one of W workers that the launcher's environment describes.

    `gpus` are those of this machine's workers, as CUDA_VISIBLE_DEVICES names them; without any, the CPU is used.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _claim_device(gpus)
    manifest = Manifest.read(job.directory)
    if shards := missing[rank::world_size]:
        target = Target.load(read_architecture(job.target, job.cache), job.cache, device)
        plan = PlanArrays.read(job.directory / PLAN_DIRECTORY)
        with Progress(job.directory, manifest, plan, is_shown=rank == 0) as progress:
            make_shards(job, manifest, plan, target, shards, progress)


def make_shards(
    job: Job, manifest: Manifest, plan: PlanArrays, target: Target, shards: Sequence[int], progress: Progress
) -> None:
    """Run the rows of `shards` through the target and publish them."""

    def capture() -> Iterator[ShardRow]:
        for shard in shards:
            for num_rows, row in enumerate(manifest.plan.shard_rows(shard), start=1):
                slots = plan.row_arrays(row, job.cache.row_tokens)
                yield capture_row(target, row, slots, codec=job.cache.codec)
                progress.update(shard, num_rows)

    with contextlib.closing(ahead(capture())) as rows:
        for shard in shards:
            own = itertools.islice(rows, len(manifest.plan.shard_rows(shard)))
            write_shard(job.directory, manifest, shard, own)
            collections.deque(own, maxlen=0)  # of a shard that was there already, nobody looked at them


def ahead(rows: Iterator[ShardRow]) -> Iterator[ShardRow]:
    """`rows`, of which a thread of its own makes the next ones while the caller stores what it has.

    So neither target nor disk waits while the other is busy, also between shards, when a disk takes longest.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        try:
            coming = collections.deque(thread.submit(next, rows, None) for _ in range(ROWS_AHEAD))
            while (row := coming.popleft().result()) is not None:
                coming.append(thread.submit(next, rows, None))
                yield row
        finally:
            thread.shutdown(cancel_futures=True)


def _claim_device(gpus: Sequence[str]) -> torch.device:
    """Let this process see its own GPU only; to be called before anything initialises CUDA."""
    if not gpus:
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank >= len(gpus):
        raise UsageError(f"there are more workers than GPUs: local rank {local_rank}, GPUs {', '.join(gpus)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank]
    return torch.device("cuda", 0)
