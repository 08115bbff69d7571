"""`python -m extract`: makes the cache that a configuration describes, or what is missing of it.

Run plainly it is the launcher: it refuses what can be refused, plans, and starts one worker for each GPU through
torch's elastic launcher. Run by `torchrun`, on one machine or several, it is a worker. What takes time to import is
imported late, so that help, mistakes, interrupts and finished caches are answered at once.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shards.errors import run_command

DESCRIPTION = "Run a target over the data and store its hidden states, as the configuration file says."
PLAN_DESCRIPTION = """\
Tokenise the data as an extraction would, on all cores, and print what it comes to: documents, tokens, rows, sources,
what is left out, bytes with each codec, hours. Nothing is written, and no weights are read."""
EPILOG = """\
Only what is missing is done: published shards are kept, and a complete cache is left as it is. The cache of another
configuration, other data or another target is refused.
`python -m extract plan --config F` says beforehand what the data comes to.
Any configuration key can be overridden: python -m extract --config F cache.layers=[1,8,14] extract.gpus=[0,1]
Exit codes: 0 complete; 1 failed or interrupted, the same command continues; 2 wrong usage, nothing was written."""
INTERRUPTED = "interrupted before a shard was begun: run the same command again"


def main(argv: Sequence[str] | None = None) -> int:
    def command() -> None:
        arguments = parse_arguments(list(sys.argv[1:] if argv is None else argv))
        arguments.start(arguments)

    return run_command(command, interrupted=INTERRUPTED)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    if argv[:1] == ["plan"]:
        return plan_parser().parse_intermixed_args(argv[1:])
    parser = extract_parser()
    arguments = parser.parse_intermixed_args(argv)
    if arguments.json and not arguments.check:
        parser.error("--json has no effect without --check")
    return arguments


def extract_parser() -> argparse.ArgumentParser:
    parser = _parser("python -m extract", DESCRIPTION, EPILOG)
    parser.add_argument("--check", action="store_true", help="print plan, bytes and disk speed needed, and do nothing")
    _add_figures(parser, "with --check: ")
    parser.set_defaults(start=start_extract)
    return parser


def plan_parser() -> argparse.ArgumentParser:
    parser = _parser("python -m extract plan", PLAN_DESCRIPTION)
    _add_figures(parser)
    parser.set_defaults(start=start_plan)
    return parser


def _parser(prog: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """What every command is told: which cache of which configuration."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the TOML file, see configs/")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="the cache to make (default: caches/<config name>)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a configuration key")
    return parser


def _add_figures(parser: argparse.ArgumentParser, when: str = "") -> None:
    parser.add_argument("--json", action="store_true", help=f"{when}print JSON")
    parser.add_argument(
        "--tokens-per-second",
        type=speed,
        default=30_000.0,  # an 8B target on an H200
        metavar="N",
        help=f"{when}the speed of one worker to reckon with (default: %(default)s)",
    )


def speed(text: str) -> float:
    """argparse turns a ValueError into a usage message."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def start_plan(arguments: argparse.Namespace) -> None:
    from extract.job import Job
    from extract.plan import plan

    job = Job.load(arguments.config, arguments.overrides, arguments.cache)
    plan(job, worker_tokens_per_s=arguments.tokens_per_second, as_json=arguments.json)


def start_extract(arguments: argparse.Namespace) -> None:
    from extract.check import check
    from extract.job import Job
    from extract.sources import check_sources

    job = Job.load(arguments.config, arguments.overrides, arguments.cache)
    if arguments.check:
        check(job, worker_tokens_per_s=arguments.tokens_per_second, as_json=arguments.json)
        return
    if manifest := job.complete_manifest():
        check_sources(job, manifest, needed=False)
        print(f"{job.directory} is complete: nothing to extract")
        return
    from extract.run import extract, extract_as_worker

    (extract_as_worker if "TORCHELASTIC_RUN_ID" in os.environ else extract)(job)


if __name__ == "__main__":
    sys.exit(main())
