"""Tiny caches of random tokens and features, written by the product's writer, for runs of a second."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from shards.codec import CODECS
from shards.manifest import Identity, Manifest, Plan
from shards.schema import HEAD_CONFIG_FILE, HEAD_FILE, PLAN_DIRECTORY, PlanArrays, hidden_name, scales_name
from shards.writer import ShardRows, mark_complete, new_cache, publish_cache, write_shard
from train.config import RunConfig

CONFIG = """
[target]
path = "nowhere"
dtype = "float32"
hidden_size = 16
num_layers = 6
vocab_size = 40
mask_token_id = 39

[data]
files = ["nowhere.jsonl"]

[cache]
row_tokens = 48
layers = [1, 2, 4]

[drafter]
num_layers = 2
block_size = 4
target_layer_ids = [1, 4]
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
intermediate_size = 24
rope_theta = 10_000.0

[train]
num_anchors = 8
rows_per_step = 6
epochs = 2
lr = 1e-2
gamma = 3.0
precision = "fp32"
log_every = 1
save_every = 2
eval_every = 2
"""
# Unequal rows, so that an average of averages is not the average: full, half empty, with hardly a block, with none.
TRAIN_ROWS = [[48], [20, 28], [5, 3], [2], [1, 1, 1], [10, 9, 8, 7], [30], [12, 12, 12, 12], [47], [3] * 16, [25, 20]]
HELDOUT_ROWS = [[20, 20], [16, 15, 14], [40]]


def write_config(path: Path) -> Path:
    path.write_text(CONFIG, encoding="utf-8")
    return path


def write_cache(
    cache: Path,
    config: RunConfig,
    *,
    train_rows: Sequence[Sequence[int]] = TRAIN_ROWS,
    heldout_rows: Sequence[Sequence[int]] = HELDOUT_ROWS,
    rows_per_shard: int = 4,
    num_different_tokens: int = 39,
    head_value: float | None = None,
    bad_row: int | None = None,
) -> Path:
    """A whole cache with these document lengths in its rows; one token in ten is left out of the loss.

    Tokens are drawn from the first `num_different_tokens`. `head_value` takes the place of one weight of the head;
    the features of `bad_row` are more than can be computed with.
    """
    rows = [*train_rows, *heldout_rows]
    arrays = _plan_arrays(rows, len(train_rows), num_different_tokens)
    plan = Plan(
        num_rows=len(rows),
        num_train_rows=len(train_rows),
        rows_per_shard=rows_per_shard,
        num_documents=len(arrays.document_row),
        num_heldout_documents=int(arrays.document_split.sum()),
        num_tokens=len(arrays.token_ids),
        num_supervised_tokens=int(arrays.loss_mask.sum()),
        sources=("random",),
        num_left_out={},
        num_truncated=0,
    )
    manifest = Manifest(
        target=config.target,
        data=config.data,
        cache=config.cache,
        identity=Identity(target="0", tokenizer="0", chat_template="0", data="0"),
        plan=plan,
        checksums={},
        software={},
    )
    with new_cache(cache) as staging:
        arrays.write(staging / PLAN_DIRECTORY)
        _write_head(staging, config, head_value)
        manifest = publish_cache(cache, staging, manifest)
    for shard in range(plan.num_shards):
        write_shard(cache, manifest, shard, _shard_rows(manifest, arrays, shard, bad_row))
    assert mark_complete(cache, manifest)
    return cache


def _plan_arrays(rows: Sequence[Sequence[int]], num_train_rows: int, num_different_tokens: int) -> PlanArrays:
    documents = [
        (row, sum(lengths[:i]), length) for row, lengths in enumerate(rows) for i, length in enumerate(lengths)
    ]
    num_tokens = sum(length for _, _, length in documents)
    generator = np.random.default_rng(0)
    return PlanArrays(
        document_record=np.arange(len(documents), dtype=np.int64),
        document_source=np.zeros(len(documents), np.uint8),
        document_split=np.array([row >= num_train_rows for row, _, _ in documents], np.uint8),
        document_row=np.array([row for row, _, _ in documents], np.int64),
        document_start=np.array([start for _, start, _ in documents], np.int32),
        document_tokens=np.array([length for _, _, length in documents], np.int32),
        token_ids=generator.integers(num_different_tokens, size=num_tokens, dtype=np.int32),
        loss_mask=(generator.random(num_tokens) < 0.9).astype(np.uint8),
    )


def _shard_rows(manifest: Manifest, arrays: PlanArrays, shard: int, bad_row: int | None) -> ShardRows:
    row_ids = manifest.plan.shard_rows(shard)
    rows = [arrays.row_arrays(row, manifest.cache.row_tokens) for row in row_ids]
    slots = {name: np.stack([getattr(row, name) for row in rows]) for name in vars(rows[0])}
    hidden, scales = {}, {}
    for layer in manifest.cache.layers:
        values = np.stack([random_features(manifest, row, layer) for row in row_ids])
        if bad_row in row_ids:
            values[row_ids.index(bad_row)] = 3e38  # finite, as a cache must be; a product with it is not
        encoded = CODECS[manifest.cache.codec].encode(np.where(slots["document_ids"][..., None] >= 0, values, 0))
        hidden[layer] = encoded.codes
        if encoded.scales is not None:
            scales[scales_name(hidden_name(layer))] = encoded.scales
    return ShardRows(row_ids=np.array(row_ids, np.int64), hidden=hidden, scales=scales, **slots)


def random_features(manifest: Manifest, row: int, layer: int) -> np.ndarray:
    shape = (manifest.cache.row_tokens, manifest.target.hidden_size)
    return np.random.default_rng([row, layer]).standard_normal(shape, dtype=np.float32)


def _write_head(staging: Path, config: RunConfig, value: float | None) -> None:
    shape = (config.target.vocab_size, config.target.hidden_size)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name in ("embed_tokens", "lm_head")}
    if value is not None:
        tensors["lm_head"][7, 3] = value
    save_file(tensors, staging / HEAD_FILE)
    settings = {
        "input_embedding_scale": 1.0,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 20.0,
        "tied": False,
    }
    (staging / HEAD_CONFIG_FILE).write_text(json.dumps(settings), encoding="utf-8")


def worker_environment(*, rank: int = 0, world_size: int = 1, store_port: int = 0) -> dict[str, str]:
    """What torchrun gives a worker. With several ranks, the store at `store_port` is another process's."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
