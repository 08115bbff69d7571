"""`python -m benchmarks.step CONFIG`: the training step on one GPU, captured, at the shapes of a config.

Correctness first: replayed losses must equal the same steps run uncaptured, bit for bit. Then the median and spread
of the step, token slots per second, and the model's arithmetic rate: block, context and head products of forward and
backward (the head has no weight gradient; fc counts like any other layer), attention not counted.
"""

import argparse
import itertools
import json
import platform
import statistics
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.synthetic import fill_rows, random_trainer
from shards.errors import RunError, UsageError, run_command
from train.attention import block_attention
from train.config import RunConfig
from train.graph import prepare
from train.head import head_loss
from train.runtime import (
    compute_on_one_thread_deterministically,
    keep_compiled_kernels,
    quiet_thread_starters,
)
from train.trainer import DTYPES, Trainer

CHECKED_STEPS = 3
MATRIX_RATE_SHAPE = (8192, 4096, 12288)  # of the product whose rate the step's is compared with


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.split("\n")[0])
    parser.add_argument("config", metavar="CONFIG", help="a TOML file of configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--documents", type=int, default=4, help="documents of equal length in a row (default: 4)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (default: 20)")
    parser.add_argument("--json", action="store_true")
    return run_command(lambda: run(parser.parse_intermixed_args()))


def run(arguments: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise UsageError("benchmarks.step measures a CUDA GPU, and there is none")
    config = RunConfig.load(arguments.config, [*arguments.overrides, "train.gpus=[0]"])
    if config.train.num_micro_steps(1) != 1:
        raise UsageError(
            "benchmarks.step measures one micro-step a step: set train.rows_per_step to rows_per_micro_step"
        )
    quiet_thread_starters()
    keep_compiled_kernels(Path(config.train.compile_cache))
    compute_on_one_thread_deterministically()
    device = torch.device("cuda", 0)
    length = config.cache.row_tokens // arguments.documents
    trainer = random_trainer(config, device)
    documents = [[length] * arguments.documents] * config.train.rows_per_micro_step
    fill_rows(trainer.rows, documents, config.target.vocab_size, seed=1)
    check_replay_equals_eager(trainer)
    result = environment() | measure(config, trainer, num_steps=arguments.steps)
    result |= measure_parts(config, trainer, num_steps=arguments.steps, step_ms=result["step_ms"])
    print(json.dumps(result, indent=1) if arguments.json else "\n".join(f"{k:24}{v}" for k, v in result.items()))
    return 0


def check_replay_equals_eager(trainer: Trainer) -> None:
    """Run steps by replay and again uncaptured from the same state; losses, masters and moments must be equal bits."""
    saved = {name: tensor.clone() for name, tensor in trainer.flat.state().items()}

    def take_steps(step: Callable[[], None]) -> list[Tensor]:
        for name, tensor in trainer.flat.state().items():
            tensor.copy_(saved[name])
        trainer.flat.refresh_weights()
        for counter in trainer.step.counters:
            counter.zero_()
        sums = []
        for _ in range(CHECKED_STEPS):
            step()
            sums.append(trainer.step.metrics.sums.clone())
            trainer.step.metrics.reset()
        return sums + [tensor.clone() for tensor in trainer.flat.state().values()]

    replayed = take_steps(trainer.step.whole_step)
    eager = take_steps(trainer.step.whole_step.function)
    if not all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True)):
        raise RunError("replayed and uncaptured steps differ: losses, masters or moments are not the same bits")


def measure(config: RunConfig, trainer: Trainer, *, num_steps: int) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    times_ms = time_ms(lambda: trainer.step.micro_step(0), num_steps)
    median_ms = statistics.median(times_ms)
    slots = config.train.rows_per_step * config.cache.row_tokens
    return {
        "config": f"T {config.cache.row_tokens}, N {config.train.num_anchors}, rows {config.train.rows_per_step}",
        "precision": config.train.precision,
        "step_ms": round(median_ms, 2),
        "step_ms_min_max": [round(times_ms[0], 2), round(times_ms[-1], 2)],
        "tokens_per_second": round(slots / median_ms * 1000),
        "model_tflops": round(model_flop(config) / median_ms / 1e9, 1),
        "peak_memory_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
        "python_threads": threading.active_count(),
    }


def time_ms(function: Callable[[], Any], num_times: int) -> list[float]:
    """Milliseconds on the device of each call, ascending."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_times + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def measure_parts(config: RunConfig, trainer: Trainer, *, num_steps: int, step_ms: float) -> dict[str, Any]:
    """Parts of the step, each captured and timed alone at the step's shapes, and the rate of a plain bf16 product."""
    device = trainer.step.grad_norm.device
    parts = {
        "attention_ms": attention_of_all_layers(config, trainer),
        "head_ms": head_of_all_slots(config, trainer),
        "optimizer_ms": trainer.step._update_weights,
    }
    result: dict[str, Any] = {}
    for name, function in parts.items():
        captured = prepare(function, name, device, capture=True)
        result[name] = round(statistics.median(time_ms(captured, num_steps)), 2)
    result["rest_ms"] = round(step_ms - sum(result.values()), 2)
    m, k, n = MATRIX_RATE_SHAPE
    a, b = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (n, k)))
    product_ms = statistics.median(time_ms(lambda: torch.mm(a, b.t()), num_steps))
    rate = 2 * m * k * n / product_ms / 1e9
    result["bf16_product_tflops"] = round(rate, 1)
    result["share_of_product_rate"] = round(model_flop(config) / step_ms / 1e9 / rate, 3)
    return result


def attention_of_all_layers(config: RunConfig, trainer: Trainer) -> Callable[[], None]:
    """Attention, forward and backward, as often as there are layers, over the blocks of the staged rows."""
    drafter, device = config.drafter, trainer.rows.epoch.device
    anchors_RN, _, blocks = trainer.step.block_pass.draw_blocks(seed=0, epoch=0)
    R, N = anchors_RN.shape
    B, T, d = drafter.block_size, config.cache.row_tokens, drafter.head_dim
    h, g = drafter.num_attention_heads, drafter.num_key_value_heads
    shapes = ((R, N, B, h, d), (R, T, g, d), (R, T, g, d), (R, N, B, g, d), (R, N, B, g, d))
    dtype = DTYPES[config.train.precision]
    tensors = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    d_output = torch.randn(shapes[0], device=device).to(dtype)

    def run() -> None:
        for layer in range(drafter.num_layers):
            output = block_attention(
                *tensors,
                blocks.context_start_RN,
                blocks.context_end_RN,
                sliding_window=drafter.layer_window(layer),
                is_causal=drafter.layer_is_causal(layer),
            )
            torch.autograd.grad(output, tensors, d_output)

    return run


def head_of_all_slots(config: RunConfig, trainer: Trainer) -> Callable[[], None]:
    head, block_pass = trainer.head, trainer.step.block_pass
    num_slots = config.train.rows_per_micro_step * config.train.num_anchors * (config.drafter.block_size - 1)
    vocab_size, hidden_size = head.lm_head_VH.shape
    device = head.lm_head_VH.device
    hidden = torch.randn(num_slots, hidden_size, device=device).to(head.lm_head_VH.dtype).requires_grad_()
    labels = torch.randint(vocab_size, (num_slots,), device=device)
    weights = torch.ones(num_slots, device=device)

    def run() -> None:
        loss = head_loss(hidden, labels, weights, head.lm_head_VH, lm_head_float8=block_pass.lm_head_float8)
        torch.autograd.grad(loss.weighted_sum, hidden)

    return run


def model_flop(config: RunConfig) -> int:
    """Floating-point operations of the matrix products of one step, forward and backward."""
    drafter, hidden = config.drafter, config.target.hidden_size
    tokens = config.train.rows_per_step * config.cache.row_tokens
    blocks = config.train.rows_per_step * config.train.num_anchors
    slots = blocks * drafter.block_size
    query, key = (drafter.head_dim * n for n in (drafter.num_attention_heads, drafter.num_key_value_heads))
    per_slot = hidden * (2 * query + 2 * key + 3 * drafter.intermediate_size)
    trained = tokens * len(drafter.target_layer_ids) * hidden * hidden
    trained += drafter.num_layers * (slots * per_slot + tokens * hidden * 2 * key)
    head_products = 2 * blocks * (drafter.block_size - 1) * hidden * config.target.vocab_size
    return 2 * (3 * trained + head_products)


def environment() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
