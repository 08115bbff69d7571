"""Held-out evaluation: how many tokens the drafter would have got accepted on documents that training never saw.

Measured twice: with each row's own context, and with the features of the next held-out row in their place (ids, masks
and positions stay). The second is what the drafter knows without the target.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from train.feed import Feed
from train.metrics import Interval, Metrics, mean_by_document, summarise
from train.ranks import Ranks
from train.step import BlockResult, HeldoutStep


@dataclass(frozen=True, kw_only=True)
class HeldoutResult:
    loss: float
    acceptance_length: Interval
    acceptance_length_without_context: Interval | None  # None with fewer than two held-out rows
    accuracy_per_slot: list[float | None]

    def to_json(self) -> dict[str, Any]:
        without = self.acceptance_length_without_context
        return {
            "heldout_loss": self.loss,
            "heldout_acceptance_length": self.acceptance_length.mean,
            "heldout_acceptance_length_half_width": self.acceptance_length.half_width,
            "heldout_acceptance_length_without_context": without and without.mean,
            "heldout_acceptance_length_without_context_half_width": without and without.half_width,
            "heldout_accuracy_per_slot": self.accuracy_per_slot,
        }


def evaluate(
    step: HeldoutStep, feed: Feed, rows: range, ranks: Ranks, *, block_size: int, keep_alive: Callable[[], None]
) -> HeldoutResult | None:
    """Evaluate the held-out `rows`, shared out over the ranks; None when there is nothing to predict in them.

    `keep_alive` is called time and again.
    """
    run_rows = partial(_run_rows, step, feed, rows, ranks, block_size=block_size, keep_alive=keep_alive)
    sums, accepted = run_rows(shift=0)
    if not accepted:
        return None
    summary = summarise(sums, block_size)
    without = None
    if len(rows) > 1:
        without = _interval(run_rows(shift=1)[1])
    return HeldoutResult(
        loss=summary["loss"],
        acceptance_length=_interval(accepted),
        acceptance_length_without_context=without,
        accuracy_per_slot=summary["accuracy_per_slot"],
    )


def _run_rows(
    step: HeldoutStep,
    feed: Feed,
    rows: range,
    ranks: Ranks,
    *,
    block_size: int,
    keep_alive: Callable[[], None],
    shift: int,
) -> tuple[list[float], list[tuple[float, int]]]:
    """Sums of the metrics, and of every document the total and the number of its blocks' accepted lengths.

    Every row gets the features of the row `shift` places on. A document lies in one row, so no rank shares one.
    """
    metrics = Metrics(block_size, ranks.device)
    accepted: list[tuple[float, int]] = []
    own = list(range(ranks.rank, len(rows), ranks.world_size))
    rows_per_run = len(feed.staged.row_ids_R)
    for i in range(0, len(own), rows_per_run):
        chunk = own[i : i + rows_per_run]
        feature_rows = [rows[(index + shift) % len(rows)] for index in chunk]
        feed.load([rows[index] for index in chunk], epoch=0, feature_rows=feature_rows)
        step.run()
        keep_alive()
        metrics.add(step.result)
        accepted += _by_document(step.result)
    ranks.sum_(metrics.sums)
    return metrics.sums.tolist(), [pair for part in ranks.gather(accepted) for pair in part]


def _by_document(result: BlockResult) -> list[tuple[float, int]]:
    documents = result.document_ids_RN[result.is_block_RN].cpu()
    lengths = result.accepted_RN[result.is_block_RN].cpu().double()
    _, index, counts = documents.unique(return_inverse=True, return_counts=True)
    totals = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, index, lengths)
    return list(zip(totals.tolist(), counts.tolist(), strict=True))


def _interval(accepted: list[tuple[float, int]]) -> Interval:
    totals, counts = torch.tensor(accepted, dtype=torch.float64).unbind(1)
    return mean_by_document(totals, counts)
