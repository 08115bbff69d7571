"""What a cache holds, in figures: `python -m shards stats`.

From the manifest, the plan's columns and each shard's shard.json only, so it takes no longer on a cache of terabytes.
Figures of the plan (rows, documents, tokens, sources) are of the whole plan; bytes, layers and documents in quarantine
are of the shards that are published.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from shards.completeness import cache_state, describe_incomplete
from shards.manifest import Manifest
from shards.record import ShardRecord
from shards.schema import (
    PLAN_DIRECTORY,
    SHARD_FILE,
    TARGET_DIRECTORY,
    PlanArrays,
    hidden_name,
    published_shards,
    shard_name,
)


def cache_statistics(cache: Path) -> dict[str, Any]:
    """The figures, by the keys that `--json` prints. Raises CacheError if a part they come from is damaged."""
    manifest = Manifest.read(cache)
    plan = PlanArrays.read(cache / PLAN_DIRECTORY)
    plan.check(manifest.plan)
    published = sorted(published_shards(cache, manifest))
    records = [ShardRecord.read(cache, manifest, shard) for shard in published]
    sizes = manifest.plan
    num_bytes = sum(_shard_bytes(cache / shard_name(record.shard), record) for record in records)
    num_slots = sum(len(sizes.shard_rows(shard)) for shard in published) * manifest.cache.row_tokens
    return {
        "target": manifest.target.path,
        "hidden_size": manifest.target.hidden_size,
        "target_layer_ids": list(manifest.cache.layers),
        "codec": manifest.cache.codec,
        "shards": len(published),
        "planned_shards": sizes.num_shards,
        "state": cache_state(cache, sizes.num_shards - len(published)),
        "rows": sizes.num_rows,
        "row_tokens": manifest.cache.row_tokens,
        "documents": sizes.num_documents,
        "quarantined_documents": sum(len(record.quarantined) for record in records),
        "tokens": sizes.num_tokens,
        "supervised_tokens": sizes.num_supervised_tokens,
        "fill": _ratio(sizes.num_tokens, sizes.num_rows * manifest.cache.row_tokens),
        "bytes": num_bytes,
        "bytes_per_slot": _ratio(num_bytes, num_slots),
        "bytes_per_token": _ratio(num_bytes, _tokens_in_shards(manifest, plan, published)),
        "target_bytes": _directory_bytes(cache / TARGET_DIRECTORY),
        "plan_bytes": _directory_bytes(cache / PLAN_DIRECTORY),
        "sources": _tokens_by_source(manifest, plan),
        "layers": {str(layer): combine(records, hidden_name(layer)) for layer in manifest.cache.layers},
    }


def format_statistics(statistics: dict[str, Any]) -> str:
    """The same figures as a table for people, without those of shards where there is none."""
    s = statistics
    quarantined = f", {s['quarantined_documents']:,} in quarantine" if s["quarantined_documents"] else ""
    size = f"{s['bytes']:,}, {s['bytes_per_slot']:,.1f} a slot, {s['bytes_per_token']:,.1f} a token"
    of_layers = [
        (f"layer {layer}", f"rms {of['rms']:.4g}, largest {of['max_abs']:.4g}") for layer, of in s["layers"].items()
    ]
    lines = [
        ("target", f"{s['target']}, hidden size {s['hidden_size']:,}"),
        ("codec", s["codec"]),
        ("shards", f"{s['shards']:,} of {s['planned_shards']:,}"),
        ("rows", f"{s['rows']:,} of {s['row_tokens']:,} tokens, {s['fill']:.2%} full"),
        ("documents", f"{s['documents']:,}{quarantined}"),
        ("tokens", f"{s['tokens']:,}, {s['supervised_tokens']:,} supervised"),
        *((f"  {source}", f"{tokens:,}") for source, tokens in s["sources"].items()),
        *([("bytes", size)] if s["shards"] else []),
        ("besides", f"{s['target_bytes']:,} bytes in target/, {s['plan_bytes']:,} in plan/"),
        *(of_layers if s["shards"] else []),
    ]
    width = max(len(name) for name, _ in lines)
    complete = s["state"] == "complete"
    heading = [] if complete else [describe_incomplete(s["state"], s["shards"], s["planned_shards"])]
    return "\n".join(heading + [f"{name:<{width}}  {value}" for name, value in lines])


def _shard_bytes(directory: Path, record: ShardRecord) -> int:
    return sum(file.bytes for file in record.files.values()) + (directory / SHARD_FILE).stat().st_size


def _directory_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _tokens_in_shards(manifest: Manifest, plan: PlanArrays, shards: list[int]) -> int:
    shard_of_document = plan.document_row // manifest.plan.rows_per_shard
    tokens_by_shard = np.bincount(shard_of_document, plan.document_tokens, minlength=manifest.plan.num_shards)
    return int(tokens_by_shard[shards].sum())


def _tokens_by_source(manifest: Manifest, plan: PlanArrays) -> dict[str, int]:
    tokens = np.bincount(plan.document_source, plan.document_tokens, minlength=len(manifest.plan.sources))
    return {source: int(tokens[source_id]) for source_id, source in enumerate(manifest.plan.sources)}


def combine(records: list[ShardRecord], name: str) -> dict[str, float]:
    """The statistics of one array over all shards, each weighted by the tokens it measured."""
    num_tokens = sum(record.num_measured_tokens for record in records)
    of_shards = [(record.num_measured_tokens, record.statistics[name]) for record in records]
    mean_square = _ratio(sum(tokens * of.rms**2 for tokens, of in of_shards), num_tokens)
    return {"rms": math.sqrt(mean_square), "max_abs": max((of.max_abs for _, of in of_shards), default=0.0)}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
