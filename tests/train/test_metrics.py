"""What a run reports: ratios of sums, intervals over documents, held-out evaluation with and without context."""

import math
from collections.abc import Iterator

import pytest
import torch

from shards.reader import CacheReader
from tests.train.caches import HELDOUT_ROWS, TRAIN_ROWS, write_cache, write_config
from train.config import RunConfig
from train.feed import Feed
from train.heldout import evaluate
from train.metrics import Metrics, mean_by_document, summarise
from train.ranks import Ranks
from train.step import BlockResult
from train.target_head import TargetHead
from train.trainer import Trainer

CPU = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
ROWS = range(len(TRAIN_ROWS), len(TRAIN_ROWS) + len(HELDOUT_ROWS))


def result(*, loss_sum: float, weight_sum: float, supervised: list, correct: list, accepted: list, is_block: list):
    return BlockResult(
        loss_sum=torch.tensor(loss_sum),
        weight_sum=torch.tensor(weight_sum),
        is_correct_RNB=torch.tensor([correct], dtype=torch.bool),
        supervised_RNB=torch.tensor([supervised], dtype=torch.bool),
        accepted_RN=torch.tensor([accepted]),
        document_ids_RN=torch.zeros(1, len(accepted), dtype=torch.int32),
        is_block_RN=torch.tensor([is_block]),
    )


def test_metrics_are_ratios_of_sums():
    """Never means of means: the second micro-step has a third of the weight and one block of two."""
    metrics = Metrics(3, CPU.device)
    metrics.add(
        result(
            loss_sum=6.0,
            weight_sum=3.0,
            supervised=[[0, 1, 1], [0, 1, 0]],
            correct=[[0, 1, 1], [0, 0, 1]],  # a slot that isn't supervised doesn't count, right or wrong
            accepted=[3, 1],
            is_block=[True, True],
        )
    )
    metrics.add(
        result(
            loss_sum=4.0,
            weight_sum=1.0,
            supervised=[[0, 1, 1], [0, 0, 0]],
            correct=[[0, 1, 0], [0, 0, 0]],
            accepted=[2, 1],
            is_block=[True, False],
        )
    )
    summary = summarise(metrics.sums.tolist(), 3)
    assert summary == {"loss": 10 / 4, "acceptance_length": 6 / 3, "accuracy_per_slot": [2 / 3, 1 / 2]}


def test_nothing_counted_is_none_and_not_zero():
    assert summarise(Metrics(3, CPU.device).sums.tolist(), 3) == {
        "loss": None,
        "acceptance_length": None,
        "accuracy_per_slot": [None, None],
    }


def test_a_step_that_is_not_finite_does_not_spoil_the_interval():
    """It changes no weights and is counted; the loss that is reported is that of the other steps."""
    metrics = Metrics(2, CPU.device)
    for loss_sum in (4.0, math.nan):
        metrics.add(
            result(
                loss_sum=loss_sum,
                weight_sum=2.0,
                supervised=[[0, 1]],
                correct=[[0, 1]],
                accepted=[2],
                is_block=[True],
            )
        )
    assert summarise(metrics.sums.tolist(), 2)["loss"] == 2.0


def test_the_interval_of_equal_documents_is_that_of_a_mean():
    """With n blocks in each of D documents, the ratio is the mean of the documents' means m and its standard error
    s(m)/√D."""
    means = torch.tensor([1.0, 3.0, 2.0, 5.0], dtype=torch.float64)
    counts = torch.full((4,), 6.0, dtype=torch.float64)
    interval = mean_by_document(means * counts, counts)
    assert interval.mean == pytest.approx(2.75)
    assert interval.half_width == pytest.approx(1.96 * means.std().item() / 2)


def test_the_interval_pools_documents_by_their_blocks():
    interval = mean_by_document(torch.tensor([10.0, 2.0]).double(), torch.tensor([5.0, 1.0]).double())
    assert interval.mean == pytest.approx(2.0)
    assert interval.half_width == pytest.approx(0.0)


def test_one_document_gives_no_interval():
    assert mean_by_document(torch.tensor([6.0]).double(), torch.tensor([4.0]).double()) == (1.5, None)


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Iterator[CacheReader]:
    """Of a cache with three different tokens, so that some are guessed right."""
    directory = tmp_path_factory.mktemp("heldout")
    config = RunConfig.load(write_config(directory / "tiny.toml"))
    with CacheReader(write_cache(directory / "cache", config, num_different_tokens=3)) as reader:
        yield reader


@pytest.fixture(scope="module")
def trainer(reader, tmp_path_factory) -> Trainer:
    """Two rows at a time; trained until some guesses are right, then shaken so that the features matter to them."""
    path = write_config(tmp_path_factory.mktemp("config") / "tiny.toml")
    config = RunConfig.load(path, ["train.rows_per_step=2", "train.rows_per_micro_step=2"])
    head = TargetHead.load(reader.cache, vocab_size=40, hidden_size=16, device=CPU.device, dtype=torch.float32)
    trainer = Trainer(config, head, CPU, num_steps=40)
    feed = Feed(reader, (1, 4), trainer.rows)
    for k in range(40):
        feed.load([k % 11, 5], epoch=k)
        trainer.step.micro_step(0)
    trainer.flat.masters.add_(0.2 * torch.randn(trainer.flat.masters.shape, generator=torch.Generator().manual_seed(1)))
    return trainer


def test_heldout_evaluation_pools_all_blocks_with_and_without_their_context(reader, trainer):
    """Three held-out rows in runs of two: the last run is half empty. Row r's stand-in features are row r+1's."""
    feed = Feed(reader, (1, 4), trainer.rows)
    found = evaluate(trainer.heldout_step, feed, ROWS, CPU, block_size=4, keep_alive=lambda: None)

    losses, weights, accepted, accepted_without = 0.0, 0.0, [], []
    for i, row in enumerate(ROWS):
        for lengths, feature_row in ((accepted, row), (accepted_without, ROWS[(i + 1) % 3])):
            feed.load([row], epoch=0, feature_rows=[feature_row])
            trainer.heldout_step.run()
            one = trainer.heldout_step.result
            lengths += one.accepted_RN[one.is_block_RN].tolist()
            if feature_row == row:
                losses, weights = losses + one.loss_sum.item(), weights + one.weight_sum.item()

    assert set(accepted) > {1, 2}
    assert accepted != accepted_without
    assert found.loss == pytest.approx(losses / weights, rel=1e-5)
    assert found.acceptance_length.mean == pytest.approx(sum(accepted) / len(accepted))
    assert found.acceptance_length_without_context.mean == pytest.approx(sum(accepted_without) / len(accepted_without))
    assert found.acceptance_length.half_width > 0


def test_heldout_evaluation_gives_the_same_numbers_again(reader, trainer):
    feed = Feed(reader, (1, 4), trainer.rows)
    first, second = (
        evaluate(trainer.heldout_step, feed, ROWS, CPU, block_size=4, keep_alive=lambda: None) for _ in range(2)
    )
    assert first == second


def test_without_heldout_rows_there_is_no_result(reader, trainer):
    feed = Feed(reader, (1, 4), trainer.rows)
    assert evaluate(trainer.heldout_step, feed, range(0), CPU, block_size=4, keep_alive=lambda: None) is None
