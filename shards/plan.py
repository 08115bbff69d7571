"""Documents to rows: who is held out, and which document lies where. A pure function of documents and configuration.

Every choice is made by hashing, so that it depends on contents and seed only. Documents are put in a hashed order, so
that a row is a mixture of sources and lengths, and packed whole by best fit; then the rows are put in a hashed order,
training rows first. Held-out documents have rows of their own.
"""

import bisect
import hashlib
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shards.codec import CODECS, bytes_per_token
from shards.config import CacheConfig, DataConfig, TargetConfig
from shards.documents import Tokenised, map_file, nameless_file
from shards.errors import UsageError
from shards.manifest import Plan
from shards.schema import PlanArrays

# Documents that packing chooses from at a time. Wider fills rows better; narrower keeps short documents from waiting
# for the last rows.
WINDOW_DOCUMENTS = 512
HOLDOUT_SCALE = 1 << 64
GATHERED_DOCUMENTS = 4096  # whose tokens are in memory at a time


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which document lies where, in the order of the document ids: row by row, slot by slot."""

    document: np.ndarray  # int64 [D]: index into the columns of Tokenised
    row: np.ndarray  # int64 [D]
    start: np.ndarray  # int32 [D]
    num_train_rows: int

    def arrays(self, tokenised: Tokenised, directory: Path) -> PlanArrays:
        """The columns of plan/. Those of tokens are kept in files without a name on the disk of `directory`."""
        return PlanArrays(
            document_record=tokenised.record[self.document].astype("<i8"),
            document_source=tokenised.source[self.document].astype("u1"),
            document_split=(self.row >= self.num_train_rows).astype("u1"),
            document_row=self.row.astype("<i8"),
            document_start=self.start.astype("<i4"),
            document_tokens=tokenised.num_tokens[self.document].astype("<i4"),
            token_ids=self._gather(tokenised, tokenised.token_ids, directory),
            loss_mask=self._gather(tokenised, tokenised.loss_mask, directory),
        )

    def _gather(self, tokenised: Tokenised, values: np.ndarray, directory: Path) -> np.ndarray:
        """The documents' `values`, from the order of the records to that of the ids."""
        first, stop = tokenised.first_token, tokenised.first_token + tokenised.num_tokens
        with nameless_file(directory) as file:
            for i in range(0, len(self.document), GATHERED_DOCUMENTS):
                pieces = [values[first[d] : stop[d]] for d in self.document[i : i + GATHERED_DOCUMENTS]]
                file.write(np.concatenate(pieces).data)
            return map_file(file, values.dtype)


def make_plan(tokenised: Tokenised, target: TargetConfig, data: DataConfig, cache: CacheConfig) -> tuple[Plan, Layout]:
    """Split, order and pack the documents; raise UsageError if nothing is left to train on."""
    order = np.argsort(tokenised.order, kind="stable")
    limit = round(data.holdout_fraction * HOLDOUT_SCALE)
    is_heldout = tokenised.content[order, 0] < limit  # a function of the token ids alone
    train, heldout = order[~is_heldout], order[is_heldout]
    if not len(train):
        raise UsageError(_describe_nothing_left(tokenised, len(heldout)))
    placed, row_sizes = zip(*(_fill_rows(split, tokenised, data, cache) for split in (train, heldout)), strict=True)
    layout = _lay_out(np.concatenate(placed), np.concatenate(row_sizes), len(row_sizes[0]), tokenised.num_tokens)
    plan = Plan(
        num_rows=sum(map(len, row_sizes)),
        num_train_rows=layout.num_train_rows,
        rows_per_shard=rows_per_shard(target, cache),
        num_documents=len(tokenised),
        num_heldout_documents=len(heldout),
        num_tokens=int(tokenised.num_tokens.sum(dtype=np.int64)),
        num_supervised_tokens=int(tokenised.num_supervised.sum(dtype=np.int64)),
        sources=tokenised.sources,
        num_left_out=tokenised.num_left_out,
        num_truncated=tokenised.num_truncated,
    )
    return plan, layout


def rows_per_shard(target: TargetConfig, cache: CacheConfig) -> int:
    """R: as many rows as cache.shard_bytes holds of hidden states, at least one."""
    num_arrays = len(cache.layers) + cache.final_hidden
    token_bytes = num_arrays * bytes_per_token(CODECS[cache.codec], target.hidden_size)
    return max(1, cache.shard_bytes // (token_bytes * cache.row_tokens))


def pack(lengths: Sequence[int], row_tokens: int, window: int = WINDOW_DOCUMENTS) -> Iterator[list[int]]:
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
        yield row


def _fill_rows(
    documents: np.ndarray, tokenised: Tokenised, data: DataConfig, cache: CacheConfig
) -> tuple[np.ndarray, np.ndarray]:
    """`documents`, which are in a hashed order, row after row, and the number of them in each row.

    Packing makes late rows differ from early ones (the last is rarely full); their order must not show it.
    """
    placed, sizes = array("q"), array("q")  # lists would take ten times the memory
    for row in pack(array("i", tokenised.num_tokens[documents].tobytes()), cache.row_tokens):
        placed.extend(row)
        sizes.append(len(row))
    keys = [hashlib.sha256(b"row %d %d" % (data.seed, row)).digest() for row in range(len(sizes))]
    rows = np.array(sorted(range(len(sizes)), key=keys.__getitem__), np.int64)
    row_sizes = np.array(sizes, np.int64)
    first_places = np.cumsum(row_sizes) - row_sizes
    return documents[np.array(placed, np.int64)[_ranges(first_places[rows], row_sizes[rows])]], row_sizes[rows]


def _lay_out(documents: np.ndarray, row_sizes: np.ndarray, num_train_rows: int, num_tokens: np.ndarray) -> Layout:
    stops = np.cumsum(num_tokens[documents], dtype=np.int64)
    starts = stops - num_tokens[documents]  # as if all rows were one
    rows = np.repeat(np.arange(len(row_sizes)), row_sizes)
    first_documents = np.cumsum(row_sizes) - row_sizes
    return Layout(
        document=documents, row=rows, start=starts - starts[first_documents][rows], num_train_rows=num_train_rows
    )


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """range(start, start + size) for each, joined."""
    stops = np.cumsum(sizes)
    return np.arange(sizes.sum()) + np.repeat(starts - (stops - sizes), sizes)


def _describe_nothing_left(tokenised: Tokenised, num_heldout: int) -> str:
    if num_heldout:
        return f"all {num_heldout} documents are held out, none is left to train on: lower data.holdout_fraction"
    if not tokenised.num_left_out:
        return "the data files have no records: data.files must name some with at least one"
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(tokenised.num_left_out.items()))
    return f"no document of the data can be used; left out by reason: {reasons}"
