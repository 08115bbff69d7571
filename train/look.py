"""`python -m train status|report|tensorboard`: looks at runs, from outside and without torch. Changes nothing in them.

All but the arguments is imported late, as in train/__main__.py.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from shards.errors import run_command

LOOKS = ("status", "report", "tensorboard")


def look(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m train")
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="whether a run is alive, how far it is, and what it waits for")
    status.add_argument("run", type=Path, metavar="RUN")
    status.add_argument("--json", action="store_true", help="print JSON")
    report = commands.add_parser("report", help="curves and figures of runs, over each other, in one HTML file")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    report.add_argument("--output", type=Path, metavar="FILE", help="the file (default: report.html in the first RUN)")
    tensorboard = commands.add_parser("tensorboard", help="a run's metrics as a file for TensorBoard")
    tensorboard.add_argument("run", type=Path, metavar="RUN")
    parsed = parser.parse_args(arguments)
    if parsed.command == "status":
        return run_command(lambda: print_status(parsed.run, as_json=parsed.json))
    if parsed.command == "report":
        return run_command(lambda: write_report(parsed.runs, parsed.output))
    return run_command(lambda: convert_for_tensorboard(parsed.run))


def print_status(run: Path, *, as_json: bool) -> None:
    from train.status import describe, read_status

    status = read_status(run)
    print(json.dumps(status, indent=1) if as_json else "\n".join(describe(run, status)))


def write_report(runs: Sequence[Path], output: Path | None) -> None:
    from train.report import report

    print(f"wrote {report(runs, output)}")


def convert_for_tensorboard(run: Path) -> None:
    from train.tensorboard import convert

    print(f"wrote {convert(run)}: show it with `tensorboard --logdir {run}`")
