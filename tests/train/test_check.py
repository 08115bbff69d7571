"""`--check` for people: what fits which GPU, in words, and numbers that agree with their nouns."""

from pathlib import Path

import pytest
import torch

from tests.train.caches import write_config
from train.check import compare_with_gpu, count, describe, resolve
from train.config import RunConfig


@pytest.mark.parametrize(
    ("needed_gb", "visible_bytes", "said"),
    [
        (79.9, None, "fits a GPU of 80 GB"),
        (80.1, None, "fits a GPU of 141 GB"),
        (141.1, None, "more than a GPU of 141 GB has; lower train.rows_per_micro_step or train.num_anchors"),
        (23.9, 24 * 10**9, "fits the 24 GB of this GPU"),
        (24.1, 24 * 10**9, "WARNING, more than the 24 GB of this GPU; lower"),
    ],
)
def test_memory_is_compared_with_the_gpu_that_is_there_or_in_words(needed_gb, visible_bytes, said):
    assert compare_with_gpu(needed_gb, visible_bytes).startswith(said)


@pytest.mark.parametrize(
    ("number", "noun", "said"), [(1, "row", "1 row"), (2_000, "row", "2,000 rows"), (3, "process", "3 processes")]
)
def test_a_number_agrees_with_its_noun(number, noun, said):
    assert count(number, noun) == said


@pytest.mark.parametrize(
    ("overrides", "said", "unsaid"),
    [
        (["train.rows_per_step=1"], "1 row = 48 token slots over 1 process × 1 micro-step of 48 slots", "of a GPU"),
        (["train.rows_per_step=6"], "6 rows = 288 token slots over 1 process × 6 micro-steps of 48 slots", "of a GPU"),
        (["train.precision=bf16"], "memory of a GPU", "on the CPU"),
        (["train.precision=fp8"], "8-bit copies", "on the CPU"),
    ],
)
@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="says what is said where no GPU is")
def test_the_plan_says_where_it_is_for(tmp_path, overrides, said, unsaid):
    config = RunConfig.load(write_config(Path(tmp_path) / "tiny.toml"), overrides)
    text = "\n".join(describe(config, tmp_path, resolve(config, tmp_path)))
    assert said in text
    assert unsaid not in text
    assert f"there is no cache in {tmp_path}" in text
