"""Documents to rows: who is held out, and which document lies where. A pure function of documents and configuration.

Every choice is made by hashing, so that it depends on contents and seed only. Documents are put in a hashed order, so
that a row is a mixture of sources and lengths, and packed whole by best fit; then the rows are put in a hashed order,
training rows first. Held-out documents have rows of their own.
"""

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from shards.codec import CODECS, bytes_per_token
from shards.config import CacheConfig, DataConfig, TargetConfig
from shards.documents import Document, Tokenised
from shards.errors import UsageError
from shards.manifest import Plan
from shards.schema import PlanArrays

# Documents that packing chooses from at a time. Wider fills rows better; narrower keeps short documents from waiting
# for the last rows.
WINDOW_DOCUMENTS = 512
MAX_SOURCES = 255  # source ids are stored in a byte
HOLDOUT_SCALE = 1 << 64


@dataclass(frozen=True, kw_only=True)
class Keyed:
    """A document with the hashes that decide its place."""

    document: Document
    holdout_key: int  # 0 … 2^64 − 1, a function of the token ids alone: copies of a document share a split
    order_key: bytes

    @classmethod
    def of(cls, document: Document, seed: int) -> Self:
        content = hashlib.sha256(document.token_ids.astype("<i4").tobytes()).digest()
        order_key = hashlib.sha256(b"order %d %d " % (seed, document.record) + content).digest()
        return cls(document=document, holdout_key=int.from_bytes(content[:8]), order_key=order_key)


def make_plan(
    tokenised: Tokenised, target: TargetConfig, data: DataConfig, cache: CacheConfig
) -> tuple[Plan, PlanArrays]:
    """Split, order and pack the documents; raise UsageError if nothing is left to train on."""
    sources = tuple(sorted({document.source for document in tokenised.documents}))
    if len(sources) > MAX_SOURCES:
        raise UsageError(
            f"the data has {len(sources)} sources, at most {MAX_SOURCES} are possible: give `source` fields"
        )
    keyed = sorted((Keyed.of(d, data.seed) for d in tokenised.documents), key=lambda item: item.order_key)
    limit = round(data.holdout_fraction * HOLDOUT_SCALE)
    train = [item.document for item in keyed if item.holdout_key >= limit]
    heldout = [item.document for item in keyed if item.holdout_key < limit]
    if not train:
        raise UsageError(_describe_nothing_left(tokenised, len(heldout)))
    train_rows = _mix_rows(_pack_documents(train, cache.row_tokens), data.seed)
    rows = train_rows + _mix_rows(_pack_documents(heldout, cache.row_tokens), data.seed)
    arrays = _arrays(rows, len(train_rows), sources)
    plan = Plan(
        num_rows=len(rows),
        num_train_rows=len(train_rows),
        rows_per_shard=rows_per_shard(target, cache),
        num_documents=len(keyed),
        num_heldout_documents=len(heldout),
        num_tokens=len(arrays.token_ids),
        num_supervised_tokens=int(np.count_nonzero(arrays.loss_mask)),
        sources=sources,
        num_left_out=dict(sorted(tokenised.num_left_out.items())),
        num_truncated=tokenised.num_truncated,
    )
    return plan, arrays


def rows_per_shard(target: TargetConfig, cache: CacheConfig) -> int:
    """R: as many rows as cache.shard_bytes holds of hidden states, at least one."""
    num_arrays = len(cache.layers) + cache.final_hidden
    token_bytes = num_arrays * bytes_per_token(CODECS[cache.codec], target.hidden_size)
    return max(1, cache.shard_bytes // (token_bytes * cache.row_tokens))


def pack(lengths: Sequence[int], row_tokens: int, window: int = WINDOW_DOCUMENTS) -> list[list[int]]:
    """Rows as lists of indices into `lengths`, each index once, no row longer than `row_tokens`.

    The first half of a row is filled in the given order, which makes it a mixture and lets nobody wait for ever; the
    second half takes, of the next `window` documents, the longest that fits, again and again, which fills it up. Taking
    the longest first would do that alone, but would gather the short documents in rows of their own.
    """
    assert all(0 < length <= row_tokens for length in lengths)
    arriving = iter(range(len(lengths)))
    waiting = dict.fromkeys(itertools.islice(arriving, window))  # in the given order
    by_length = sorted((lengths[i], -i) for i in waiting)  # of equal ones the longest-waiting comes last

    def take(index: int) -> int:
        del waiting[index]
        del by_length[bisect.bisect_left(by_length, (lengths[index], -index))]
        if (arrival := next(arriving, None)) is not None:
            waiting[arrival] = None
            bisect.insort(by_length, (lengths[arrival], -arrival))
        return index

    rows = []
    while waiting:
        row = [take(next(iter(waiting)))]
        space = row_tokens - lengths[row[0]]
        while waiting and space - lengths[oldest := next(iter(waiting))] >= row_tokens // 2:
            space -= lengths[oldest]
            row.append(take(oldest))
        while fitting := bisect.bisect_right(by_length, (space, 0)):
            length, negative_index = by_length[fitting - 1]
            space -= length
            row.append(take(-negative_index))
        rows.append(row)
    return rows


def _pack_documents(documents: list[Document], row_tokens: int) -> list[list[Document]]:
    rows = pack([len(document.token_ids) for document in documents], row_tokens)
    return [[documents[i] for i in row] for row in rows]


def _mix_rows(rows: list[list[Document]], seed: int) -> list[list[Document]]:
    """Packing makes late rows differ from early ones (the last is rarely full); their order must not show it."""
    keys = [hashlib.sha256(b"row %d %d" % (seed, row)).digest() for row in range(len(rows))]
    return [rows[i] for i in sorted(range(len(rows)), key=keys.__getitem__)]


def _arrays(rows: list[list[Document]], num_train_rows: int, sources: tuple[str, ...]) -> PlanArrays:
    """The columns of plan/. Document ids count up row by row, slot by slot."""
    placed = [(row, document) for row, documents in enumerate(rows) for document in documents]
    starts = [
        start
        for documents in rows
        for start in itertools.accumulate((len(d.token_ids) for d in documents[:-1]), initial=0)
    ]
    source_ids = {source: i for i, source in enumerate(sources)}
    return PlanArrays(
        document_record=np.array([document.record for _, document in placed], "<i8"),
        document_source=np.array([source_ids[document.source] for _, document in placed], "u1"),
        document_split=np.array([row >= num_train_rows for row, _ in placed], "u1"),
        document_row=np.array([row for row, _ in placed], "<i8"),
        document_start=np.array(starts, "<i4"),
        document_tokens=np.array([len(document.token_ids) for _, document in placed], "<i4"),
        token_ids=np.concatenate([document.token_ids for _, document in placed]).astype("<i4"),
        loss_mask=np.concatenate([document.loss_mask for _, document in placed]).astype("u1"),
    )


def _describe_nothing_left(tokenised: Tokenised, num_heldout: int) -> str:
    if num_heldout:
        return f"all {num_heldout} documents are held out, none is left to train on: lower data.holdout_fraction"
    if not tokenised.num_left_out:
        return "the data files have no records: data.files must name some with at least one"
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(tokenised.num_left_out.items()))
    return f"no document of the data can be used; left out by reason: {reasons}"
