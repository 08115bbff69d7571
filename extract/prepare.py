"""Everything before the first row: the cache that is to be filled is begun, or the one that was begun is checked.

All that can be refused is refused here, what is cheap to find first, and nothing is written before the last of it.
"""

import platform
import shutil
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from extract.data import read_records
from extract.head import Head, read_head
from extract.identity import TEMPLATE_FILE, check_identity, compute_identity, tokenizer_files
from extract.job import Job
from extract.sizes import cache_bytes, shards_bytes
from extract.target import Architecture, check_mask_token, read_architecture
from extract.tokenise import Encoder, Limits, tokenise
from shards.manifest import MANIFEST_FILE, Identity, Manifest, Plan
from shards.plan import make_plan
from shards.room import require_room
from shards.schema import PLAN_DIRECTORY, TARGET_DIRECTORY, PlanArrays, missing_shards
from shards.writer import check_vacant, new_cache, publish_cache

COPIED_FILES = ("config.json", "generation_config.json", TEMPLATE_FILE)  # and the tokenizer's
ROOM_ADVICE = "name another --cache, or take fewer layers or documents"
SOFTWARE = ("torch", "transformers", "tokenizers", "numpy", "zarr", "numcodecs")


def prepare(job: Job) -> Manifest:
    """Begin the cache, or make sure that the one that was begun is of this target, this data and this configuration."""
    is_begun = (job.directory / MANIFEST_FILE).exists()
    if not is_begun:
        check_vacant(job.directory)
    architecture = read_architecture(job.target, job.cache)
    encoder = Encoder.load(architecture.folder)
    check_mask_token(job.target, encoder)
    return _resume(job, encoder) if is_begun else _begin(job, architecture, encoder)


def plan_rows(job: Job, encoder: Encoder) -> tuple[Plan, PlanArrays]:
    """Tokenise the data and lay it into rows."""
    limits = Limits(
        row_tokens=job.cache.row_tokens,
        over_length=job.data.over_length,
        mask_token_id=job.target.mask_token_id,
        vocab_size=job.target.vocab_size,
    )
    records = islice(read_records(job.data.files), job.data.max_documents)
    return make_plan(tokenise(records, encoder, limits), job.target, job.data, job.cache)


def _resume(job: Job, encoder: Encoder) -> Manifest:
    manifest = Manifest.read(job.directory)
    manifest.check_config(job.target, job.data, job.cache, job.directory)
    missing = missing_shards(job.directory, manifest)
    require_room(job.directory, shards_bytes(job.target, job.cache, manifest.plan, missing), advice=ROOM_ADVICE)
    check_identity(manifest.identity, _identity(job, encoder), job.directory)
    print(f"extract: {len(missing)} of {manifest.plan.num_shards} shards are missing", flush=True)
    return manifest


def _begin(job: Job, architecture: Architecture, encoder: Encoder) -> Manifest:
    print("extract: tokenising and packing", flush=True)
    plan, arrays = plan_rows(job, encoder)
    require_room(job.directory, cache_bytes(job.target, job.cache, plan), advice=ROOM_ADVICE)
    manifest = Manifest(
        target=job.target,
        data=job.data,
        cache=job.cache,
        identity=_identity(job, encoder),
        plan=plan,
        checksums={},  # known once the files are written
        software={"python": platform.python_version()} | {name: version(name) for name in SOFTWARE},
    )
    head = read_head(architecture)
    with new_cache(job.directory) as staging:
        arrays.write(staging / PLAN_DIRECTORY)
        _write_target(architecture.folder, head, encoder, staging)
        return publish_cache(job.directory, staging, manifest)


def _identity(job: Job, encoder: Encoder) -> Identity:
    print(f"extract: hashing {job.target.path} and the data", flush=True)
    return compute_identity(Path(job.target.path), encoder.tokenizer, job.data.files)


def _write_target(folder: Path, head: Head, encoder: Encoder, staging: Path) -> None:
    head.write(staging)
    for path in [*(folder / name for name in COPIED_FILES), *tokenizer_files(folder, encoder.tokenizer)]:
        if path.is_file():
            shutil.copyfile(path, staging / TARGET_DIRECTORY / path.name)
