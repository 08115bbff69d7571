"""`python -m shards merge`: several caches as one.

All must be of the same thing: the same target, tokenizer, template, configuration and, unless it is said that they are
not, the same data. The training rows of all come first, in the order of the sources, then the held-out rows; no row
changes but its number.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from shards.config import to_json
from shards.derive import Blueprint, check_outside, make_cache
from shards.documents import MAX_SOURCES
from shards.errors import UsageError
from shards.manifest import NOT_IDENTITY, Manifest
from shards.source import Places, Source, SourceDocuments, plan_sizes


def merge(destination: Path, caches: Sequence[Path], *, different_data: bool) -> dict[str, Any]:
    """Make `destination` from `caches`; return what `--json` prints."""
    if len(caches) < 2:
        raise UsageError("merge needs at least two caches to merge")
    for cache in caches:
        check_outside(destination, cache)
    manifests = [Manifest.read(cache) for cache in caches]
    for cache, manifest in zip(caches[1:], manifests[1:], strict=True):
        _check_same(caches[0], manifests[0], cache, manifest, different_data=different_data)
    sources = [Source.open(cache) for cache in caches]
    names = tuple(sorted({name for manifest in manifests for name in manifest.plan.sources}))
    if len(names) > MAX_SOURCES:
        raise UsageError(f"the caches have {len(names)} sources together, at most {MAX_SOURCES} are possible")
    places = _places(sources, names)
    manifest = _merged(manifests, places, names)
    blueprint = Blueprint(
        manifest=manifest,
        plan=places.plan,
        target=caches[0],
        open_documents=lambda: SourceDocuments(sources, places, manifest.cache),
    )
    made = make_cache(destination, blueprint).to_json()
    return made | {"repeated_documents": _count_repeated(places) if not different_data else None}


def _check_same(first: Path, one: Manifest, second: Path, other: Manifest, *, different_data: bool) -> None:
    """Raise UsageError naming the first thing in which two caches are not of the same."""
    differ = [
        (f"{section}.{key}", value, to_json(getattr(other, section))[key])
        for section in ("target", "data", "cache", "identity")
        for key, value in to_json(getattr(one, section)).items()
        if f"{section}.{key}" not in NOT_IDENTITY
        if not (different_data and (section, key) == ("identity", "data"))
        if to_json(getattr(other, section))[key] != value
    ]
    if differ:
        key, value, other_value = differ[0]
        advice = "; --different-data merges caches of different data" if key == "identity.data" else ""
        raise UsageError(
            f"{first} and {second} are not of the same thing: {key} is {value!r} and {other_value!r}{advice}"
        )


def _places(sources: Sequence[Source], names: tuple[str, ...]) -> Places:
    num_train_rows = [source.manifest.plan.num_train_rows for source in sources]
    num_heldout_rows = [source.manifest.plan.num_rows - source.manifest.plan.num_train_rows for source in sources]
    first_train = np.concatenate([[0], np.cumsum(num_train_rows)])
    first_heldout = first_train[-1] + np.concatenate([[0], np.cumsum(num_heldout_rows)])
    rows = [
        np.where(
            source.plan.document_row < num_train_rows[i],
            source.plan.document_row + first_train[i],
            source.plan.document_row - num_train_rows[i] + first_heldout[i],
        )
        for i, source in enumerate(sources)
    ]
    sizes = [len(of_source) for of_source in rows]
    return Places.lay_out(
        [source.plan for source in sources],
        np.repeat(np.arange(len(sources)), sizes),
        np.concatenate([np.arange(size) for size in sizes]),
        np.concatenate(rows),
        np.concatenate([source.plan.document_start for source in sources]),
        [np.array([names.index(name) for name in source.manifest.plan.sources]) for source in sources],
    )


def _merged(manifests: Sequence[Manifest], places: Places, names: tuple[str, ...]) -> Manifest:
    first = manifests[0]
    reasons = sorted({reason for manifest in manifests for reason in manifest.plan.num_left_out})
    plan = plan_sizes(
        places.plan,
        rows_per_shard=first.plan.rows_per_shard,
        sources=names,
        num_left_out={reason: sum(m.plan.num_left_out.get(reason, 0) for m in manifests) for reason in reasons},
        num_truncated=sum(manifest.plan.num_truncated for manifest in manifests),
    )
    steps = dict.fromkeys(step for manifest in manifests for step in manifest.history)
    seals = ", ".join(manifest.seal[:16] for manifest in manifests)
    return replace(
        first,
        data=replace(first.data, files=tuple(dict.fromkeys(file for m in manifests for file in m.data.files))),
        identity=replace(first.identity, data=_data_hash([manifest.identity.data for manifest in manifests])),
        plan=plan,
        history=(*steps, f"merged from sources {seals}"),
    )


def _data_hash(hashes: Sequence[str]) -> str:
    """Of the data of all: that of one where they are the same, else the hash of the different ones in their order."""
    different = list(dict.fromkeys(hashes))
    return different[0] if len(different) == 1 else sha256("".join(f"{h}\n" for h in different).encode()).hexdigest()


def _count_repeated(places: Places) -> int:
    """Documents of the same data that come from more than one source: they will be trained on as often."""
    records = places.plan.document_record
    return len(records) - len(np.unique(records))
