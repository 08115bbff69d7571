"""What was not finite: the device notes the first such step of a log interval, and its rows, for the log to name."""

from typing import Any

import torch
from torch import Tensor

from train.optimizer import Counters
from train.order import NO_ROW, RowOrder
from train.ranks import Ranks

NONE = -1  # no step


class Faults:
    """Noted without a word to the host, and read once per log interval. Steps are counted from 1, as in the log.

    A loss is that of a micro-step, so its rows are those of this rank's micro-step. Where all losses are finite and
    the gradient is not, nothing says which row of the step it was.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.step = torch.empty((), dtype=torch.int64, device=device)  # the first that was skipped for it, on any rank
        self.loss_step = torch.empty_like(self.step)  # the first with a loss of this rank that was not finite
        self.row_ids_R = torch.empty(num_rows, dtype=torch.int64, device=device)  # of that loss
        self.most_in_a_row = torch.empty_like(self.step)
        self.reset()

    def reset(self) -> None:
        for tensor in (self.step, self.loss_step, self.row_ids_R):
            tensor.fill_(NONE)
        self.most_in_a_row.zero_()

    def note_loss(self, loss_sum: Tensor, row_ids_R: Tensor, counters: Counters) -> None:
        """Called after each micro-step, before the step is counted."""
        is_first = ~torch.isfinite(loss_sum) & (self.loss_step == NONE)
        self.row_ids_R.copy_(torch.where(is_first, row_ids_R, self.row_ids_R))
        self.loss_step.copy_(torch.where(is_first, counters.step + 1, self.loss_step))

    def note_step(self, counters: Counters) -> None:
        """Called after each step, when it is counted."""
        is_first = (counters.num_bad_in_a_row > 0) & (self.step == NONE)
        self.step.copy_(torch.where(is_first, counters.step, self.step))
        self.most_in_a_row.copy_(torch.maximum(self.most_in_a_row, counters.num_bad_in_a_row))

    def read(self, ranks: Ranks, order: RowOrder) -> dict[str, Any]:
        """Read the device: what a line of metrics says of the interval, nothing if all was finite. On all ranks."""
        step = int(self.step)
        if step == NONE:
            return {}
        own = self.row_ids_R.tolist() if int(self.loss_step) == step else []
        rows = [row for rows in ranks.gather(own) for row in rows] or order.step_rows(step - 1)
        return {"bad_step": step, "bad_rows": sorted(row for row in rows if row != NO_ROW)}
