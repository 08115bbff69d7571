"""`--check`: what a run would be and need, from the config and the manifest alone. It needs no GPU."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shards.manifest import MANIFEST_FILE, Manifest
from shards.schema import missing_shards
from train.config import RunConfig, default_target_layer_ids
from train.memory import INPUT_BYTES, RESERVED_PER_ALLOCATED, feature_bytes, memory_estimate, num_parameters
from train.order import RowOrder
from train.start import start_notes

CARDS_GB = (80, 141)  # H100, H200
LESS_MEMORY = "lower train.rows_per_micro_step or train.num_anchors"
STEP_SECONDS_EXAMPLE = 1.0  # the disk speed needed is given for a step of this length


def check(config: RunConfig, cache: Path, *, as_json: bool) -> int:
    """Print the resolved plan of a run. Raises CacheError when there is a cache and it does not fit the config."""
    plan = resolve(config, cache)
    print(json.dumps(plan, indent=1) if as_json else "\n".join(describe(config, cache, plan)))
    return 0


def describe(config: RunConfig, cache: Path, plan: dict[str, Any]) -> Iterator[str]:
    """The plan in lines for people."""
    yield f"drafter            {plan['num_parameters']:,} parameters"
    yield f"loss               slot j of a block weighs exp(−(j − 1)/γ), with γ = {plan['gamma']:g} (train.gamma)"
    layers = list(config.drafter.target_layer_ids)
    published = list(default_target_layer_ids(config.target.num_layers, len(layers)))
    yield f"context layers     {layers}" + ("" if layers == published else f"; published drafters take {published}")
    yield (
        f"step               {count(config.train.rows_per_step, 'row')} = {plan['slots_per_step']:,} token slots over "
        f"{count(plan['num_processes'], 'process')} × {count(plan['num_micro_steps'], 'micro-step')} of "
        f"{plan['token_budget']:,} slots, {count(config.train.num_anchors, 'anchor')} a row"
    )
    yield f"read from disk     {plan['bytes_per_step'] / 1e6:,.1f} MB a step, all processes together"
    yield f"                   {plan['bytes_per_second_at_1s'] / 1e9:.2f} GB/s at {STEP_SECONDS_EXAMPLE:g} s a step"
    yield from describe_memory(plan)
    if plan["num_steps"] is None:
        per_million = f"{plan['steps_per_million_tokens']:.1f} per million tokens and epoch"
        yield f"steps              {per_million}; there is no cache in {cache}"
        return
    epochs, rows = count(config.train.epochs, "epoch"), count(plan["num_train_rows"], "row")
    yield f"steps              {plan['num_steps']:,}; {epochs} of {rows}"
    if missing := plan["num_missing_shards"]:
        yield f"cache              lacks {count(missing, 'shard')}: `make extract` makes what is missing"
    yield from (f"note               {note}" for note in plan["notes"])


def describe_memory(plan: dict[str, Any]) -> Iterator[str]:
    allocated, reserved = plan["memory_bytes"] / 1e9, plan["memory_reserved_bytes"] / 1e9
    if plan["is_for_gpu"]:
        yield f"memory of a GPU    {allocated:.1f} GB (estimate), {reserved:.0f} GB with the allocator's slack: " + (
            compare_with_gpu(reserved, plan["gpu_memory_bytes"])
        )
    else:
        yield f"memory             {allocated:.1f} GB a process (estimate); no GPU is visible: training is on the CPU"
    for name, size in plan["memory"].items():
        if size:
            yield f"  {name:<17}{size / 1e9:.2f} GB"


def compare_with_gpu(needed_gb: float, visible_bytes: int | None) -> str:
    """Whether so much fits the GPU of this machine, or in words that of another one."""
    if visible_bytes is not None:
        if needed_gb <= visible_bytes / 1e9:
            return f"fits the {visible_bytes / 1e9:.0f} GB of this GPU"
        return f"WARNING, more than the {visible_bytes / 1e9:.0f} GB of this GPU; {LESS_MEMORY}"
    for size_gb in CARDS_GB:
        if needed_gb <= size_gb:
            return f"fits a GPU of {size_gb} GB"
    return f"more than a GPU of {CARDS_GB[-1]} GB has; {LESS_MEMORY}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def resolve(config: RunConfig, cache: Path) -> dict[str, Any]:
    settings = config.train
    num_visible = torch.cuda.device_count()
    num_processes = len(settings.gpus) if settings.gpus else max(1, num_visible)
    is_for_gpu = bool(settings.gpus or num_visible) or settings.precision != "fp32"  # else training is on the CPU
    slots_per_step = settings.rows_per_step * config.cache.row_tokens
    memory = memory_estimate(config, num_processes=num_processes, is_for_gpu=is_for_gpu)
    memory_bytes = sum(memory.values())
    bytes_per_step = slots_per_step * (feature_bytes(config) + INPUT_BYTES)
    plan: dict[str, Any] = {
        "num_parameters": num_parameters(config),
        "gamma": config.gamma,
        "num_processes": num_processes,
        "num_micro_steps": settings.num_micro_steps(num_processes),
        "token_budget": settings.rows_per_micro_step * config.cache.row_tokens,
        "slots_per_step": slots_per_step,
        "bytes_per_step": bytes_per_step,
        "bytes_per_second_at_1s": bytes_per_step / STEP_SECONDS_EXAMPLE,
        "is_for_gpu": is_for_gpu,
        "memory": memory,
        "memory_bytes": memory_bytes,
        "memory_reserved_bytes": round(RESERVED_PER_ALLOCATED * memory_bytes) if is_for_gpu else memory_bytes,
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if num_visible else None,
        "steps_per_million_tokens": 1e6 / slots_per_step,
        "num_steps": None,
        "num_train_rows": None,
        "num_missing_shards": None,
        "notes": [],
    }
    if os.path.exists(cache / MANIFEST_FILE):
        manifest = Manifest.read(cache)
        manifest.check_config(config.target, config.data, config.cache, cache)
        plan["notes"] = manifest.moved(config.target, config.data) + start_notes(config)
        plan["num_steps"] = RowOrder.of(config, manifest.plan).num_steps(settings)
        plan["num_train_rows"] = manifest.plan.num_train_rows
        plan["num_missing_shards"] = len(missing_shards(cache, manifest))
    return plan
