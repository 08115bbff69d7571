"""`python -m shards slice`: a part of a cache as a cache of its own.

Layers, rows and splits are taken as they are: codes are copied, and rows keep their order. Taking sources takes
documents out of their rows, so those that are left are packed anew.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shards.derive import Blueprint, check_outside, make_cache
from shards.errors import UsageError
from shards.manifest import Manifest
from shards.plan import pack
from shards.schema import PlanArrays
from shards.source import Places, Source, SourceDocuments, plan_sizes

SPLITS = ("train", "heldout")  # by document_split


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is taken; None takes all."""

    layers: tuple[str, ...] | None = None  # numbers, and "final" for the final hidden state
    rows: tuple[tuple[int, int], ...] | None = None  # from the first of a pair up to, not including, the second
    sources: tuple[str, ...] | None = None
    split: Literal["train", "heldout"] | None = None

    def __str__(self) -> str:
        rows = self.rows and [f"{start}:{stop}" for start, stop in self.rows]
        parts = {"layers": self.layers, "rows": rows, "sources": self.sources, "split": self.split and [self.split]}
        return "; ".join(f"{name} {','.join(part)}" for name, part in parts.items() if part)


def slice_cache(cache: Path, destination: Path, choice: Choice) -> dict[str, Any]:
    """Make `destination` from `cache`; return what `--json` prints."""
    if not str(choice):
        raise UsageError("all of the cache is no slice: name --layers, --rows, --sources or --split")
    check_outside(destination, cache)
    source = Source.open(cache)
    before = source.manifest
    places = _places(before, source.plan, choice)
    manifest = replace(
        before,
        cache=replace(before.cache, **_layers(before, choice.layers)),
        plan=plan_sizes(
            places.plan,
            rows_per_shard=before.plan.rows_per_shard,
            sources=_kept_sources(before, choice),
            num_left_out=before.plan.num_left_out,
            num_truncated=before.plan.num_truncated,
        ),
        history=(*before.history, f"sliced to {choice}, source {before.seal[:16]}"),
    )
    blueprint = Blueprint(
        manifest=manifest,
        plan=places.plan,
        target=cache,
        open_documents=lambda: SourceDocuments([source], places, manifest.cache),
    )
    return make_cache(destination, blueprint).to_json()


def _layers(manifest: Manifest, names: tuple[str, ...] | None) -> dict[str, Any]:
    """The keys of [cache] that say which states are stored."""
    if names is None:
        return {}
    stored = [*map(str, manifest.cache.layers), *(["final"] if manifest.cache.final_hidden else [])]
    for name in names:
        if name not in stored:
            raise UsageError(f"--layers names {name!r}: the cache has {', '.join(stored)}")
    layers = tuple(layer for layer in manifest.cache.layers if str(layer) in names)
    if not layers:
        raise UsageError(f"--layers must keep at least one of {', '.join(map(str, manifest.cache.layers))}")
    return {"layers": layers, "final_hidden": "final" in names}


def _kept_sources(manifest: Manifest, choice: Choice) -> tuple[str, ...]:
    names = manifest.plan.sources
    return names if choice.sources is None else tuple(name for name in names if name in choice.sources)


def _places(manifest: Manifest, plan: PlanArrays, choice: Choice) -> Places:
    is_taken = np.isin(plan.document_row, _rows(manifest, choice))
    source_ids = np.arange(len(manifest.plan.sources))
    if choice.sources is not None:
        is_wanted = np.array([name in choice.sources for name in manifest.plan.sources])
        for name in choice.sources:
            if name not in manifest.plan.sources:
                raise UsageError(f"--sources names {name!r}: the cache has {', '.join(manifest.plan.sources)}")
        is_taken &= is_wanted[plan.document_source]
        source_ids = np.cumsum(is_wanted) - 1
    documents = np.flatnonzero(is_taken)
    if not len(documents):
        raise UsageError(f"nothing is left of the cache with {choice}")
    rows, starts = plan.document_row[documents], plan.document_start[documents]
    if choice.sources is None:
        rows = np.unique(rows, return_inverse=True)[1]
    else:
        documents, rows, starts = _pack(plan, documents[np.lexsort((starts, rows))], manifest.cache.row_tokens)
    return Places.lay_out([plan], np.zeros_like(documents), documents, rows, starts, [source_ids])


def _rows(manifest: Manifest, choice: Choice) -> np.ndarray:
    """The rows that are taken, ascending."""
    num_rows, num_train_rows = manifest.plan.num_rows, manifest.plan.num_train_rows
    is_taken = np.full(num_rows, choice.rows is None)
    for start, stop in choice.rows or ():
        if not 0 <= start < stop <= num_rows:
            raise UsageError(f"--rows has {start}:{stop}: the cache has rows 0:{num_rows}")
        is_taken[start:stop] = True
    if choice.split is not None:
        is_taken &= (np.arange(num_rows) >= num_train_rows) == (choice.split == "heldout")
    return np.flatnonzero(is_taken)


def _pack(plan: PlanArrays, documents: np.ndarray, row_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lay `documents` into new rows, as whole and as full as extraction does; those for training come first."""
    placed, num_rows = [], 0
    for split in (0, 1):
        own = documents[plan.document_split[documents] == split]
        lengths = plan.document_tokens[own].tolist()
        for row in pack(lengths, row_tokens):
            start = 0
            for i in row:
                placed.append((own[i], num_rows, start))
                start += lengths[i]
            num_rows += 1
    return tuple(np.array(placed, np.int64).T)
