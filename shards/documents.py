"""Documents before they have places in rows: tokens, what is supervised of them, and which can't have a place."""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from shards.config import CacheConfig, DataConfig, TargetConfig

Reason = Literal[
    "empty",  # no tokens
    "template_refused",  # the chat template raises an error on this conversation
    "mask_unclear",  # an answer's first or last token can't be told from what is around it
    "mask_token",  # contains target.mask_token_id
    "outside_embedding",  # contains a token id that the target has no embedding for
    "over_length",  # longer than a row, with data.over_length = "drop"
    "no_anchor",  # no two adjacent supervised tokens, so no block can start in it
]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One tokenised record."""

    record: int
    source: str
    token_ids: np.ndarray  # int32 [tokens]
    loss_mask: np.ndarray  # uint8 [tokens], 1 where supervised


@dataclass(frozen=True, kw_only=True)
class Tokenised:
    """All documents in the order of their records, and what became of the other records."""

    documents: list[Document]
    num_left_out: dict[str, int]  # by Reason
    num_truncated: int


class LeftOut(Exception):  # noqa: N818 - an outcome of one record, not an error
    """This record makes no document; the argument is the Reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a document must satisfy to have a place in a row."""

    row_tokens: int
    over_length: Literal["truncate", "drop"]
    mask_token_id: int
    vocab_size: int

    @classmethod
    def of(cls, target: TargetConfig, data: DataConfig, cache: CacheConfig) -> Self:
        return cls(
            row_tokens=cache.row_tokens,
            over_length=data.over_length,
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
    if not (loss_mask[:-1] & loss_mask[1:]).any():
        raise LeftOut("no_anchor")
    return Document(record=document.record, source=document.source, token_ids=token_ids, loss_mask=loss_mask)
