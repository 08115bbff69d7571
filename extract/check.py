"""`python -m extract --check`: what an extraction would make and need. Touches no GPU and no weights, writes nothing.

A cache that was begun must be of the same configuration, data and tokenizer; what is there of it is told. Where the
data or the target is not there yet, figures are given for a million tokens instead of for the plan.
"""

import json
from typing import Any

from extract.files import absent
from extract.job import Job
from extract.sizes import bytes_per_slot, cache_bytes, describe_plan, fill_of, size, target_bytes
from extract.sources import check_sources
from shards.manifest import Plan
from shards.room import free_bytes
from shards.schema import published_shards
from shards.writer import check_vacant

ASSUMED_FILL = 0.98  # of rows that are not planned yet
MILLION = 1_000_000


def check(job: Job, *, worker_tokens_per_s: float, as_json: bool) -> None:
    """Print the resolved plan, reckoning with workers of the given speed."""
    manifest = job.read_manifest()
    if manifest:
        check_sources(job, manifest, needed=False, weights=False)
    else:
        check_vacant(job.directory)
    plan = manifest.plan if manifest else _plan(job)
    figures = plan_figures(job, plan, worker_tokens_per_s)
    if manifest:
        figures["published_shards"] = len(published_shards(job.directory, manifest))
    print(json.dumps(figures, indent=1) if as_json else _format(job, plan, figures))


def plan_figures(job: Job, plan: Plan | None, worker_tokens_per_s: float) -> dict[str, Any]:
    """The figures, by their stable names."""
    fill = fill_of(plan, job.cache.row_tokens) if plan else ASSUMED_FILL
    slot_bytes = bytes_per_slot(job.target, job.cache)
    num_workers = len(job.extract.gpus or [0])
    figures = {
        "cache": str(job.directory),
        "row_tokens": job.cache.row_tokens,
        "target_layer_ids": list(job.cache.layers),
        "codec": job.cache.codec,
        "fill": fill,
        "bytes_per_slot": slot_bytes,
        "bytes_per_token": slot_bytes / fill,
        "bytes_per_million_tokens": round(MILLION * slot_bytes / fill),
        "target_bytes": target_bytes(job.target),
        "disk_free_bytes": free_bytes(job.directory),
        "workers": num_workers,
        "tokens_per_second": num_workers * worker_tokens_per_s,
        "disk_write_bytes_per_second": round(num_workers * worker_tokens_per_s * slot_bytes / fill),
    }
    if plan is None:
        return figures
    return figures | {
        "rows": plan.num_rows,
        "train_rows": plan.num_train_rows,
        "shards": plan.num_shards,
        "documents": plan.num_documents,
        "heldout_documents": plan.num_heldout_documents,
        "truncated_documents": plan.num_truncated,
        "left_out_documents": plan.num_left_out,
        "tokens": plan.num_tokens,
        "supervised_tokens": plan.num_supervised_tokens,
        "total_bytes": cache_bytes(job.target, job.cache, plan),
    }


def _plan(job: Job) -> Plan | None:
    """The plan, if what it is made from is there."""
    if _absent(job):
        return None
    from extract.planning import Planned  # imports transformers, which the figures alone don't need
    from extract.target import check_mask_token, read_architecture
    from extract.tokenise import Encoder

    encoder = Encoder.load(read_architecture(job.target, job.cache).folder, job.data.chat_template_kwargs)
    check_mask_token(job.target, encoder)
    return Planned(job, encoder, directory=None).plan


def _absent(job: Job) -> list[str]:
    return absent([job.target.path, *job.data.files])


def _format(job: Job, plan: Plan | None, figures: dict[str, Any]) -> str:
    """The figures for people."""
    target, cache, f = job.target, job.cache, figures
    if plan:
        planned, needed = describe_plan(plan, cache.row_tokens), size(f["total_bytes"])
    else:
        missing = _absent(job)
        planned = f"none yet: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        needed = f"{size(f['bytes_per_million_tokens'])} for a million tokens, and {size(f['target_bytes'])} once"
    workers = f"{f['workers']} × {f['tokens_per_second'] / f['workers']:,.0f}"
    there = f"{f['published_shards']:,} of {f['shards']:,} shards" if "published_shards" in f else "nothing yet"
    lines = {
        "target": f"{target.path}: {target.num_layers} layers, hidden size {target.hidden_size}, {target.dtype}",
        "stored": f"layers {list(cache.layers)} as {cache.codec}, in rows of {cache.row_tokens} tokens",
        "plan": planned,
        "there": f"{there} in {job.directory}",
        "bytes": f"{f['bytes_per_slot']:,} a slot, {f['bytes_per_token']:,.0f} a token at {f['fill']:.1%} fill",
        "disk": f"{needed}; {size(f['disk_free_bytes'])} free for {job.directory}",
        "speed": f"if targets run at {f['tokens_per_second']:,.0f} tok/s ({workers}; --tokens-per-second sets it), "
        f"the disk must write {size(f['disk_write_bytes_per_second'])}/s",
    }
    return "\n".join(f"{name:<7} {text}" for name, text in lines.items())
