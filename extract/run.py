"""One extraction, from configuration to complete cache. Reads as the method; the parts are in the other modules."""

import contextlib
from datetime import timedelta

import torch.distributed as dist

from extract.job import Job
from extract.launch import find_gpus, launch, stop_with_launcher
from extract.lock import sole_extraction
from extract.prepare import prepare
from extract.sizes import describe_plan
from extract.worker import work
from shards.errors import Interrupted, RunError
from shards.manifest import Manifest
from shards.record import count_quarantined
from shards.schema import missing_shards, published_shards
from shards.writer import mark_complete

PLANNING_LIMIT = timedelta(days=1)  # how long the other ranks wait while the first one plans


def extract(job: Job) -> None:
    """Do all that is missing of the cache, with one worker for each GPU of this machine."""
    gpus = find_gpus(job.extract)
    with sole_extraction(job.directory):
        manifest = prepare(job)
        print(f"extract: {describe_plan(manifest.plan, job.cache.row_tokens)}", flush=True)
        try:
            if missing := missing_shards(job.directory, manifest):
                launch(job, missing, gpus)
            is_complete = finish(job)
        except KeyboardInterrupt:
            raise Interrupted(describe_interrupt(job, manifest)) from None
        if not is_complete:
            raise RunError(f"{job.directory} still lacks shards: run the same command again")


def describe_interrupt(job: Job, manifest: Manifest) -> str:
    """What there is of the cache, and how to go on."""
    num_shards, kept = manifest.plan.num_shards, len(published_shards(job.directory, manifest))
    return f"stopped: {kept:,} of {num_shards:,} shards are kept in {job.directory}, the same command goes on"


def extract_as_worker(job: Job) -> None:
    """The same under `torchrun`, on one machine or several that share a disk: the first rank plans for all."""
    stop_with_launcher()
    gpus = find_gpus(job.extract)
    dist.init_process_group("gloo", timeout=PLANNING_LIMIT)
    missing: list[list[int]] = [[]]
    with contextlib.ExitStack() as held:
        if dist.get_rank() == 0:
            held.enter_context(sole_extraction(job.directory))
            missing = [missing_shards(job.directory, prepare(job))]
        dist.broadcast_object_list(missing)
        dist.destroy_process_group()
        work(job, missing[0], gpus)
    finish(job)  # by whoever comes last


def finish(job: Job) -> bool:
    """Mark the cache complete if every shard is there; say whether it is so, and what can't be trained on.

    Raises RunError if that is every document: then the cache stays unfinished, and nobody trains on it.
    """
    manifest = Manifest.read(job.directory)
    if missing_shards(job.directory, manifest):
        return False
    num_documents, num_quarantined = manifest.plan.num_documents, count_quarantined(job.directory, manifest)
    if num_quarantined == num_documents:
        raise RunError(
            f"all {num_documents:,} documents of {job.directory} are in quarantine, because the target gives values "
            "that are not finite: see layers and positions in each shard.json, and check target.path and target.dtype"
        )
    if num_quarantined:
        print(
            f"extract: {num_quarantined:,} of {num_documents:,} documents are in quarantine, because the target gives "
            "values that are not finite: nothing is trained on them, each shard.json names its own",
            flush=True,
        )
    mark_complete(job.directory, manifest)
    print(f"{job.directory} is complete: {manifest.plan.num_shards} shards", flush=True)
    return True
