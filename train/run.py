"""One training run, as one rank goes through it: model, step, feed, resume, and one loop.

Everything that can be refused was refused by the launcher (train/__main__.py); here a failure ends the run.
"""

import os
import time
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shards.errors import RunError
from shards.reader import CacheReader
from train.checkpoint import load_checkpoint
from train.config import RunConfig
from train.feed import Feed
from train.heldout import evaluate
from train.interrupt import Interrupt
from train.lock import locked
from train.metrics import summarise
from train.order import RowOrder
from train.progress import Progress
from train.ranks import Ranks
from train.readahead import Readahead, file_cache_bytes
from train.records import best_acceptance_length, name_rows, read_metrics
from train.rundir import MetricsLog, record_config
from train.runtime import compute_on_one_thread_deterministically
from train.saver import Saver
from train.start import record_start, start_weights
from train.step import TrainStep
from train.target_head import TargetHead
from train.trainer import DTYPES, Trainer
from train.watchdog import expect_a_step_within, rest


def train(config: RunConfig, cache: Path, run: Path, checkpoint: Path | None) -> None:
    """Train from `checkpoint`, or from the beginning; raises RunError when the run can't go on or is interrupted."""
    compute_on_one_thread_deterministically()
    saver = Saver(run, config) if os.environ["RANK"] == "0" else None  # a fork: before there are threads, and CUDA
    ranks = Ranks.join()
    reader = CacheReader(cache)
    plan = reader.manifest.plan

    head = TargetHead.load(
        cache,
        vocab_size=config.target.vocab_size,
        hidden_size=config.target.hidden_size,
        device=ranks.device,
        dtype=DTYPES[config.train.precision],
    )
    order = RowOrder.of(config, plan)
    num_steps = order.num_steps(config.train)
    started_s = time.monotonic()
    if ranks.is_first and ranks.device.type == "cuda":
        print(f"compiling the step, or taking what is in {config.train.compile_cache}", flush=True)
    trainer = Trainer(config, head, ranks, num_steps=num_steps)
    ready_s = time.monotonic() - started_s
    feed = Feed(reader, config.drafter.target_layer_ids, trainer.rows)

    first_step = 0
    if checkpoint is not None:
        load_checkpoint(checkpoint, config, trainer)
        first_step = int(trainer.step.counters.step)
    elif config.train.init_from is not None:
        trainer.flat.begin_with(start_weights(config))
    readahead = Readahead(
        reader,
        feed.layers,
        order.rank_rows(range(first_step, num_steps), rank=ranks.rank, world_size=ranks.world_size),
        num_rows=config.train.readahead_rows,
        memory_bytes=file_cache_bytes(),
    )
    if saver and ranks.device.type == "cuda":
        saver.page_lock()
    log: MetricsLog | None = None
    best = best_acceptance_length(line for line in read_metrics(run) if line["step"] <= first_step)

    heldout_rows = range(plan.num_train_rows, plan.num_rows)
    interrupt = Interrupt(ranks)
    ranks.barrier()  # from here on all save when they are asked to stop
    with (
        locked(run) if ranks.is_first else nullcontext(),
        closing(Progress(num_steps=num_steps, first_step=first_step, enabled=ranks.is_first)) as progress,
    ):
        progress.say(
            f"training on {describe(ranks)}: steps {first_step}..{num_steps}, run {run}; ready after {ready_s:.0f} s"
        )
        clock = IntervalClock(first_step)
        keep_alive = partial(expect_a_step_within, config.train.stall_seconds)
        keep_alive()
        for k in range(first_step, num_steps):
            micro_steps = order.micro_steps(
                k,
                rank=ranks.rank,
                world_size=ranks.world_size,
                rows_per_micro_step=config.train.rows_per_micro_step,
            )
            for i, micro_rows in enumerate(micro_steps):
                feed.load(micro_rows, epoch=order.epoch(k))
                trainer.step.micro_step(i)
                feed.wait.finish_step()
                readahead.advance(micro_rows)
            keep_alive()
            done = k + 1
            is_last = done == num_steps
            must_stop = interrupt.agreed()
            if not (is_last or must_stop or done % config.train.log_every == 0):
                continue

            ranks.wait_for_device()
            line = read_interval(config, trainer.step, ranks, order, done, clock, feed)
            line["save_stall_seconds"] = saver.take_stall() if saver else 0.0
            end_if_bad(config, trainer.step, line, run)
            trainer.step.faults.reset()
            is_best = False
            if is_last or done % config.train.eval_every == 0:
                heldout = evaluate(
                    trainer.heldout_step,
                    feed,
                    heldout_rows,
                    ranks,
                    block_size=config.drafter.block_size,
                    keep_alive=keep_alive,
                )
                line |= heldout.to_json() if heldout else {}
                is_best = heldout is not None and heldout.acceptance_length.mean > best
                best = max(best, best_acceptance_length([line]))
            if ranks.is_first:
                # Only now: a run that can't take its first steps leaves nothing behind.
                log = log or begin_log(run, config, reader, first_step=first_step)
                log.append(line)
            progress.log(line, seconds_per_step=clock.seconds_per_step)
            if saver:
                saver.check()
                if is_last or must_stop or is_best or saver.is_due(done):
                    saver.save(trainer, ranks, is_best=is_best, say=progress.say)
                if is_last or must_stop:
                    saver.finish()
            if must_stop and not is_last:
                ranks.barrier()  # until all is on the disk
                interrupt.ignore_from_now_on()
                raise RunError(
                    f"interrupted at step {done} of {num_steps}, saved in {run}: `make train` or --resume continues"
                )
            keep_alive()
            feed.wait.take()  # evaluation and saving are no part of the interval
            clock.restart(done)
    ranks.barrier()
    rest()
    interrupt.ignore_from_now_on()
    reader.close()
    if saver:
        saver.close()


def begin_log(run: Path, config: RunConfig, reader: CacheReader, *, first_step: int) -> MetricsLog:
    record_config(run, config, reader.manifest, reader.cache)
    if first_step == 0 and config.train.init_from is not None:
        record_start(run, config)
    return MetricsLog(run, first_step=first_step)


def read_interval(
    config: RunConfig, step: TrainStep, ranks: Ranks, order: RowOrder, done: int, clock: "IntervalClock", feed: Feed
) -> dict[str, Any]:
    """Read the device, once: the metrics of the interval that ends with step `done`, as metrics.jsonl has them."""
    ranks.sum_(step.metrics.sums)
    summary = summarise(step.metrics.sums.tolist(), config.drafter.block_size)
    step.metrics.reset()
    seconds = clock.stop(done)
    num_steps = done - clock.first_step
    slots_per_step = config.train.rows_per_step * config.cache.row_tokens
    return {
        "step": done,
        "epoch": order.epoch(done - 1),
        **summary,
        "tokens_per_second": num_steps * slots_per_step / seconds,
        "data_wait_fraction": feed.wait.take() / seconds,
        "learning_rate": float(step.schedule.learning_rate(step.counters.step - 1)),
        "grad_norm": finite_or_none(step.grad_norm),
        "skipped_steps": int(step.counters.num_bad + step.counters.num_empty),
        **step.faults.read(ranks, order),
    }


def end_if_bad(config: RunConfig, step: TrainStep, line: dict[str, Any], run: Path) -> None:
    """Raise RunError after train.max_bad_steps in a row that were not finite."""
    num_bad = int(step.faults.most_in_a_row)
    if num_bad >= config.train.max_bad_steps:
        raise RunError(
            f"{num_bad} steps in a row up to step {line['step']} had a loss or gradient that is not finite, step "
            f"{line['bad_step']} with {name_rows(line['bad_rows'])} of the cache, and train.max_bad_steps is "
            f"{config.train.max_bad_steps}; {run} keeps its checkpoints"
        )


def finite_or_none(value: Tensor) -> float | None:
    """A scalar for JSON, which has no NaN."""
    return float(value) if torch.isfinite(value) else None


class IntervalClock:
    """Wall time of the steps of one log interval."""

    def __init__(self, first_step: int) -> None:
        self.restart(first_step)

    def restart(self, first_step: int) -> None:
        self.first_step = first_step
        self.started = time.perf_counter()

    def stop(self, done: int) -> float:
        seconds = time.perf_counter() - self.started
        self.seconds_per_step = seconds / (done - self.first_step)
        return seconds


def describe(ranks: Ranks) -> str:
    if ranks.device.type == "cuda":
        return f"{ranks.world_size} × {torch.cuda.get_device_name(ranks.device)}"
    return f"the CPU, {ranks.world_size} process{'es' if ranks.world_size > 1 else ''}, {os.cpu_count()} cores"
