"""What was not finite is noted: the first step of an interval, the rows of its loss, the most steps in a row."""

import math

import torch

from train.faults import Faults
from train.optimizer import Counters
from train.order import RowOrder
from train.ranks import Ranks
from train.records import name_rows

CPU = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
ORDER = RowOrder(num_rows=7, rows_per_step=4, seed=0)


def take_steps(faults: Faults, counters: Counters, steps: list[list[float]], *, bad_gradients: tuple[int, ...] = ()):
    """Each step is the losses of its micro-steps, of two rows each: rows 0, 1, then 2, 3."""
    for losses in steps:
        for i, loss in enumerate(losses):
            faults.note_loss(torch.tensor(loss), torch.tensor([2 * i, 2 * i + 1]), counters)
        counters.step.add_(1)
        is_bad = not all(map(math.isfinite, losses)) or int(counters.step) in bad_gradients
        counters.num_bad_in_a_row.add_(1).mul_(is_bad)
        faults.note_step(counters)


def fresh() -> tuple[Faults, Counters]:
    return Faults(2, CPU.device), Counters.zeros(CPU.device)


def test_nothing_is_said_where_all_was_finite():
    faults, counters = fresh()
    take_steps(faults, counters, [[1.0, 2.0], [3.0, 4.0]])
    assert faults.read(CPU, ORDER) == {}


def test_the_rows_of_the_first_loss_are_named():
    faults, counters = fresh()
    take_steps(faults, counters, [[1.0, 2.0], [1.0, math.nan], [math.inf, 2.0]])
    assert faults.read(CPU, ORDER) == {"bad_step": 2, "bad_rows": [2, 3]}


def test_a_gradient_names_all_rows_of_its_step():
    """Those that the order gives; a loss of a later step has nothing to do with it. NO_ROW is no row."""
    faults, counters = fresh()
    take_steps(faults, counters, [[1.0, 2.0], [1.0, 2.0], [math.nan, 2.0]], bad_gradients=(2,))
    expected = sorted(row for row in ORDER.step_rows(1) if row >= 0)
    assert len(expected) == 3
    assert faults.read(CPU, ORDER) == {"bad_step": 2, "bad_rows": expected}


def test_an_interval_begins_with_nothing():
    faults, counters = fresh()
    take_steps(faults, counters, [[math.nan, 1.0]])
    faults.reset()
    take_steps(faults, counters, [[1.0, 1.0], [1.0, math.nan]])
    assert faults.read(CPU, ORDER) == {"bad_step": 3, "bad_rows": [2, 3]}


def test_a_good_step_before_the_log_line_hides_no_bad_ones():
    faults, counters = fresh()
    take_steps(faults, counters, [[math.nan, 1.0]] * 3 + [[1.0, 1.0]])
    assert int(faults.most_in_a_row) == 3


def test_many_rows_are_not_all_named():
    assert name_rows([4]) == "row 4"
    assert name_rows(list(range(11))) == "rows 0, 1, 2, 3, 4, 5, 6, 7 and 3 more"
