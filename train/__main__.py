"""`python -m train`: trains a drafter from a cache.

Run plainly it is the launcher: it refuses what can be refused, then starts one worker for each GPU (one on a machine
without) through torch's elastic agent. Run by that agent, or by `torchrun` on several nodes, it is a worker.
All but the arguments is imported late: an interrupt meanwhile is answered as at any other time, and a worker must first
say which GPU is its own and which threads not to start.
"""

import argparse
import os
import sys
from pathlib import Path

from shards.errors import run_command
from train.worker import work

DESCRIPTION = "Train a DFlash drafter from a cache of the target's hidden states."
EPILOG = """\
Any configuration key can be overridden: python -m train --config F --cache DIR --run DIR train.lr=3e-4
Exit codes: 0 trained; 1 the run failed or was interrupted (--resume continues); 2 wrong usage, nothing was written."""

INTERRUPTED = "interrupted before training began: nothing was lost"


def main() -> int:
    arguments = parse_arguments()
    if "TORCHELASTIC_RUN_ID" in os.environ and not (arguments.check or arguments.preflight):
        work(arguments)
    return run_command(lambda: start(arguments), interrupted=INTERRUPTED)


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
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="refuse now what would be refused when there is a cache, and do nothing: `make train` begins with it",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a configuration key")
    arguments = parser.parse_intermixed_args()
    name = Path(arguments.config).stem
    arguments.cache = arguments.cache or Path("caches") / name
    arguments.run = arguments.run or Path("runs") / name
    return arguments


def start(arguments: argparse.Namespace) -> int:
    from train.config import RunConfig
    from train.runtime import keep_compiled_kernels, quiet_thread_starters

    config = RunConfig.load(arguments.config, arguments.overrides)
    quiet_thread_starters()
    keep_compiled_kernels(Path(config.train.compile_cache))
    if arguments.check:
        from train.check import check

        return check(config, arguments.cache, as_json=arguments.json)

    from train.gpus import find_gpus
    from train.launch import run_workers
    from train.lock import refuse_if_locked
    from train.preflight import check_files, preflight, preflight_without_cache
    from train.summary import print_summary

    num_workers = max(1, len(find_gpus(config.train)))
    refuse_if_locked(arguments.run)
    if arguments.preflight:
        preflight_without_cache(config, arguments.run, world_size=num_workers, resume=arguments.resume)
        return 0
    begin = preflight(config, arguments.cache, arguments.run, world_size=num_workers, resume=arguments.resume)
    if begin.is_finished:
        print(f"{arguments.run} has all its {begin.num_steps} steps: nothing to train; RUN= (--run) begins another")
        return 0
    check_files(arguments.cache, begin.checkpoint)
    for note in begin.notes:
        print(f"note: {note}", flush=True)
    code = run_workers(sys.argv[1:], arguments.run, num_workers=num_workers)
    if code == 0:
        print_summary(arguments.run)
    return code


if __name__ == "__main__":
    sys.exit(main())
