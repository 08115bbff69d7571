"""`python -m shards ls`: the caches of a directory, or the shards of a cache, a line for each."""

from pathlib import Path
from typing import Any

import numpy as np

from shards.completeness import cache_state, describe_incomplete
from shards.errors import CacheError, UsageError
from shards.manifest import MANIFEST_FILE, Manifest
from shards.record import ShardRecord
from shards.schema import PLAN_DIRECTORY, SHARD_FILE, PlanArrays, published_shards, shard_name


def list_path(path: Path) -> dict[str, Any]:
    """What `--json` prints: the shards of the cache at `path`, or the caches in it."""
    if (path / MANIFEST_FILE).exists():
        return list_shards(path)
    try:
        found = sorted(directory for directory in path.iterdir() if (directory / MANIFEST_FILE).is_file())
    except OSError as error:
        raise UsageError(f"{path} can't be listed: {error.strerror}") from None
    return {"caches": [_cache(directory) for directory in found]}


def list_shards(cache: Path) -> dict[str, Any]:
    manifest = Manifest.read(cache)
    plan = PlanArrays.read(cache / PLAN_DIRECTORY)
    plan.check(manifest.plan)
    shard_of_document = plan.document_row // manifest.plan.rows_per_shard
    documents = np.bincount(shard_of_document, minlength=manifest.plan.num_shards)
    tokens = np.bincount(shard_of_document, plan.document_tokens, minlength=manifest.plan.num_shards)
    published = published_shards(cache, manifest)
    shards = []
    for shard in range(manifest.plan.num_shards):
        rows = manifest.plan.shard_rows(shard)
        shards.append(
            {
                "shard": shard_name(shard),
                "first_row": rows.start,
                "rows": len(rows),
                "documents": int(documents[shard]),
                "tokens": int(tokens[shard]),
                **(_record(cache, manifest, shard) if shard in published else {"state": "missing"}),
            }
        )
    state = cache_state(cache, manifest.plan.num_shards - len(published))
    return {"history": list(manifest.history), "state": state, "shards": shards}


def format_list(listed: dict[str, Any]) -> list[str]:
    """The same for people."""
    if "caches" in listed:
        return _columns([_cache_line(entry) for entry in listed["caches"]]) or ["no caches here"]
    shards, notes = listed["shards"], list(listed["history"])
    if listed["state"] != "complete":
        num_there = sum(entry["state"] != "missing" for entry in shards)
        notes.append(describe_incomplete(listed["state"], num_there, len(shards)))
    return [f"# {note}" for note in notes] + _columns([_shard_line(entry) for entry in shards])


def _record(cache: Path, manifest: Manifest, shard: int) -> dict[str, Any]:
    try:
        record = ShardRecord.read(cache, manifest, shard)
    except CacheError as error:
        return {"state": f"damaged: {error}"}
    own_bytes = (cache / shard_name(shard) / SHARD_FILE).stat().st_size
    return {
        "state": "published",
        "bytes": sum(file.bytes for file in record.files.values()) + own_bytes,
        "quarantined_documents": len(record.quarantined),
    }


def _cache(directory: Path) -> dict[str, Any]:
    try:
        manifest = Manifest.read(directory)
    except CacheError as error:
        return {"cache": str(directory), "state": f"damaged: {error}"}
    num_published = len(published_shards(directory, manifest))
    return {
        "cache": str(directory),
        "state": cache_state(directory, manifest.plan.num_shards - num_published),
        "target": manifest.target.path,
        "codec": manifest.cache.codec,
        "target_layer_ids": list(manifest.cache.layers),
        "rows": manifest.plan.num_rows,
        "row_tokens": manifest.cache.row_tokens,
        "tokens": manifest.plan.num_tokens,
        "shards": num_published,
        "planned_shards": manifest.plan.num_shards,
    }


def _cache_line(entry: dict[str, Any]) -> list[str]:
    if "target" not in entry:
        return [entry["cache"], entry["state"]]
    return [
        entry["cache"],
        entry["state"],
        f"{entry['shards']}/{entry['planned_shards']} shards",
        f"{entry['tokens']:,} tokens",
        f"{entry['rows']:,}×{entry['row_tokens']:,}",
        entry["codec"],
        f"layers {','.join(map(str, entry['target_layer_ids']))}",
        entry["target"],
    ]


def _shard_line(entry: dict[str, Any]) -> list[str]:
    rows = f"rows {entry['first_row']}:{entry['first_row'] + entry['rows']}"
    line = [entry["shard"], rows, f"{entry['documents']:,} documents", f"{entry['tokens']:,} tokens"]
    if "bytes" not in entry:
        return [*line, entry["state"]]
    quarantined = entry["quarantined_documents"]
    return [*line, f"{entry['bytes']:,} bytes", *([f"{quarantined:,} in quarantine"] if quarantined else [])]


def _columns(lines: list[list[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(max(map(len, lines), default=0))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines]
