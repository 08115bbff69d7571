"""The order of rows: every row once an epoch, the same rows in a step for any number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.anchors import mix
from train.order import NO_ROW, RowOrder, epoch_permutation

orders = st.builds(
    RowOrder, num_rows=st.integers(1, 40), rows_per_step=st.integers(1, 12), seed=st.integers(0, 1 << 40)
)


@given(orders, st.integers(0, 3))
def test_an_epoch_has_every_row_once_and_is_filled_with_no_row(order, epoch):
    first = epoch * order.steps_per_epoch
    steps = [order.step_rows(step) for step in range(first, first + order.steps_per_epoch)]
    assert all(len(rows) == order.rows_per_step for rows in steps)
    rows = [row for step in steps for row in step]
    assert sorted(rows[: order.num_rows]) == list(range(order.num_rows))
    assert rows[order.num_rows :] == [NO_ROW] * (len(rows) - order.num_rows)
    assert {order.epoch(step) for step in range(first, first + order.steps_per_epoch)} == {epoch}


@given(orders, st.integers(0, 50), st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 1)]))
def test_ranks_and_micro_steps_share_out_the_same_rows(order, step, layout):
    world_size, rows_per_micro_step = layout
    whole = order.step_rows(step)
    shared = []
    for rank in range(world_size):
        micro_steps = order.micro_steps(step, rank=rank, world_size=world_size, rows_per_micro_step=rows_per_micro_step)
        rows = [row for micro_step in micro_steps for row in micro_step]
        assert rows == whole[rank::world_size]
        shared += rows
    assert sorted(shared) == sorted(whole)


def test_epochs_and_seeds_differ():
    permutations = {tuple(epoch_permutation(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(permutations) == 16


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (42, 3)])
def test_the_order_is_that_of_the_documented_hash(seed, epoch):
    """Rows by mix(seed, epoch, row, 2^17) as signed 64-bit: other machines and versions must find the same order."""

    def signed(value: int) -> int:
        return value - (1 << 64) if value >> 63 else value

    expected = sorted(range(30), key=lambda row: signed(mix(seed, epoch, row, 1 << 17)))
    assert epoch_permutation(30, seed, epoch) == expected
