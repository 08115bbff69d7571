"""What is said about a GPU that is too small: where its memory is, and settings that fit."""

from pathlib import Path

import torch

from extract.memory import advise, token_bytes, weight_bytes
from extract.target import Target, read_architecture
from tests.extract.tiny import LAYERS, ROW_TOKENS, job_of


def test_the_weights_are_those_that_are_loaded(copy: Path) -> None:
    job = job_of(copy)
    architecture = read_architecture(job.target, job.cache)
    loaded = Target.load(architecture, job.cache, torch.device("cpu"))
    decoder_bytes = sum(parameter.numel() * 4 for parameter in loaded.decoder.parameters())
    head_bytes = job.target.vocab_size * job.target.hidden_size * 4
    assert weight_bytes(architecture, LAYERS[-1] + 1) == decoder_bytes + head_bytes


def test_a_row_that_fits_is_named(copy: Path) -> None:
    job = job_of(copy, "cache.row_tokens=4096")
    architecture = read_architecture(job.target, job.cache)
    weights = weight_bytes(architecture, LAYERS[-1] + 1)
    a_quarter = 1024 * token_bytes(job, architecture) / 0.9
    said = advise(job, architecture, total=round(weights + 2e9 + a_quarter) + 2, others=round(2e9))
    assert said.startswith("of 2.0 GB the target's weights take 0.0 GB and other processes hold 2.0 GB, and a row of ")
    assert (
        "a row of 4,096 tokens needs more than the rest; cache.row_tokens=1024, for a cache of its own, would" in said
    )


def test_what_no_row_fits_beside_says_nothing_of_rows(copy: Path) -> None:
    job = job_of(copy)
    architecture = read_architecture(job.target, job.cache)
    weights = weight_bytes(architecture, LAYERS[-1] + 1)
    assert "lower the last of cache.layers" in advise(job, architecture, total=weights, others=0)
    said = advise(job, architecture, total=weights + 64, others=0)
    assert said.endswith(
        f"a row of {ROW_TOKENS} tokens needs more than the rest; free the GPU, or take one with more memory"
    )
