"""`python -m train`: trains a drafter from a cache.

Run plainly it is the launcher: it refuses what can be refused, then starts one worker for each GPU (one on a machine
without) through torch's elastic launcher. Run by that launcher, or by `torchrun` on several nodes, it is a worker.
torch is imported late: workers must first say which GPU is theirs and which threads not to start.
"""

import argparse
import os
import sys
import traceback
from pathlib import Path

import tqdm

from shards.errors import EXIT_FAILED, run_command
from train.config import RunConfig

DESCRIPTION = "Train a DFlash drafter from a cache of the target's hidden states."
EPILOG = """\
Any configuration key can be overridden: python -m train --config F --cache DIR --run DIR train.lr=3e-4
Exit codes: 0 trained; 1 the run failed or was interrupted (--resume continues); 2 wrong usage, nothing was written."""


def main() -> int:
    arguments = parse_arguments()
    return run_command(lambda: start(arguments))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m train",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the TOML file that the cache was made with")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="the cache (default: caches/<config name>)")
    parser.add_argument("--run", type=Path, metavar="DIR", help="the run directory (default: runs/<config name>)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --run; begin it if there is none")
    parser.add_argument("--check", action="store_true", help="print what the run would be and need, and do nothing")
    parser.add_argument("--json", action="store_true", help="with --check: print JSON")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a configuration key")
    arguments = parser.parse_intermixed_args()
    name = Path(arguments.config).stem
    arguments.cache = arguments.cache or Path("caches") / name
    arguments.run = arguments.run or Path("runs") / name
    return arguments


def start(arguments: argparse.Namespace) -> int:
    config = RunConfig.load(arguments.config, arguments.overrides)
    quiet_thread_starters()
    if arguments.check:
        from train.check import check

        return check(config, arguments.cache, as_json=arguments.json)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return work(config, arguments)
    return launch(config, arguments)


def launch(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Validate everything, then start the workers and wait for them."""
    from train.preflight import count_processes, preflight
    from train.rundir import finished_step

    num_steps = preflight(config, arguments.cache, arguments.run, resume=arguments.resume)
    if finished_step(arguments.run) == num_steps:
        print(f"{arguments.run} has all its {num_steps} steps: nothing to train; --run DIR (make: RUN=) begins another")
        return 0
    from train.launch import run_workers

    run_workers(sys.argv[1:], num_workers=count_processes(config))
    from train.summary import print_summary

    print_summary(arguments.run)
    return 0


def work(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Be one rank. Leaves by `os._exit`: after a failure nothing may wait for peers that are gone."""
    claim_gpu(config)
    from train.run import train
    from train.rundir import begin_or_continue

    checkpoint = begin_or_continue(arguments.run, config, resume=True)
    try:
        code = run_command(lambda: train(config, arguments.cache, arguments.run, checkpoint))
    except BaseException:
        traceback.print_exc()
        code = EXIT_FAILED
    sys.stdout.flush()
    os._exit(code)


def claim_gpu(config: RunConfig) -> None:
    """Let this process see its own GPU only: entry LOCAL_RANK of train.gpus, counted among the visible ones."""
    local_rank = int(os.environ["LOCAL_RANK"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpu = local_rank if config.train.gpus is None else config.train.gpus[local_rank]
    if visible != "":  # with no GPU visible, the CPU it is
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu) if visible is None else visible.split(",")[gpu]


def quiet_thread_starters() -> None:
    """Keep inductor and tqdm from starting any: a trainer has one Python thread. Call before importing torch."""
    tqdm.tqdm.monitor_interval = 0
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products need


if __name__ == "__main__":
    sys.exit(main())
