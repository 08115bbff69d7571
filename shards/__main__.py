"""`python -m shards COMMAND`: look into caches, look after them, make new ones of them.

numpy is imported late: an interrupt meanwhile is answered as at any other time.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.errors import EXIT_FAILED, CacheError, run_command

if TYPE_CHECKING:
    from shards.verify import Part

GOES_ON = ": what was finished is kept, the same command goes on from it"
CODEC_NAMES = ("bf16", "int8", "int4", "bf16+zstd")


def stats_command(options: argparse.Namespace) -> None:
    from shards.plot import check_destination, plot_statistics
    from shards.stats import cache_statistics, format_statistics

    if options.plot:
        check_destination(options.plot)
    statistics = cache_statistics(options.cache)
    _report(options, statistics, [format_statistics(statistics)])
    if options.plot:
        plot_statistics(options.cache, options.plot)


def verify_command(options: argparse.Namespace) -> int:
    """Print one line for each fault as it is found, then closing ones; exit 1 unless all is there and sound."""
    from shards.completeness import cache_state, describe_incomplete

    num_shards, num_unmade, num_files = 0, 0, 0
    faults: list[str] = []
    for part in _parts(options.cache, is_deep=options.deep, is_quiet=options.json):
        num_shards += part.num_shards
        num_unmade += part.num_unmade_shards
        num_files += part.num_files
        faults += part.faults
    state = cache_state(options.cache, num_unmade)
    incomplete = [describe_incomplete(state, num_shards, num_shards + num_unmade)] if num_unmade else []
    verdict = f"{len(faults)} faults" if faults else "no faults"
    unread = "" if options.deep else ", values unread (--deep reads them)"
    figures = {"state": "damaged" if faults else state, "shards": num_shards, "missing_shards": num_unmade}
    _report(
        options,
        {**figures, "files": num_files, "faults": faults},
        [*incomplete, f"{num_shards} shards, {num_files} files verified: {verdict}{unread}"],
    )
    return EXIT_FAILED if faults or num_unmade else 0


def _parts(cache: Path, *, is_deep: bool, is_quiet: bool) -> Iterator["Part"]:
    """The parts of the cache, with a progress bar on a terminal and, unless `is_quiet`, a line for each fault.

    A damaged manifest is the only part there is.
    """
    from tqdm import tqdm

    from shards.manifest import MANIFEST_FILE, Manifest
    from shards.verify import Part, count_files, verify

    tqdm.monitor_interval = 0  # it would start a thread
    try:
        manifest = Manifest.read(cache)
        parts, num_files = verify(cache, manifest, is_deep=is_deep), count_files(manifest)
    except CacheError as error:
        if not (cache / MANIFEST_FILE).exists():
            raise  # this is no cache, rather than a damaged one
        parts, num_files = iter([Part(of=MANIFEST_FILE, faults=(str(error),))]), 1
    with tqdm(total=num_files, unit="file", disable=None) as progress:
        for part in parts:
            progress.update(part.num_files)
            for fault in () if is_quiet else part.faults:
                tqdm.write(fault)
            yield part


def repair_command(options: argparse.Namespace) -> int:
    from shards.repair import describe_repair, repair

    repaired = repair(options.cache, lambda: _parts(options.cache, is_deep=True, is_quiet=options.json))
    _report(options, vars(repaired), describe_repair(options.cache, repaired))
    return EXIT_FAILED if repaired.not_repairable else 0


def ls_command(options: argparse.Namespace) -> None:
    from shards.listing import format_list, list_path

    listed = list_path(options.path)
    _report(options, listed, format_list(listed))


def recode_command(options: argparse.Namespace) -> None:
    from shards.recode import describe_losses, recode

    made = recode(options.source, options.destination, options.codec)
    _report(options, made, [_describe_made(options, made), *describe_losses(made["loss"])])


def slice_command(options: argparse.Namespace) -> None:
    from shards.slicing import Choice, slice_cache

    names = ("layers", "rows", "sources", "split")
    choice = Choice(**{name: getattr(options, name) for name in names})
    made = slice_cache(options.source, options.destination, choice)
    _report(options, made, [_describe_made(options, made)])


def merge_command(options: argparse.Namespace) -> None:
    from shards.merge import merge

    made = merge(options.destination, options.sources, different_data=options.different_data)
    lines = [_describe_made(options, made)]
    if made["repeated_documents"]:
        lines.append(f"note: {made['repeated_documents']:,} documents are repeated: more than one source has them")
    _report(options, made, lines)


def import_command(options: argparse.Namespace) -> None:
    from shards.deepspec import describe_left_out, import_deepspec

    made = import_deepspec(options.source, options.destination, options.like)
    _report(options, made, [_describe_made(options, made), *describe_left_out(made)])


def _describe_made(options: argparse.Namespace, made: dict[str, Any]) -> str:
    quarantined = made["quarantined_documents"]
    return (
        f"{options.destination} is complete: {made['shards']:,} shards, {made['new_shards']:,} of them new, "
        f"{made['rows']:,} rows ({made['train_rows']:,} for training), {made['documents']:,} documents"
        f"{f' ({quarantined:,} in quarantine)' if quarantined else ''}, {made['tokens']:,} tokens"
    )


def _report(options: argparse.Namespace, figures: dict[str, Any], lines: list[str]) -> None:
    print(json.dumps(figures, indent=1) if options.json else "\n".join(lines))


def row_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """`0:100,250` → ((0, 100), (250, 251)); argparse turns a ValueError into a usage message."""
    pairs = (part.partition(":") for part in text.split(","))
    return tuple((int(start), int(stop) if colon else int(start) + 1) for start, colon, stop in pairs)


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _add_reporting(commands: Any) -> None:
    for name, run, summary in (
        ("stats", stats_command, "what a cache holds, in figures"),
        (
            "verify",
            verify_command,
            "find what is wrong with a cache; exit 1 if anything is, or if the cache is incomplete",
        ),
        (
            "repair",
            repair_command,
            "set aside the shards and files that are faulty (nothing is deleted), so that the command that made the "
            "cache makes just those again; exit 1 if anything is wrong that this can't help",
        ),
    ):
        _add(commands, name, run, summary).add_argument("cache", type=Path, metavar="CACHE", help="the cache")
    commands.choices["stats"].add_argument("--plot", type=Path, metavar="FILE.png", help="draw them, too")
    commands.choices["verify"].add_argument("--deep", action="store_true", help="read every value, on all cores")
    listing = _add(commands, "ls", ls_command, "the shards of a cache, or the caches of a directory, a line for each")
    listing.add_argument(
        "path", type=Path, metavar="PATH", nargs="?", default=Path("caches"), help="default: %(default)s"
    )


def _add_making(commands: Any) -> None:
    """Those that make a cache. All of them continue one that they began, and overwrite nothing."""
    recode = _add(commands, "recode", recode_command, "make the same cache in another codec, and say what that loses")
    _add_paths(recode)
    recode.add_argument("--codec", required=True, choices=CODEC_NAMES)

    part = _add(commands, "slice", slice_command, "make a cache of a part of another")
    _add_paths(part)
    part.add_argument("--layers", type=names, metavar="L,…", help="the layers to keep, and `final` for the final state")
    part.add_argument("--rows", type=row_ranges, metavar="A:B,…", help="rows A up to, not including, B")
    part.add_argument("--sources", type=names, metavar="NAME,…", help="documents of these sources, packed anew")
    part.add_argument("--split", choices=("train", "heldout"))

    merge = _add(commands, "merge", merge_command, "make one cache of several that are of the same thing")
    merge.add_argument("destination", type=Path, metavar="DEST")
    merge.add_argument("sources", type=Path, metavar="SRC", nargs="+")
    merge.add_argument("--different-data", action="store_true", help="they are of the same target, but of other data")

    other = _add(commands, "import", import_command, "make a cache of another program's")
    _add_paths(other)
    other.add_argument("--from", required=True, choices=("deepspec",), help="whose: DeepSpec's target cache, version 2")
    other.add_argument(
        "--like",
        type=Path,
        required=True,
        metavar="CACHE",
        help="a cache of the same target, begun with any data: target/, identity and configuration are taken from it",
    )


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], summary: str) -> Any:
    command = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print JSON")
    return command


def _add_paths(command: Any) -> None:
    command.add_argument("source", type=Path, metavar="SRC", help="is only read")
    command.add_argument("destination", type=Path, metavar="DEST", help="a new directory, or one that was begun")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shards", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_reporting(commands)
    _add_making(commands)
    options = parser.parse_args()
    return run_command(
        lambda: options.run(options),
        interrupted="interrupted" + (GOES_ON if "destination" in options else ""),
    )


if __name__ == "__main__":
    sys.exit(main())
