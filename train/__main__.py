"""`python -m train`: trains a drafter from a cache.

Run plainly it is the launcher: it refuses what can be refused, then starts one worker for each GPU (one on a machine
without) through torch's elastic launcher. Run by that launcher, or by `torchrun` on several nodes, it is a worker.
torch is imported late: workers must first say which GPU is theirs and which threads not to start.
"""

import argparse
import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path

from shards.errors import EXIT_FAILED, CacheError, RunError, run_command
from train.config import RunConfig
from train.runtime import keep_compiled_kernels, quiet_thread_starters

PR_SET_PDEATHSIG = 1  # linux/prctl.h
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
    keep_compiled_kernels(Path(config.train.compile_cache))
    if arguments.check:
        from train.check import check

        return check(config, arguments.cache, as_json=arguments.json)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return work(config, arguments)
    return launch(config, arguments)


def launch(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Refuse what can be refused, then start the workers and wait for them."""
    from train.launch import find_gpus, run_workers
    from train.preflight import check_files, preflight
    from train.summary import print_summary

    num_workers = max(1, len(find_gpus(config.train)))
    begin = preflight(config, arguments.cache, arguments.run, world_size=num_workers, resume=arguments.resume)
    if begin.is_finished:
        print(f"{arguments.run} has all its {begin.num_steps} steps: nothing to train; RUN= (--run) begins another")
        return 0
    check_files(arguments.cache, begin.checkpoint)
    run_workers(sys.argv[1:], num_workers=num_workers)
    print_summary(arguments.run)
    return 0


def work(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Be one rank. Leaves by `os._exit`: after a failure nothing may wait for peers that are gone."""
    stop_with_launcher()
    try:
        code = run_command(lambda: run_rank(config, arguments))
    except BaseException:
        traceback.print_exc()
        code = EXIT_FAILED
    sys.stdout.flush()
    os._exit(code)


def run_rank(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Check what the launcher checked, because `torchrun` has not; then train."""
    from train.launch import claim_gpu, find_gpus
    from train.preflight import preflight
    from train.run import train

    claim_gpu(find_gpus(config.train))
    world_size = int(os.environ["WORLD_SIZE"])
    begin = preflight(config, arguments.cache, arguments.run, world_size=world_size, resume=arguments.resume)
    try:
        train(config, arguments.cache, arguments.run, begin.checkpoint)
    except CacheError as error:  # damaged under the run: no longer a matter of usage
        raise RunError(str(error)) from error


def stop_with_launcher() -> None:
    """Have the kernel send SIGTERM when the parent process dies, however it does: no worker outlives its job."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
