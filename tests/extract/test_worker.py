"""Rows are made ahead of those that are stored: all, in order, no more than a few, and none that nobody will store."""

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from extract.worker import ROWS_AHEAD, ahead
from shards.writer import ShardRow

NUM_ROWS = 20


def numbered(number: int) -> ShardRow:
    return ShardRow(arrays={"row_ids": np.int64(number)})


def test_all_rows_come_in_order_and_few_are_in_memory() -> None:
    made: list[int] = []

    def make() -> Iterator[ShardRow]:
        for number in range(NUM_ROWS):
            made.append(number)
            yield numbered(number)

    for taken, row in enumerate(ahead(make()), start=1):
        assert row.arrays["row_ids"] == taken - 1
        assert taken <= len(made) <= taken + ROWS_AHEAD
    assert taken == NUM_ROWS


def test_rows_are_made_while_another_is_stored() -> None:
    next_is_made = threading.Event()

    def make() -> Iterator[ShardRow]:
        yield numbered(0)
        next_is_made.set()
        yield numbered(1)

    rows = ahead(make())
    next(rows)
    next_is_made.wait()  # for ever, if nobody makes it before it is asked for
    assert next(rows).arrays["row_ids"] == 1


def test_what_fails_in_the_target_fails_in_the_worker() -> None:
    def make() -> Iterator[ShardRow]:
        yield numbered(0)
        raise MemoryError("out of GPU memory")

    rows = ahead(make())
    next(rows)
    with pytest.raises(MemoryError, match="out of GPU memory"):
        next(rows)


def test_a_disk_that_takes_no_more_stops_the_target() -> None:
    made: list[int] = []

    def make() -> Iterator[ShardRow]:
        for number in range(NUM_ROWS):
            made.append(number)
            yield numbered(number)

    def store(rows: Iterator[ShardRow]) -> None:
        for _ in rows:
            raise OSError("no space left")

    before = threading.active_count()
    with pytest.raises(OSError, match="no space left"), contextlib.closing(ahead(make())) as rows:
        store(rows)
    assert threading.active_count() == before
    assert len(made) <= 1 + ROWS_AHEAD
