"""`python -m extract plan`: what the data comes to, and what a cache of it would weigh and take. Writes nothing.

The data is tokenised and packed as an extraction would, but for the tokens, which are not kept. No weights are read.
"""

import contextlib
import dataclasses
import json
from typing import Any

import numpy as np

from extract.job import Job
from extract.planning import Planned
from extract.sizes import cache_bytes, describe_left_out, fill_of, size
from extract.target import check_mask_token, read_architecture
from extract.tokenise import Encoder
from shards.codec import CODECS
from shards.config import CacheConfig, check_codec
from shards.errors import UsageError
from shards.plan import rows_per_shard
from shards.room import free_bytes

SPLITS = ("train", "heldout")


def plan(job: Job, *, worker_tokens_per_s: float, as_json: bool) -> None:
    """Print the figures, reckoning with workers of the given speed."""
    encoder = Encoder.load(read_architecture(job.target, job.cache).folder, job.data.chat_template_kwargs)
    check_mask_token(job.target, encoder)
    planned = Planned(job, encoder, directory=None)
    figures = figures_of(job, planned, worker_tokens_per_s)
    print(json.dumps(figures, indent=1) if as_json else _format(job, figures))


def figures_of(job: Job, planned: Planned, worker_tokens_per_s: float) -> dict[str, Any]:
    """The figures, by their stable names."""
    plan, tokenised = planned.plan, planned.tokenised
    is_heldout = np.empty(len(tokenised), np.uint8)
    is_heldout[planned.layout.document] = planned.layout.row >= plan.num_train_rows
    tokens_per_s = worker_tokens_per_s * len(job.extract.gpus or [0])
    return {
        "documents": plan.num_documents,
        "tokens": plan.num_tokens,
        "supervised_tokens": plan.num_supervised_tokens,
        "rows": plan.num_rows,
        "row_tokens": job.cache.row_tokens,
        "fill": fill_of(plan, job.cache.row_tokens),
        "shards": plan.num_shards,
        "sources": _counts(planned, tokenised.source, plan.sources),
        "splits": _counts(planned, is_heldout, SPLITS),
        "left_out_documents": plan.num_left_out,
        "truncated_documents": plan.num_truncated,
        "codec": job.cache.codec,
        "bytes": _bytes_by_codec(job, planned),
        "cache": str(job.directory),
        "disk_free_bytes": free_bytes(job.directory),
        "tokens_per_second": tokens_per_s,
        "hours": plan.num_tokens / tokens_per_s / 3600,
    }


def _counts(planned: Planned, group: np.ndarray, names: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Documents and their tokens by the name of the group that each is in."""
    columns = {
        "documents": None,
        "tokens": planned.tokenised.num_tokens,
        "supervised_tokens": planned.tokenised.num_supervised,
    }
    counts = {key: np.bincount(group, column, minlength=len(names)) for key, column in columns.items()}
    return {name: {key: int(count[i]) for key, count in counts.items()} for i, name in enumerate(names)}


def _bytes_by_codec(job: Job, planned: Planned) -> dict[str, int]:
    """Of the whole cache, with each codec that the target's states can have; how far others compress is not known."""
    bytes_by_codec = {}
    for name, codec in CODECS.items():
        cache: CacheConfig = dataclasses.replace(job.cache, codec=name)
        with contextlib.suppress(UsageError):
            check_codec(cache, job.target)
            if not codec.is_compressed:
                plan = dataclasses.replace(planned.plan, rows_per_shard=rows_per_shard(job.target, cache))
                bytes_by_codec[name] = cache_bytes(job.target, cache, plan)
    return bytes_by_codec


def _format(job: Job, figures: dict[str, Any]) -> str:
    """The figures for people."""
    f = figures
    lines = [
        ("documents", _describe_counts(f)),
        *((f"  {name}", _describe_counts(counts)) for name, counts in (f["splits"] | f["sources"]).items()),
        ("rows", f"{f['rows']:,} of {f['row_tokens']:,} slots, {f['fill']:.1%} full, in {f['shards']:,} shards"),
        *(("left out", text) for text in describe_left_out(f["left_out_documents"])),
        *([("truncated", f"{f['truncated_documents']:,}")] if f["truncated_documents"] else []),
        ("bytes", ", ".join(f"{size(num_bytes)} as {codec}" for codec, num_bytes in f["bytes"].items())),
        ("disk", f"{size(f['disk_free_bytes'])} free for {f['cache']}"),
        ("time", f"{f['hours']:,.1f} hours at {f['tokens_per_second']:,.0f} tok/s (--tokens-per-second of one worker)"),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _describe_counts(counts: dict[str, int]) -> str:
    return (
        f"{counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['supervised_tokens']:,} of them "
        "supervised"
    )
