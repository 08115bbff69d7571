"""How long a checkpoint stops training, and how long its writing takes beside it.

    python -m benchmarks.save --config configs/qwen3-8b.toml --directory /data/scratch [key=value …]

Saves the random state of the configuration's drafter twice, as a run does, on the GPU if there is one.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.synthetic import random_trainer
from shards.errors import run_command
from train.config import RunConfig
from train.ranks import Ranks
from train.runtime import quiet_thread_starters
from train.saver import Saver


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save", description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("--directory", required=True, type=Path, metavar="DIR", help="on the disk to write to")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    return run_command(lambda: measure(RunConfig.load(arguments.config, arguments.overrides), arguments.directory))


def measure(config: RunConfig, directory: Path) -> int:
    quiet_thread_starters()
    train = replace(config.train, capture=False, rows_per_step=config.train.rows_per_micro_step)
    config = replace(config, train=train)
    with tempfile.TemporaryDirectory(dir=directory) as run:
        saver = Saver(Path(run), config)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        page_lock_s = seconds(saver.page_lock) if device.type == "cuda" else None
        trainer = random_trainer(config, device)
        ranks = Ranks(rank=0, world_size=1, device=device)
        saves = []
        for step in (1, 2):
            trainer.step.counters.step.fill_(step)
            ranks.wait_for_device()
            stall_s = seconds(lambda: saver.save(trainer, ranks, is_best=False, say=print))
            saves.append({"stall_s": stall_s, "write_s": seconds(saver.finish)})
        saver.close()
        state_bytes = sum(tensor.nbytes for tensor in saver.state.values())
        result = {"device": device.type, "cores": os.cpu_count(), "state_bytes": state_bytes}
        print(json.dumps(result | {"page_lock_s": page_lock_s, "saves": saves}))
    return 0


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
