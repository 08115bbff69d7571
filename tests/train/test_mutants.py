"""The mistakes that cost others weeks, made on purpose: each must score clearly below the right drafter.

A tiny random target, text that is predictable from its context and from nothing else, a cache made by `extract`, a
training run of the product. Each mutant is trained with one function of the product replaced and then evaluated with
correct labels, features and mask, as the right drafter is.

The text: a document has a topic, named by its first token. A topic is a cycle of all the letters in an order of its
own, and the document walks along it from a random letter. So the next letter follows from this one and the topic: who
reads the document's own context knows all, who reads other documents' or misreads features knows one time in
NUM_TOPICS what follows, and who sees the answers learns to copy them and nothing else.
"""

import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.random_target import MASK_ID, TargetShape, make_random_target
from shards.reader import CacheReader
from train.blocks import Blocks, build_blocks
from train.checkpoint import load_checkpoint
from train.config import RunConfig
from train.feed import Feed
from train.heldout import evaluate
from train.ranks import Ranks
from train.records import latest_checkpoint
from train.run import train
from train.target_head import TargetHead
from train.trainer import Trainer

ROOT = Path(__file__).parents[2]
NUM_TOPICS = 6
LETTERS = "abcdefghijkl"
TARGET = TargetShape(
    hidden_size=64,
    num_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=320,
    rope_theta=1e4,
)
WEIGHT_SCALE = 10.0  # weights of deviation 0.2, with which attention and MLP have an effect
LAYER_GROWTH = 1.6  # every layer adds more than the one before: its output is not nearly the next one's
CONFIG = f"""
[target]
path = "{{directory}}/target"
dtype = "float32"
hidden_size = {TARGET.hidden_size}
num_layers = {TARGET.num_layers}
vocab_size = {TARGET.vocab_size}
mask_token_id = {MASK_ID}

[data]
files = ["{{directory}}/data.jsonl"]
holdout_fraction = 0.08

[cache]
row_tokens = 512
layers = [0, 1, 2, 3, 4, 5]

[drafter]
num_layers = 2
block_size = 8
target_layer_ids = [1, 3, 5]
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
intermediate_size = 128
rope_theta = 1e4
init_std = 0.03

[train]
num_anchors = 48
rows_per_step = 1
epochs = 1000
max_steps = 300
lr = 3e-3
precision = "fp32"
log_every = 100
save_every = 300
eval_every = 300
"""
MUTANTS = ("labels shifted by one", "layer ids off by one", "sees past the anchor", "sees the neighbours")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A directory with mutants.toml and cache/, extracted from the tiny target."""
    directory = tmp_path_factory.mktemp("mutants")
    make_target(directory / "target")
    write_text(directory / "data.jsonl", num_documents=680)
    config = directory / "mutants.toml"
    config.write_text(CONFIG.format(directory=directory), encoding="utf-8")
    command = [sys.executable, "-m", "extract", "--config", config, "--cache", directory / "cache"]
    subprocess.run(command, cwd=ROOT, check=True)
    return directory


def make_target(folder: Path) -> None:
    """A random target whose layers differ: at the usual initial weights they would hardly do anything."""
    make_random_target(folder, TARGET)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            if weight.ndim > 1:
                weight *= WEIGHT_SCALE
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= LAYER_GROWTH ** int(name.split(".")[2])
        save_file(weights, path, {"format": "pt"})


def write_text(path: Path, *, num_documents: int) -> None:
    rng = random.Random(0)
    cycles = ["".join(rng.sample(LETTERS, len(LETTERS))) for _ in range(NUM_TOPICS)]
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(num_documents):
            topic, start, length = rng.randrange(NUM_TOPICS), rng.randrange(len(LETTERS)), rng.randint(20, 60)
            walk = "".join(cycles[topic][(start + i) % len(LETTERS)] for i in range(length))
            file.write(json.dumps({"text": "ABCDEFGH"[topic] + walk}) + "\n")


def train_and_score(directory: Path, mutant: str | None) -> tuple[float, float]:
    """Held-out τ of a drafter trained with one mistake, or none: with context and without. Needs its own process."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    config = RunConfig.load(directory / "mutants.toml")
    run = directory / f"run-{mutant}"
    with mistake(mutant):
        train(config, directory / "cache", run, None)
    return score(config, directory / "cache", run)


def score(config: RunConfig, cache: Path, run: Path) -> tuple[float, float]:
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    head = TargetHead.load(
        cache,
        vocab_size=config.target.vocab_size,
        hidden_size=config.target.hidden_size,
        device=ranks.device,
        dtype=torch.float32,
    )
    trainer = Trainer(config, head, ranks, num_steps=1)
    load_checkpoint(latest_checkpoint(run), config, trainer)
    with CacheReader(cache) as reader:
        plan = reader.manifest.plan
        feed = Feed(reader, config.drafter.target_layer_ids, trainer.rows)
        rows = range(plan.num_train_rows, plan.num_rows)
        result = evaluate(
            trainer.heldout_step, feed, rows, ranks, block_size=config.drafter.block_size, keep_alive=lambda: None
        )
    return result.acceptance_length.mean, result.acceptance_length_without_context.mean


def mistake(mutant: str | None):
    """The context in which training makes this mistake."""
    if mutant is None:
        return patch("train.step.build_blocks", build_blocks)
    if mutant == "layer ids off by one":
        return patch("train.run.Feed", feed_layers_below)
    return patch("train.step.build_blocks", lambda **inputs: BLOCK_MISTAKES[mutant](build_blocks(**inputs), inputs))


def feed_layers_below(reader: CacheReader, layers: tuple[int, ...], staged: object) -> Feed:
    """hidden_states[i] of transformers taken for the output of layer i, which is hidden_states[i + 1]."""
    return Feed(reader, [layer - 1 for layer in layers], staged)


def shift_labels(blocks: Blocks, inputs: dict[str, Tensor]) -> Blocks:
    following_RT = inputs["input_ids_RT"].roll(-1, dims=1)
    return blocks._replace(labels_RNB=build_blocks(**inputs | {"input_ids_RT": following_RT}).labels_RNB)


def see_past_the_anchor(blocks: Blocks, inputs: dict[str, Tensor]) -> Blocks:
    return blocks._replace(context_end_RN=blocks.context_end_RN + inputs["block_size"] * inputs["is_block_RN"])


def see_the_neighbours(blocks: Blocks, inputs: dict[str, Tensor]) -> Blocks:
    return blocks._replace(context_start_RN=torch.zeros_like(blocks.context_start_RN))


BLOCK_MISTAKES: dict[str, Callable[[Blocks, dict[str, Tensor]], Blocks]] = {
    "labels shifted by one": shift_labels,
    "sees past the anchor": see_past_the_anchor,
    "sees the neighbours": see_the_neighbours,
}


@pytest.fixture(scope="module")
def scores(workspace) -> dict[str | None, tuple[float, float]]:
    """Two trainings at a time, each on one core."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {mutant: pool.submit(train_and_score, workspace, mutant) for mutant in (None, *MUTANTS)}
        return {mutant: future.result() for mutant, future in futures.items()}


def test_the_right_drafter_learns_the_text_from_its_context(scores):
    with_context, without_context = scores[None]
    assert with_context >= 3.0
    assert without_context < 1.5


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_scores_clearly_lower(scores, mutant):
    """Less than half of what the right drafter gets accepted beyond the bonus token."""
    right, _ = scores[None]
    wrong, _ = scores[mutant]
    assert wrong - 1 < 0.5 * (right - 1), f"{mutant}: τ {wrong:.2f}, the right drafter's is {right:.2f}"
