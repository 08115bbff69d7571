"""Everything before the first row: the cache that is to be filled is begun, or the one that was begun is checked.

All that can be refused is refused here, what is cheap to find first, and nothing is written before the last of it.
"""

import json
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

from extract.head import Head, read_head
from extract.identity import TEMPLATE_FILE, compute_identity, tokenizer_files
from extract.job import Job
from extract.planning import Planned
from extract.sizes import cache_bytes, shards_bytes
from extract.sources import check_sources, file_states, remember_sources
from extract.target import Architecture, check_mask_token, read_architecture
from extract.tokenise import Encoder
from shards.errors import CacheError
from shards.manifest import Identity, Manifest
from shards.record import count_quarantined
from shards.room import existing_parent, require_room
from shards.schema import PLAN_DIRECTORY, TARGET_DIRECTORY, missing_shards
from shards.verify import check_file
from shards.writer import check_vacant, new_cache, publish_cache

LEFT_OUT_FILE = "left_out.jsonl"  # below plan/: the records that have no place, where they lie, and why
COPIED_FILES = ("config.json", "generation_config.json", TEMPLATE_FILE)  # and the tokenizer's
ROOM_ADVICE = "name another --cache, or take fewer layers or documents"
SOFTWARE = ("torch", "transformers", "tokenizers", "numpy", "zarr", "numcodecs")


def prepare(job: Job) -> Manifest:
    """Begin the cache, or make sure that the one that was begun is of this target, this data and this configuration."""
    manifest = job.read_manifest()
    if manifest is None:
        check_vacant(job.directory)
    architecture = read_architecture(job.target, job.cache)
    return _resume(job, manifest) if manifest else _begin(job, architecture)


def _resume(job: Job, manifest: Manifest) -> Manifest:
    missing = missing_shards(job.directory, manifest)
    require_room(job.directory, shards_bytes(job.target, job.cache, manifest.plan, missing), advice=ROOM_ADVICE)
    _check_whole(job.directory, manifest)
    check_sources(job, manifest)
    print(f"extract: {len(missing)} of {manifest.plan.num_shards} shards are missing", flush=True)
    return manifest


def _check_whole(cache: Path, manifest: Manifest) -> None:
    """Raise CacheError if the plan is not as it was written, or a published shard has no record that can be read."""
    try:
        for name, sha256 in manifest.checksums.items():
            if name.startswith(PLAN_DIRECTORY):
                check_file(cache, name, sha256)
    except CacheError as error:
        raise CacheError(f"{cache} is damaged: {error}; remove the cache, or extract into another directory") from None
    try:
        count_quarantined(cache, manifest)
    except CacheError as error:
        raise CacheError(
            f"{cache} is damaged: {error}; `python -m shards repair {cache}` sets it aside, then run the same command"
        ) from None


def _begin(job: Job, architecture: Architecture) -> Manifest:
    encoder = Encoder.load(architecture.folder, job.data.chat_template_kwargs)
    check_mask_token(job.target, encoder)
    states = file_states(job)  # before their content is read: what changes after that is hashed again
    print("extract: tokenising and packing", flush=True)
    disk = existing_parent(job.directory)
    planned = Planned(job, encoder, directory=disk)
    require_room(job.directory, cache_bytes(job.target, job.cache, planned.plan), advice=ROOM_ADVICE)
    manifest = Manifest(
        target=job.target,
        data=job.data,
        cache=job.cache,
        identity=_identity(job, encoder),
        plan=planned.plan,
        checksums={},  # known once the files are written
        software={"python": platform.python_version()} | {name: version(name) for name in SOFTWARE},
    )
    head = read_head(architecture)
    with new_cache(job.directory) as staging:
        planned.layout.arrays(planned.tokenised, disk).write(staging / PLAN_DIRECTORY)
        with open(staging / PLAN_DIRECTORY / LEFT_OUT_FILE, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(left_out, sort_keys=True) + "\n" for left_out in planned.left_out())
        _write_target(architecture.folder, head, encoder, staging)
        manifest = publish_cache(job.directory, staging, manifest)
    remember_sources(job, manifest, states)
    return manifest


def _identity(job: Job, encoder: Encoder) -> Identity:
    print(f"extract: hashing {job.target.path} and the data", flush=True)
    return compute_identity(Path(job.target.path), encoder.tokenizer, job.data.files)


def _write_target(folder: Path, head: Head, encoder: Encoder, staging: Path) -> None:
    head.write(staging)
    for path in [*(folder / name for name in COPIED_FILES), *tokenizer_files(folder, encoder.tokenizer)]:
        if path.is_file():
            shutil.copyfile(path, staging / TARGET_DIRECTORY / path.name)
