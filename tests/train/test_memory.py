"""The estimate of memory against what was measured on an H200."""

from pathlib import Path

import pytest

from train.config import RunConfig
from train.memory import memory_estimate

CONFIG = Path(__file__).parents[2] / "configs/qwen3-8b.toml"
ONE_ROW = ("cache.row_tokens=4096", "train.num_anchors=512", "train.rows_per_micro_step=1")
MEASURED = {"bf16": 27.4e9, "fp8": 29.9e9}  # allocated at the peak of a step of one row


def estimate(*overrides: str) -> dict[str, int]:
    config = RunConfig.load(CONFIG, [*ONE_ROW, *overrides])
    return memory_estimate(config, num_processes=1, is_for_gpu=True)


@pytest.mark.parametrize("precision", MEASURED)
def test_the_estimate_is_within_a_tenth_of_what_was_measured(precision):
    total = sum(estimate("train.rows_per_step=1", f"train.precision={precision}").values())
    assert total == pytest.approx(MEASURED[precision], rel=0.1)


def test_gradients_are_summed_over_micro_steps_in_fp32():
    one, several = estimate("train.rows_per_step=1"), estimate("train.rows_per_step=2")
    assert several.pop("gradients") == 2 * one.pop("gradients")
    assert several == one


def test_rows_and_activations_grow_with_the_rows_of_a_micro_step():
    one, two = (estimate(f"train.rows_per_step={n}", f"train.rows_per_micro_step={n}") for n in (1, 2))
    grown = {name for name in one if two[name] == 2 * one[name] != 0}
    assert grown == {"rows", "activations"}
