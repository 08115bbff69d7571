"""Documents before they have places in rows: tokens, what is supervised of them, and which can't have a place.

There may be ten million of them. So they are columns, a hundred bytes a document; tokens lie in files without a name,
which are mapped, or nowhere when only sizes are asked for.
"""

import dataclasses
import hashlib
import tempfile
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np

from shards.config import CacheConfig, DataConfig, TargetConfig
from shards.errors import UsageError

Reason = Literal[
    "empty",  # no tokens
    "template_refused",  # the chat template raises an error on this conversation
    "answer_spells_end",  # an answer contains the token that ends it
    "answer_unclear",  # what the target is prompted with isn't what the conversation begins with: no border to be told
    "answer_without_end",  # no end-of-turn token before the next answer
    "mask_token",  # contains target.mask_token_id
    "outside_embedding",  # contains a token id that the target has no embedding for
    "over_length",  # longer than a row, with data.over_length = "drop"
    "few_supervised",  # fewer supervised tokens than data.min_supervised_tokens
    "no_anchor",  # no two adjacent supervised tokens, so no block can start in it
    "duplicate",  # the same tokens as a record before it
    "mix",  # more of its source than data.mix asks for
]
REASONS: tuple[str, ...] = typing.get_args(Reason)
BATCH_DOCUMENTS = 256  # that are tokenised at a time
MAX_SOURCES = 255  # source ids are stored in a byte
COLUMNS = {
    **{"record": np.int64, "source": np.uint8, "num_tokens": np.int32, "num_supervised": np.int32},
    **{"content": np.uint64, "order": np.uint64, "left_out_record": np.int64, "left_out_reason": np.uint8},
}


class LeftOut(Exception):  # noqa: N818 - an outcome of one record, not an error
    """This record makes no document; the argument is the Reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Document:
    """One tokenised record."""

    record: int
    source: str
    token_ids: np.ndarray  # int32 [tokens]
    loss_mask: np.ndarray  # uint8 [tokens], 1 where supervised


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a document must satisfy to have a place in a row."""

    row_tokens: int
    over_length: Literal["truncate", "drop"]
    min_supervised_tokens: int
    mask_token_id: int
    vocab_size: int

    @classmethod
    def of(cls, target: TargetConfig, data: DataConfig, cache: CacheConfig) -> Self:
        return cls(
            row_tokens=cache.row_tokens,
            over_length=data.over_length,
            min_supervised_tokens=data.min_supervised_tokens,
            mask_token_id=target.mask_token_id,
            vocab_size=target.vocab_size,
        )


def fit(document: Document, limits: Limits) -> Document:
    """The document as it goes into a row, truncated if need be; raise LeftOut if it can't."""
    if not len(document.token_ids):
        raise LeftOut("empty")
    if len(document.token_ids) > limits.row_tokens and limits.over_length == "drop":
        raise LeftOut("over_length")
    token_ids, loss_mask = document.token_ids[: limits.row_tokens], document.loss_mask[: limits.row_tokens]
    if (token_ids == limits.mask_token_id).any():
        raise LeftOut("mask_token")
    if token_ids.max() >= limits.vocab_size:
        raise LeftOut("outside_embedding")
    if np.count_nonzero(loss_mask) < limits.min_supervised_tokens:
        raise LeftOut("few_supervised")
    if not (loss_mask[:-1] & loss_mask[1:]).any():
        raise LeftOut("no_anchor")
    return dataclasses.replace(document, token_ids=token_ids, loss_mask=loss_mask)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A few records, tokenised: columns of those that are documents, and what became of the others."""

    record: np.ndarray  # int64 [D]
    source: tuple[str, ...]
    num_tokens: np.ndarray  # int32 [D]
    num_supervised: np.ndarray  # int32 [D]
    content: np.ndarray  # uint64 [2 D], two for each: begin of the sha256 of the token ids; equal for copies only
    order: np.ndarray  # uint64 [D]: a hash of content, record and seed, by which documents are shuffled
    token_ids: np.ndarray  # int32 [tokens of all]
    loss_mask: np.ndarray  # uint8 [tokens of all]
    left_out: tuple[tuple[int, Reason], ...]  # record, why
    num_truncated: int

    @classmethod
    def of(cls, wholes: Iterable[Document | tuple[int, Reason]], limits: Limits, seed: int) -> Self:
        """Of tokenised records, and of those that could not be: record and why."""
        documents: list[Document] = []
        left_out: list[tuple[int, Reason]] = []
        num_truncated = 0
        for whole in wholes:
            if isinstance(whole, tuple):
                left_out.append(whole)
                continue
            try:
                documents.append(fit(whole, limits))
                num_truncated += len(whole.token_ids) > limits.row_tokens
            except LeftOut as outcome:
                left_out.append((whole.record, outcome.reason))
        digests = [hashlib.sha256(document.token_ids.astype("<i4").tobytes()).digest() for document in documents]
        orders = [
            hashlib.sha256(b"order %d %d " % (seed, document.record) + digest).digest()[:8]
            for document, digest in zip(documents, digests, strict=True)
        ]
        return cls(
            record=np.array([document.record for document in documents], np.int64),
            source=tuple(document.source for document in documents),
            num_tokens=np.array([len(document.token_ids) for document in documents], np.int32),
            num_supervised=np.array([np.count_nonzero(document.loss_mask) for document in documents], np.int32),
            content=_uint64(digest[:16] for digest in digests),
            order=_uint64(orders),
            token_ids=np.concatenate([*(d.token_ids for d in documents), np.empty(0, np.int32)]).astype("<i4"),
            loss_mask=np.concatenate([*(d.loss_mask for d in documents), np.empty(0, np.uint8)]).astype("u1"),
            left_out=tuple(left_out),
            num_truncated=num_truncated,
        )


@dataclass(frozen=True, kw_only=True)
class Tokenised:
    """All documents in the order of their records, and what became of the other records."""

    record: np.ndarray  # int64 [D]
    source: np.ndarray  # uint8 [D]: index into sources
    num_tokens: np.ndarray  # int32 [D]
    num_supervised: np.ndarray  # int32 [D]
    content: np.ndarray  # uint64 [D, 2]; see Batch
    order: np.ndarray  # uint64 [D]; see Batch
    first_token: np.ndarray  # int64 [D]: where the document begins in token_ids and loss_mask
    sources: tuple[str, ...]  # sorted
    left_out_record: np.ndarray  # int64 [left out]
    left_out_reason: np.ndarray  # uint8 [left out]: index into REASONS
    num_truncated: int
    token_ids: np.ndarray  # int32, of all documents; empty unless tokens are kept
    loss_mask: np.ndarray  # uint8, the same

    def __len__(self) -> int:
        return len(self.record)

    @property
    def num_left_out(self) -> dict[str, int]:
        """By reason, those that occur."""
        counts = np.bincount(self.left_out_reason, minlength=len(REASONS)).tolist()
        return {reason: count for reason, count in sorted(zip(REASONS, counts, strict=True)) if count}

    def without(self, is_left_out: np.ndarray, reason: Reason) -> "Tokenised":
        """The same without some documents, and without the sources that no other document has."""
        columns = ("record", "num_tokens", "num_supervised", "content", "order", "first_token")
        reasons = np.full(np.count_nonzero(is_left_out), REASONS.index(reason), np.uint8)
        used, source = np.unique(self.source[~is_left_out], return_inverse=True)
        return dataclasses.replace(
            self,
            **{name: getattr(self, name)[~is_left_out] for name in columns},
            source=source.astype(np.uint8),
            sources=tuple(self.sources[i] for i in used),
            left_out_record=np.concatenate([self.left_out_record, self.record[is_left_out]]),
            left_out_reason=np.concatenate([self.left_out_reason, reasons]),
        )


class Collector:
    """Takes batches in the order of their records and gives them as one."""

    def __init__(self, directory: Path | None) -> None:
        """Tokens are kept in files without a name on the disk of `directory`, which exists; None: they are not kept."""
        self._files = () if directory is None else (nameless_file(directory), nameless_file(directory))
        self._columns: dict[str, list[np.ndarray]] = {name: [np.empty(0, t)] for name, t in COLUMNS.items()}
        self._source_ids: dict[str, int] = {}
        self._num_truncated = 0

    def add(self, batch: Batch) -> None:
        values_by_name = {
            **{name: getattr(batch, name) for name in COLUMNS if hasattr(batch, name)},
            "source": [self._source_id(name) for name in batch.source],
            "left_out_record": [record for record, _ in batch.left_out],
            "left_out_reason": [REASONS.index(reason) for _, reason in batch.left_out],
        }
        for name, values in values_by_name.items():
            self._columns[name].append(np.asarray(values, COLUMNS[name]))
        for file, values in zip(self._files, (batch.token_ids, batch.loss_mask), strict=False):
            file.write(values.data)
        self._num_truncated += batch.num_truncated

    def finish(self) -> Tokenised:
        columns = {name: np.concatenate(self._columns.pop(name)) for name in COLUMNS}
        columns["content"] = columns["content"].reshape(-1, 2)
        names = sorted(self._source_ids)
        rank = np.array([names.index(name) for name in self._source_ids], np.uint8)
        columns["source"] = rank[columns["source"]]
        token_ids, loss_mask = (
            map_file(file, dtype) if self._files else np.empty(0, dtype)
            for file, dtype in zip(self._files or (None, None), (np.int32, np.uint8), strict=True)
        )
        return Tokenised(
            **columns,
            first_token=np.cumsum(columns["num_tokens"], dtype=np.int64) - columns["num_tokens"],
            sources=tuple(names),
            num_truncated=self._num_truncated,
            token_ids=token_ids,
            loss_mask=loss_mask,
        )

    def _source_id(self, name: str) -> int:
        source = self._source_ids.setdefault(name, len(self._source_ids))
        if source >= MAX_SOURCES:
            raise UsageError(
                f"the data has more than {MAX_SOURCES} sources, {name!r:.60} is one: give records fewer, or name "
                "another field for them with data.source_field"
            )
        return source


def nameless_file(directory: Path) -> typing.IO[bytes]:
    """A file on the disk of `directory` that goes when nobody uses it any more."""
    return tempfile.TemporaryFile(dir=directory)


def map_file(file: typing.IO[bytes], dtype: type) -> np.ndarray:
    """What was written into `file`, read-only; lives as long as the array."""
    file.flush()
    return np.memmap(file, dtype, "r") if file.tell() else np.empty(0, dtype)


def _uint64(digests: Iterable[bytes]) -> np.ndarray:
    """Digests of a multiple of 8 bytes as numbers, first byte highest."""
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)
