"""What a plan must be, checked slot by slot in plain Python. Shares no code with shards/plan.py."""

import hashlib
import struct
from collections.abc import Mapping, Sequence


def check_plan(
    documents: Mapping[int, tuple[str, list[int], list[int]]],
    columns: Mapping[str, Sequence[int]],
    sources: Sequence[str],
    row_tokens: int,
    num_rows: int,
    num_train_rows: int,
    holdout_fraction: float,
) -> None:
    """Assert that every document is in the plan once, whole, in the right split, alone in its slots.

    `documents` gives source, token ids and loss mask by record; `columns` are those of plan/, by name.
    """
    num_planned = len(columns["document_record"])
    assert sorted(columns["document_record"]) == sorted(documents)
    assert sum(columns["document_tokens"]) == len(columns["token_ids"]) == len(columns["loss_mask"])
    taken: list[list[int | None]] = [[None] * row_tokens for _ in range(num_rows)]
    offset = 0
    for i in range(num_planned):
        source, token_ids, loss_mask = documents[columns["document_record"][i]]
        row, start, length = columns["document_row"][i], columns["document_start"][i], columns["document_tokens"][i]
        assert list(columns["token_ids"][offset : offset + length]) == token_ids
        assert list(columns["loss_mask"][offset : offset + length]) == loss_mask
        assert sources[columns["document_source"][i]] == source
        offset += length
        for slot in range(start, start + length):
            assert taken[row][slot] is None, f"documents {i} and {taken[row][slot]} share slot {slot} of row {row}"
            taken[row][slot] = i
        is_heldout = heldout(token_ids, holdout_fraction)
        assert columns["document_split"][i] == int(is_heldout)
        assert (row >= num_train_rows) == is_heldout
    for row in taken:
        used = [slot is not None for slot in row]
        assert any(used), "an empty row"
        assert used == sorted(used, reverse=True), "padding between documents"


def heldout(token_ids: list[int], holdout_fraction: float) -> bool:
    """By content: the first 8 bytes of the sha256 of the ids, as int32 little-endian, read as a fraction of one."""
    digest = hashlib.sha256(struct.pack(f"<{len(token_ids)}i", *token_ids)).digest()
    return int.from_bytes(digest[:8], "big") < round(holdout_fraction * 2**64)


def least_rows(lengths: Sequence[int], row_tokens: int) -> int:
    """No packing of whole documents needs fewer rows: by volume, and because two long ones never share a row."""
    num_long = sum(2 * length > row_tokens for length in lengths)
    return max(-(-sum(lengths) // row_tokens), num_long)
