"""`--check`: what a run would be and need, from the config and the manifest alone, without GPU or shards."""

import json
import math
from pathlib import Path
from typing import Any

from shards.codec import CODECS, bytes_per_token
from shards.manifest import MANIFEST_FILE, Manifest
from shards.schema import missing_shards
from train.config import RunConfig, default_target_layer_ids
from train.export import exported_shapes
from train.head import CHUNK_LOGITS
from train.order import RowOrder

BYTES = {"fp32": 4, "bf16": 2}
GIB = 1 << 30
STEP_SECONDS_EXAMPLE = 1.0  # the disk speed needed is given for a step of this length


def check(config: RunConfig, cache: Path, *, as_json: bool) -> int:
    """Print the resolved plan of a run. Raises CacheError when there is a cache and it does not fit the config."""
    plan = resolve(config, cache)
    if as_json:
        print(json.dumps(plan, indent=1))
        return 0
    print(f"drafter            {plan['num_parameters']:,} parameters, γ {plan['gamma']:g}")
    layers = list(config.drafter.target_layer_ids)
    published = list(default_target_layer_ids(config.target.num_layers, len(layers)))
    print(f"context layers     {layers}" + ("" if layers == published else f"; published drafters take {published}"))
    print(
        f"step               {config.train.rows_per_step} rows = {plan['slots_per_step']:,} token slots over "
        f"{plan['num_processes']} process(es) × {plan['num_micro_steps']} micro-step(s) of "
        f"{plan['token_budget']:,} slots, {config.train.num_anchors} anchors a row"
    )
    print(f"read from disk     {plan['bytes_per_step'] / 1e6:,.1f} MB a step, all processes together")
    print(f"                   {plan['bytes_per_second_at_1s'] / 1e9:.2f} GB/s at {STEP_SECONDS_EXAMPLE:g} s a step")
    print(f"memory of a GPU    {plan['memory_bytes'] / GIB:.1f} GiB (estimate)")
    for name, size in plan["memory"].items():
        print(f"  {name:<17}{size / GIB:.2f} GiB")
    if plan["num_steps"] is None:
        per_million = f"{plan['steps_per_million_tokens']:.1f} per million tokens and epoch"
        print(f"steps              {per_million}; there is no cache in {cache}")
    else:
        rows = f"{plan['num_train_rows']:,} rows"
        print(f"steps              {plan['num_steps']:,} in {config.train.epochs} epochs of {rows}")
        if plan["num_missing_shards"]:
            print(f"cache              {plan['num_missing_shards']} shards are missing: `make extract` makes them")
    return 0


def resolve(config: RunConfig, cache: Path) -> dict[str, Any]:
    settings = config.train
    num_processes = len(settings.gpus) if settings.gpus else 1
    slots_per_step = settings.rows_per_step * config.cache.row_tokens
    memory = memory_estimate(config)
    bytes_per_step = slots_per_step * (feature_bytes(config) + 13)  # 3 int32 and the loss mask beside the features
    plan: dict[str, Any] = {
        "num_parameters": num_parameters(config),
        "gamma": config.gamma,
        "num_processes": num_processes,
        "num_micro_steps": settings.num_micro_steps(num_processes),
        "token_budget": settings.rows_per_micro_step * config.cache.row_tokens,
        "slots_per_step": slots_per_step,
        "bytes_per_step": bytes_per_step,
        "bytes_per_second_at_1s": bytes_per_step / STEP_SECONDS_EXAMPLE,
        "memory": memory,
        "memory_bytes": sum(memory.values()),
        "steps_per_million_tokens": 1e6 / slots_per_step,
        "num_steps": None,
        "num_train_rows": None,
        "num_missing_shards": None,
    }
    if (cache / MANIFEST_FILE).exists():
        manifest = Manifest.read(cache)
        manifest.check_config(config.target, config.data, config.cache, cache)
        plan["num_steps"] = RowOrder.of(config, manifest.plan).num_steps(settings)
        plan["num_train_rows"] = manifest.plan.num_train_rows
        plan["num_missing_shards"] = len(missing_shards(cache, manifest))
    return plan


def num_parameters(config: RunConfig) -> int:
    return sum(math.prod(shape) for shape in exported_shapes(config).values())


def feature_bytes(config: RunConfig) -> int:
    """Stored bytes of one token's features."""
    return len(config.drafter.target_layer_ids) * bytes_per_token(CODECS[config.cache.codec], config.target.hidden_size)


def memory_estimate(config: RunConfig) -> dict[str, int]:
    """Bytes of one rank, by what they are for. Activations count what the backward keeps of every layer."""
    drafter, target, settings = config.drafter, config.target, config.train
    element = BYTES[settings.precision]
    parameters = num_parameters(config)
    tokens = settings.rows_per_micro_step * config.cache.row_tokens
    slots = settings.rows_per_micro_step * settings.num_anchors * drafter.block_size
    query = drafter.num_attention_heads * drafter.head_dim
    key = drafter.num_key_value_heads * drafter.head_dim
    per_slot = 6 * target.hidden_size + 4 * query + 6 * key + 4 * drafter.intermediate_size
    per_token = 6 * key
    return {
        "weights": element * parameters if element < 4 else 0,
        "optimizer": 16 * parameters,  # masters, gradients, two moments in fp32
        "target's head": 2 * element * target.vocab_size * target.hidden_size,
        "features": tokens * (feature_bytes(config) + element * len(drafter.target_layer_ids) * target.hidden_size),
        "activations": element * drafter.num_layers * (slots * per_slot + tokens * per_token),
        "logits": 3 * 4 * min(CHUNK_LOGITS, slots * target.vocab_size),
    }
