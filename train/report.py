"""`python -m train report`: how runs went, in one HTML file that needs nothing else, neither network nor script."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from shards.errors import CacheError, RunError, UsageError
from shards.stats import cache_statistics, format_statistics
from train.chart import Point, Series, draw
from train.records import (
    CACHE_KEY,
    HELDOUT_ACCEPTANCE_LENGTH,
    NUM_STEPS_KEY,
    name_rows,
    read_metrics,
    read_recorded,
)

REPORT_FILE = "report.html"
NUM_COLOURS = 8  # after which they repeat
STYLE_FILE = Path(__file__).with_name("report.css")
# Title, what the lines are, and for each line its key in metrics.jsonl, its style, and the key of its interval.
CURVES = (
    ("loss", "training; dashed: held out", (("loss", "", None), ("heldout_loss", "dashed", None))),
    (
        "acceptance length τ",
        "training; dashed: held out, with its 95 % interval; dotted: held out without the target's context",
        (
            ("acceptance_length", "", None),
            (HELDOUT_ACCEPTANCE_LENGTH, "dashed", f"{HELDOUT_ACCEPTANCE_LENGTH}_half_width"),
            (f"{HELDOUT_ACCEPTANCE_LENGTH}_without_context", "dotted", None),
        ),
    ),
    ("throughput", "token slots a second", (("tokens_per_second", "", None),)),
    ("data wait", "fraction of the time", (("data_wait_fraction", "", None),)),
    ("learning rate", "", (("learning_rate", "", None),)),
    ("gradient norm", "before clipping", (("grad_norm", "", None),)),
    ("skipped steps", "so far", (("skipped_steps", "", None),)),
    ("saving", "seconds that training stood still for it, each interval", (("save_stall_seconds", "", None),)),
)
SLOTS = (("accuracy_per_slot", ""), ("heldout_accuracy_per_slot", "dashed"))


@dataclass(frozen=True, kw_only=True)
class Run:
    path: Path
    lines: list[dict[str, Any]]
    config: dict[str, Any]
    colour: str  # a CSS class

    @classmethod
    def read(cls, path: Path, index: int) -> "Run":
        config, lines = read_recorded(path), read_metrics(path)
        if not lines:
            raise UsageError(f"{path} has no metrics yet: a report can be made after the first log interval")
        return cls(path=path, lines=lines, config=config, colour=f"r{index % NUM_COLOURS}")

    @property
    def name(self) -> str:
        return str(self.path)


def report(paths: Sequence[Path], output: Path | None) -> Path:
    """Write the report of these runs and return its path, `report.html` in the first of them by default."""
    runs = [Run.read(path, index) for index, path in enumerate(paths)]
    file = output or paths[0] / REPORT_FILE
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(page(runs), encoding="utf-8", errors="replace")
        os.replace(beside, file)
    except OSError as error:
        raise RunError(f"{file} could not be written: {error.strerror}; --output names another file") from error
    return file


def page(runs: Sequence[Run]) -> str:
    title = escape(", ".join(run.name for run in runs))
    style = STYLE_FILE.read_text(encoding="utf-8")
    figures = "\n".join(_figure(*curve, runs) for curve in CURVES) + _slots_figure(runs)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{style}</style>\n</head>\n'
        f"<body>\n<h1>Training of drafters</h1>\n{_runs_table(runs)}\n<main>\n{figures}\n</main>\n"
        f"{_faults(runs)}\n{_configurations(runs)}\n{_caches(runs)}\n</body>\n</html>\n"
    )


def _figure(title: str, note: str, keys: Sequence[tuple[str, str, str | None]], runs: Sequence[Run]) -> str:
    series = [
        Series(
            label=f"{run.name}: {key}",
            style=f"{run.colour} {style}",
            key=key,
            points=tuple(
                Point(x=line["step"], y=line[key], half_width=line.get(interval) if interval else None)
                for line in run.lines
                if key in line
            ),
        )
        for run in runs
        for key, style, interval in keys
    ]
    return _captioned(title, note, draw(title, "step", series))


def _slots_figure(runs: Sequence[Run]) -> str:
    series = []
    for run in runs:
        for key, style in SLOTS:
            last = next((line[key] for line in reversed(run.lines) if key in line), [])
            points = tuple(Point(x=slot, y=value) for slot, value in enumerate(last, start=1))
            series.append(Series(label=f"{run.name}: {key}", style=f"{run.colour} {style}", key=key, points=points))
    title, note = "accuracy per slot", "of the last interval; dashed: held out, of the last evaluation"
    return _captioned(title, note, draw(title, "slot", series))


def _captioned(title: str, note: str, drawing: str) -> str:
    return f"<figure><figcaption>{escape(title)} <small>{escape(note)}</small></figcaption>{drawing}</figure>"


def _runs_table(runs: Sequence[Run]) -> str:
    heads = ("run", "steps", "of", "loss", "held-out τ", "best τ", "at step", "slots a second", "skipped steps")
    return _table(heads, [list(_run_row(run)) for run in runs])


def _run_row(run: Run) -> Iterator[Any]:
    last = run.lines[-1]
    evaluated = [line for line in run.lines if line.get(HELDOUT_ACCEPTANCE_LENGTH) is not None]
    best = max(evaluated, key=lambda line: line[HELDOUT_ACCEPTANCE_LENGTH], default={})
    speeds = [line["tokens_per_second"] for line in run.lines if line.get("tokens_per_second")]
    yield f'<span class="{run.colour} swatch">■</span> {escape(run.name)}'
    yield from (last["step"], run.config.get(NUM_STEPS_KEY), last.get("loss"))
    yield from (evaluated[-1][HELDOUT_ACCEPTANCE_LENGTH] if evaluated else None,)
    yield from (best.get(HELDOUT_ACCEPTANCE_LENGTH), best.get("step"))
    yield from (len(speeds) / sum(1 / speed for speed in speeds) if speeds else None, last.get("skipped_steps"))


def _faults(runs: Sequence[Run]) -> str:
    rows = [
        [escape(run.name), line["bad_step"], escape(name_rows(line["bad_rows"]))]
        for run in runs
        for line in run.lines
        if line.get("bad_rows")
    ]
    return "<h2>Not finite</h2>\n" + _table(("run", "first step of an interval", "rows"), rows) if rows else ""


def _configurations(runs: Sequence[Run]) -> str:
    """The keys that differ between several runs; all keys of the first, folded."""
    keys = sorted({key for run in runs for key in run.config})
    shown = {key: [json.dumps(run.config.get(key), ensure_ascii=False) for run in runs] for key in keys}
    parts = []
    if len(runs) > 1:
        differing = [[escape(key), *map(escape, values)] for key, values in shown.items() if len(set(values)) > 1]
        heads = ("key", *(run.name for run in runs))
        parts.append("<h2>What differs</h2>\n" + (_table(heads, differing) if differing else "<p>nothing</p>"))
    whole = [[escape(key), escape(values[0])] for key, values in shown.items()]
    summary = f"<summary>Configuration of {escape(runs[0].name)}</summary>"
    parts.append(f"<details>{summary}{_table(('key', 'value'), whole)}</details>")
    return "\n".join(parts)


def _caches(runs: Sequence[Run]) -> str:
    parts = ["<h2>Caches</h2>"]
    for cache in dict.fromkeys(str(run.config.get(CACHE_KEY)) for run in runs):
        parts.append(f"<h3>{escape(cache)}</h3>\n{_cache(Path(cache))}")
    return "\n".join(parts)


def _cache(cache: Path) -> str:
    try:
        text = format_statistics(cache_statistics(cache))
    except (CacheError, OSError) as error:  # a cache may be gone, and the runs on it are still to be seen
        return f"<p>{escape(str(error))}</p>"
    return f"<pre>{escape(text)}</pre>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Cells that are text are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "\n".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return f"<td>{value}</td>"
    if value is None:
        return '<td class="number">–</td>'
    return f'<td class="number">{value:,}</td>' if isinstance(value, int) else f'<td class="number">{value:,.4g}</td>'
