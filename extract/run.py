"""One extraction, from configuration to complete cache. Reads as the method; the parts are in the other modules."""

from datetime import timedelta

import torch.distributed as dist

from extract.check import describe_plan
from extract.job import Job
from extract.launch import find_gpus, launch
from extract.prepare import prepare
from extract.worker import work
from shards.errors import RunError
from shards.schema import missing_shards
from shards.writer import mark_complete

PLANNING_LIMIT = timedelta(days=1)  # how long the other ranks wait while the first one plans


def extract(job: Job) -> None:
    """Do all that is missing of the cache, with one worker for each GPU of this machine."""
    gpus = find_gpus(job.extract)
    manifest = prepare(job)
    print(f"extract: {describe_plan(manifest.plan, job.cache.row_tokens)}", flush=True)
    if missing := missing_shards(job.directory, manifest):
        launch(job, missing, gpus)
    if not mark_complete(job.directory, manifest):
        raise RunError(f"{job.directory} still lacks shards: run the same command again")
    print(f"{job.directory} is complete: {manifest.plan.num_shards} shards")


def extract_as_worker(job: Job) -> None:
    """The same under `torchrun`, on one machine or several that share a disk: the first rank plans for all."""
    gpus = find_gpus(job.extract)
    dist.init_process_group("gloo", timeout=PLANNING_LIMIT)
    missing: list[list[int]] = [[]]
    if dist.get_rank() == 0:
        missing = [missing_shards(job.directory, prepare(job))]
    dist.broadcast_object_list(missing)
    dist.destroy_process_group()
    work(job, missing[0], gpus)
