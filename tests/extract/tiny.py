"""A tiny target, a little text and the configuration that joins them, for the tests of extraction."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.random_target import MASK_ID, TargetShape, make_random_target
from extract.job import Job
from extract.prepare import prepare
from extract.run import finish
from extract.worker import work
from shards.manifest import Manifest
from shards.schema import missing_shards
from tests.reference.cache import read_shard

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 264,
    "rope_theta": 1e4,
}
SHAPES = {
    "llama, tied": TargetShape(**SIZES, family="llama", tied=True),
    "qwen3": TargetShape(**SIZES),
    "qwen3, sliding": TargetShape(**SIZES, sliding_window=6),
}
ROW_TOKENS = 64
LAYERS = (0, 2, 3)


def chat(*contents: str, system: str | None = None) -> dict[str, Any]:
    """A record whose messages are by user and assistant in turn."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"messages": [{"role": "system", "content": system}] * (system is not None) + turns}


def records() -> list[dict[str, Any]]:
    """Twenty chats and twenty texts of 10 to 50 tokens."""
    answers = [chat("q" * (i % 5), chr(ord("a") + i) * (i % 7 + 2)) | {"source": "chats"} for i in range(20)]
    texts = [{"text": chr(ord("A") + i) * (10 + 2 * i), "source": "texts"} for i in range(20)]
    return answers + texts


def write_jsonl(path: Path, values: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def write_config(directory: Path, *extra: str, target: str = "target", data: str = "data.jsonl") -> Path:
    """A configuration for a target and data below `directory`; 4 rows to a shard."""
    lines = [
        "[target]",
        f'path = "{directory / target}"',
        'dtype = "float32"',
        f"hidden_size = {SIZES['hidden_size']}",
        f"num_layers = {SIZES['num_layers']}",
        f"vocab_size = {SIZES['vocab_size']}",
        f"mask_token_id = {MASK_ID}",
        "[data]",
        f'files = ["{directory / data}"]',
        "holdout_fraction = 0.2",
        "min_supervised_tokens = 2",
        "[cache]",
        f"row_tokens = {ROW_TOKENS}",
        f"layers = {list(LAYERS)}",
        f"shard_bytes = {4 * len(LAYERS) * SIZES['hidden_size'] * 2 * ROW_TOKENS}",
        *extra,
    ]
    path = directory / "config.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_project(directory: Path, shape: TargetShape = SHAPES["qwen3"]) -> Path:
    """A target, data and a configuration below `directory`; returns the configuration."""
    make_random_target(directory / "target", shape)
    write_jsonl(directory / "data.jsonl", records())
    return write_config(directory)


def job_of(directory: Path, *overrides: str) -> Job:
    return Job.load(directory / "config.toml", overrides, directory / "cache")


def change_weight(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Replace a weight of the target; None takes it out."""
    (weights,) = (directory / "target").glob("*.safetensors")
    tensors = load_file(weights)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed}, weights, {"format": "pt"})


def extract_here(job: Job, monkeypatch: pytest.MonkeyPatch, *, num_shards: int | None = None) -> None:
    """Run a job in this process, as its only worker: of the missing shards the first `num_shards`, or all."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    manifest = prepare(job)
    work(job, missing_shards(job.directory, manifest)[:num_shards], [])
    finish(job)


def files_of(cache: Path) -> dict[str, bytes]:
    """Every file of a cache by its name."""
    return {os.path.relpath(path, cache): path.read_bytes() for path in sorted(cache.rglob("*")) if path.is_file()}


def read_all(cache: Path) -> dict[str, np.ndarray]:
    """Every array of all shards, joined, as an independent reader sees them."""
    manifest = Manifest.read(cache)
    dtypes = {"row_ids": np.int64, "loss_mask": np.uint8, "source_ids": np.uint8}
    shards = [read_shard(cache, shard) for shard in range(manifest.plan.num_shards)]
    joined = {}
    for name in shards[0]:
        dtype = np.uint16 if "hidden" in name else dtypes.get(name, np.int32)
        shape = {"row_ids": (-1,)}.get(name, (-1, ROW_TOKENS))
        shape = (-1, ROW_TOKENS, SIZES["hidden_size"]) if "hidden" in name else shape
        joined[name] = np.concatenate([np.frombuffer(shard[name], dtype).reshape(shape) for shard in shards])
    return joined
