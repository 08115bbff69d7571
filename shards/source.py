"""Caches that a tool reads from: what is checked of them before, and the states of their documents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from shards.config import CacheConfig
from shards.derive import States
from shards.errors import CacheError
from shards.manifest import Manifest, Plan
from shards.reader import CacheReader
from shards.record import Quarantined, ShardRecord
from shards.schema import PLAN_DIRECTORY, PlanArrays, missing_shards, shard_arrays
from shards.verify import check_file

MAX_OPEN_FILES = 24  # of one thread and one source; a process may usually have 1024


@dataclass(frozen=True, kw_only=True)
class Source:
    """A whole cache. Its values are checked when they are read."""

    cache: Path
    manifest: Manifest
    plan: PlanArrays
    quarantined: dict[int, Quarantined]  # by document

    @classmethod
    def open(cls, cache: Path) -> Self:
        """Raise CacheError unless all shards are there, and all that is not values is as it was written."""
        manifest = Manifest.read(cache)
        for name, sha256 in manifest.checksums.items():
            try:
                check_file(cache, name, sha256)
            except CacheError as error:
                raise CacheError(f"{cache} is damaged: {error}") from None
        plan = PlanArrays.read(cache / PLAN_DIRECTORY)
        plan.check(manifest.plan)
        if missing := missing_shards(cache, manifest):
            raise CacheError(
                f"{cache} lacks {len(missing)} of {manifest.plan.num_shards} shards, the first is number {missing[0]}: "
                "run the command that made it again, which makes those that are missing"
            )
        records = (ShardRecord.read(cache, manifest, shard) for shard in range(manifest.plan.num_shards))
        quarantined = {entry.document: entry for record in records for entry in record.quarantined}
        return cls(cache=cache, manifest=manifest, plan=plan, quarantined=quarantined)


@dataclass(frozen=True, kw_only=True)
class Places:
    """The plan of a new cache, and the document of a source that each of its documents is."""

    plan: PlanArrays
    source_idx: np.ndarray  # int64 [D]
    source_document: np.ndarray  # int64 [D]

    @classmethod
    def same(cls, plan: PlanArrays) -> Self:
        """All documents of the one source where they are."""
        num_documents = len(plan.document_row)
        return cls(plan=plan, source_idx=np.zeros(num_documents, np.int64), source_document=np.arange(num_documents))

    @classmethod
    def lay_out(
        cls, sources: Sequence[PlanArrays], source_idx: np.ndarray, document: np.ndarray, row: np.ndarray,
        start: np.ndarray, source_ids: Sequence[np.ndarray],
    ) -> Self:  # fmt: skip
        """Put `document` of `sources[source_idx]` at `start` of `row`, all int64 [D], in any order.

        Documents are numbered row by row, slot by slot. `source_ids[s]` translates those of source s.
        """
        order = np.lexsort((start, row))
        source_idx, document = source_idx[order], document[order]

        def gather(name: str) -> np.ndarray:
            values = np.empty(len(order), getattr(sources[0], name).dtype)
            for i, source in enumerate(sources):
                values[source_idx == i] = getattr(source, name)[document[source_idx == i]]
            return values

        def tokens(name: str) -> np.ndarray:
            pieces = []
            for i, d in zip(source_idx.tolist(), document.tolist(), strict=True):
                pieces.append(getattr(sources[i], name)[slice(*sources[i].token_offsets[d : d + 2])])
            return np.concatenate(pieces)

        translated = np.empty(len(order), np.uint8)
        for i, source in enumerate(sources):
            translated[source_idx == i] = source_ids[i][source.document_source[document[source_idx == i]]]
        plan = PlanArrays(
            document_record=gather("document_record"),
            document_source=translated,
            document_split=gather("document_split"),
            document_row=row[order].astype("<i8"),
            document_start=start[order].astype("<i4"),
            document_tokens=gather("document_tokens"),
            token_ids=tokens("token_ids"),
            loss_mask=tokens("loss_mask"),
        )
        return cls(plan=plan, source_idx=source_idx, source_document=document)


def plan_sizes(
    plan: PlanArrays,
    *,
    rows_per_shard: int,
    sources: tuple[str, ...],
    num_left_out: dict[str, int],
    num_truncated: int,
) -> Plan:
    """The manifest's part of a plan whose training rows come first."""
    return Plan(
        num_rows=int(plan.document_row.max()) + 1,
        num_train_rows=int(plan.document_row[plan.document_split == 0].max(initial=-1)) + 1,
        rows_per_shard=rows_per_shard,
        num_documents=len(plan.document_row),
        num_heldout_documents=int(np.count_nonzero(plan.document_split)),
        num_tokens=len(plan.token_ids),
        num_supervised_tokens=int(np.count_nonzero(plan.loss_mask)),
        sources=sources,
        num_left_out=num_left_out,
        num_truncated=num_truncated,
    )


class SourceDocuments:
    """The states of the documents of a new cache, read from its sources as they are stored there."""

    def __init__(self, sources: Sequence[Source], places: Places, wanted: CacheConfig) -> None:
        """All have the same codec and the layers of `wanted`, the new cache's."""
        self._sources = sources
        self._places = places
        arrays = shard_arrays(replace(sources[0].manifest, cache=wanted), 0)
        self._names = [name for name, spec in arrays.items() if "hidden" in spec.axes]
        self._readers: dict[int, CacheReader] = {}
        self._row: tuple[int, int, States] | None = None  # the source and row that were read last, whole

    def read(self, document: int) -> States | Quarantined:
        source_idx = int(self._places.source_idx[document])
        source = self._sources[source_idx]
        source_document = int(self._places.source_document[document])
        if source_document in source.quarantined:
            return replace(source.quarantined[source_document], document=document)
        start = int(source.plan.document_start[source_document])
        stop = start + int(source.plan.document_tokens[source_document])
        arrays = self._read_row(source_idx, int(source.plan.document_row[source_document]))
        return {name: values[start:stop] for name, values in arrays.items()}

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _read_row(self, source_idx: int, row: int) -> States:
        """Documents of a row come one after the other, so the last one is kept."""
        if self._row is None or self._row[:2] != (source_idx, row):
            if source_idx not in self._readers:
                self._readers[source_idx] = CacheReader(self._sources[source_idx].cache, max_open_files=MAX_OPEN_FILES)
            self._row = source_idx, row, self._readers[source_idx].read_arrays(row, self._names)
        return self._row[2]
