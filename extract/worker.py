"""One worker: one process with one device, which makes the shards it is given, and a second one that writes them."""

import os
from collections.abc import Sequence

import torch

from extract.capture import Capture, RowInFlight
from extract.job import Job
from extract.memory import explained_out_of_memory
from extract.progress import Progress
from extract.storing import Storing
from extract.target import Target, read_architecture
from shards.errors import UsageError
from shards.manifest import Manifest
from shards.schema import PLAN_DIRECTORY, PlanArrays


def work(job: Job, missing: Sequence[int], gpus: Sequence[str]) -> None:
    """Make every W-th shard of `missing`, as the one of W workers that the launcher's environment describes.

    `gpus` are those of this machine's workers, as CUDA_VISIBLE_DEVICES names them; without any, the CPU is used.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _claim_device(gpus)
    manifest = Manifest.read(job.directory)
    if shards := missing[rank::world_size]:
        architecture = read_architecture(job.target, job.cache)
        with (
            Storing(job.directory, manifest, shards, num_workers=world_size) as storing,
            explained_out_of_memory(job, architecture, device),
        ):
            target = Target.load(architecture, job.cache, device)
            if device.type == "cuda":
                storing.page_lock()
            plan = PlanArrays.read(job.directory / PLAN_DIRECTORY)
            with Progress(job.directory, manifest, plan, is_shown=rank == 0) as progress:
                make_shards(job, manifest, plan, target, shards, storing, progress)


def make_shards(
    job: Job,
    manifest: Manifest,
    plan: PlanArrays,
    target: Target,
    shards: Sequence[int],
    storing: Storing,
    progress: Progress,
) -> None:
    """Run the rows of `shards` through the target and have them stored, until they are published."""
    capture = Capture(target, job.cache.codec)
    in_flight: RowInFlight | None = None
    for shard in shards:
        for num_rows, row in enumerate(manifest.plan.shard_rows(shard), start=1):
            slots = plan.row_arrays(row, job.cache.row_tokens)
            if in_flight is not None and storing.is_full:  # what is waited for then is the disk alone
                storing.submit(capture.finish(in_flight))
                in_flight = None
            launched = capture.launch(row, slots, storing.take())
            if in_flight is not None:
                storing.submit(capture.finish(in_flight))
            in_flight = launched
            progress.update(shard, num_rows, waited_s=storing.waited_s)
    if in_flight is not None:
        storing.submit(capture.finish(in_flight))
    storing.finish()


def _claim_device(gpus: Sequence[str]) -> torch.device:
    """Let this process see its own GPU only; to be called before anything initialises CUDA."""
    if not gpus:
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank >= len(gpus):
        raise UsageError(f"there are more workers than GPUs: local rank {local_rank}, GPUs {', '.join(gpus)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank]
    return torch.device("cuda", 0)
