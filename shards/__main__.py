"""`python -m shards COMMAND CACHE`: look into a cache and look after it.

numpy is imported late: an interrupt meanwhile is answered as at any other time.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shards.errors import EXIT_FAILED, CacheError, run_command

if TYPE_CHECKING:
    from shards.verify import Part


def stats_command(options: argparse.Namespace) -> None:
    from shards.manifest import Manifest
    from shards.plot import check_destination, plot_statistics
    from shards.stats import cache_statistics, format_statistics

    if options.plot:
        check_destination(options.plot)
    statistics = cache_statistics(options.cache)
    if options.json:
        print(json.dumps(statistics, indent=1))
    else:
        print(format_statistics(statistics, Manifest.read(options.cache).plan.num_shards))
    if options.plot:
        plot_statistics(options.cache, options.plot)


def verify_command(options: argparse.Namespace) -> int:
    """Print one line for each fault as it is found, then a closing one; exit 1 if there were any."""
    from tqdm import tqdm

    num_shards, num_files = 0, 0
    faults: list[str] = []
    for part in _parts(options.cache, is_deep=options.deep):
        num_shards += part.num_shards
        num_files += part.num_files
        faults += part.faults
        for fault in () if options.json else part.faults:
            tqdm.write(fault)
    if options.json:
        print(json.dumps({"shards": num_shards, "files": num_files, "faults": faults}, indent=1))
    else:
        verdict = f"{len(faults)} faults" if faults else "no faults"
        unread = "" if options.deep else ", values unread (--deep reads them)"
        print(f"{num_shards} shards, {num_files} files verified: {verdict}{unread}")
    return EXIT_FAILED if faults else 0


def _parts(cache: Path, *, is_deep: bool) -> Iterator["Part"]:
    """The parts of the cache, with a progress bar on a terminal. A damaged manifest is the only part there is."""
    from tqdm import tqdm

    from shards.manifest import MANIFEST_FILE, Manifest
    from shards.verify import Part, count_files, verify

    tqdm.monitor_interval = 0  # it would start a thread
    try:
        manifest = Manifest.read(cache)
    except CacheError as error:
        if not (cache / MANIFEST_FILE).exists():
            raise  # this is no cache, rather than a damaged one
        yield Part(faults=(str(error),))
        return
    with tqdm(total=count_files(manifest), unit="file", disable=None) as progress:
        for part in verify(cache, manifest, is_deep=is_deep):
            progress.update(part.num_files)
            yield part


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shards", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, summary in (
        ("stats", stats_command, "what the cache holds, in figures"),
        ("verify", verify_command, "find what is wrong with it; exit 1 if anything is"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=run)
        command.add_argument("cache", type=Path, metavar="CACHE", help="directory of the cache")
        command.add_argument("--json", action="store_true", help="print JSON")
    commands.choices["stats"].add_argument("--plot", type=Path, metavar="FILE.png", help="draw them, too")
    commands.choices["verify"].add_argument("--deep", action="store_true", help="read every value, on all cores")
    options = parser.parse_args()
    return run_command(lambda: options.run(options))


if __name__ == "__main__":
    sys.exit(main())
