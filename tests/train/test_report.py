"""The report: well formed, alone, and its curves are the numbers of metrics.jsonl, read off the drawing's axes."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from shards.errors import RunError, UsageError
from tests.train.caches import write_cache, write_config
from train.__main__ import main
from train.chart import HEIGHT, MAX_POINTS, WIDTH, Axis, Point, Series, draw, short, thin
from train.config import RunConfig
from train.report import report

VOID = {"meta", "path", "polyline", "circle"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CURVES = (
    *("loss", "acceptance_length", "tokens_per_second", "data_wait_fraction", "learning_rate", "grad_norm"),
    *("skipped_steps", "save_stall_seconds", "heldout_loss", "heldout_acceptance_length"),
    "heldout_acceptance_length_without_context",
)


@dataclass
class Line:
    run: str
    key: str
    points: list[list[tuple[float, float]]] = field(default_factory=list)  # pixels; a part between gaps each
    num_intervals: int = 0


@dataclass
class Chart:
    name: str
    ticks: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"x": [], "y": []})  # pixel, value
    lines: list[Line] = field(default_factory=list)

    def read(self, line: Line) -> np.ndarray:
        """The points of a line as values, by the ticks of both axes."""
        points = np.array([point for part in line.points for point in part])
        scales = [np.polyfit(*np.array(self.ticks[axis]).T, deg=1) for axis in "xy"]
        return np.stack([np.polyval(scale, points[:, i]) for i, scale in enumerate(scales)], axis=1)


class Page(HTMLParser):
    """Fails on tags that don't match, and on whatever would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.charts: list[Chart] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        assert tag not in {"script", "link", "img", "iframe", "object"}
        assert not {"src", "href", "style"} & found.keys()
        if tag not in VOID:
            self.open.append(tag)
        match tag:
            case "svg":
                assert found["viewbox"] == f"0 0 {WIDTH} {HEIGHT}"
                self.charts.append(Chart(name=found["aria-label"]))
            case "text" if "tick" in found["class"]:
                axis = found["class"][0]
                self.charts[-1].ticks[axis].append((float(found[axis]), float(found["data-value"])))
            case "g":
                self.charts[-1].lines.append(Line(run="", key=found["data-key"]))
            case "polyline":
                points = [tuple(map(float, pair.split(","))) for pair in found["points"].split()]
                assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
                self.charts[-1].lines[-1].points.append(points)
            case "path" if found["class"] == "interval":
                self.charts[-1].lines[-1].num_intervals += 1

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-2:] == ["g", "title"]:
            self.charts[-1].lines[-1].run = data.rpartition(": ")[0]
        elif self.open and self.open[-1] != "style" and data.strip():
            self.texts.append(data.strip())

    def lines(self) -> Iterator[tuple[Chart, Line]]:
        yield from ((chart, line) for chart in self.charts for line in chart.lines)


def metrics(num_lines: int, *, seed: int) -> list[dict]:
    """Every second line with an evaluation; the third without a loss, as of a step that was not finite."""
    generator = np.random.default_rng(seed)
    lines = []
    for i in range(num_lines):
        keys = CURVES if i % 2 else CURVES[:8]
        line = {"step": 10 * (i + 1), "epoch": 0} | {key: float(generator.uniform(0.1, 9)) for key in keys}
        line |= {"skipped_steps": i // 3, "accuracy_per_slot": generator.uniform(size=3).tolist()}
        if i % 2:
            line |= {"heldout_acceptance_length_half_width": 0.25, "heldout_accuracy_per_slot": [0.5, 0.25, None]}
        lines.append(line)
    lines[2] |= {"loss": None, "bad_step": 27, "bad_rows": [4, 17]}
    return lines


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("cached")
    return write_cache(directory / "cache", RunConfig.load(write_config(directory / "tiny.toml")))


@pytest.fixture
def runs(tmp_path, cache) -> list[Path]:
    """Two, with names that HTML must not take literally, on one cache."""
    for seed, name in enumerate(("<a> & b", "c")):
        run = tmp_path / name
        run.mkdir()
        recorded = {"cache": str(cache), "num_steps": 70, "train.lr": 0.1 * (seed + 1), "train.seed": 0}
        (run / "config.json").write_text(json.dumps(recorded))
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics(7, seed=seed)))
    return [tmp_path / "<a> & b", tmp_path / "c"]


def read_lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_every_curve_is_what_the_metrics_say(runs):
    page = Page(report(runs, None).read_text())
    found = {(line.run, line.key): (chart, line) for chart, line in page.lines() if "slot" not in line.key}
    assert found.keys() == {(str(run), key) for run in runs for key in CURVES}
    for (run, key), (chart, line) in found.items():
        expected = [(m["step"], m[key]) for m in read_lines(Path(run)) if m.get(key) is not None]
        (low, first), *_, (high, last) = chart.ticks["y"]
        pixel = abs((last - first) / (high - low))
        np.testing.assert_allclose(chart.read(line), expected, rtol=0, atol=max(0.02 * pixel, 0.01), err_msg=key)
        assert len(line.points) == (2 if key == "loss" else 1)  # the gap
        assert line.num_intervals == (3 if key == "heldout_acceptance_length" else 0)


def test_accuracy_is_drawn_by_slot(runs):
    page = Page(report(runs, None).read_text())
    [chart] = [chart for chart in page.charts if chart.name == "accuracy per slot"]
    for line in chart.lines:
        last = read_lines(Path(line.run))[-1 if line.key == "accuracy_per_slot" else -2][line.key]
        expected = [(slot, value) for slot, value in enumerate(last, start=1) if value is not None]
        np.testing.assert_allclose(chart.read(line), expected, rtol=0, atol=0.01)
    assert len(chart.lines) == 4


def test_differences_faults_and_the_cache_are_told(runs):
    texts = Page(report(runs, None).read_text()).texts
    differing = texts[texts.index("What differs") :]
    assert differing[1:7] == ["key", str(runs[0]), str(runs[1]), "train.lr", "0.1", "0.2"]
    assert "train.seed" not in differing[: differing.index(f"Configuration of {runs[0]}")]
    assert texts.count("rows 4, 17") == 2
    assert any("documents" in text and "quarantine" not in text and "bytes" in text for text in texts)


def test_a_run_alone_whose_cache_is_gone(runs, capsys, monkeypatch):
    config = json.loads((runs[0] / "config.json").read_text())
    (runs[0] / "config.json").write_text(json.dumps(config | {"cache": "/nowhere"}))
    monkeypatch.setattr("sys.argv", ["train", "report", str(runs[0])])
    assert main() == 0
    assert capsys.readouterr().out == f"wrote {runs[0] / 'report.html'}\n"
    texts = Page((runs[0] / "report.html").read_text()).texts
    assert "What differs" not in texts
    assert any(text.startswith("/nowhere") and "manifest.json" in text for text in texts)


def test_what_can_not_be_reported_is_refused(runs, tmp_path):
    (runs[1] / "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match="has no metrics yet"):
        report(runs, None)
    with pytest.raises(UsageError, match="holds no run"):
        report([tmp_path], None)
    with pytest.raises(RunError, match="--output names another"):
        report(runs[:1], tmp_path / "nowhere/report.html")


@pytest.mark.parametrize("values", [(0, 0), (3, 3), (-2, 5), (1e-7, 3e-7), (18.6, 7.31), (0, 123456), (5, 5.0001)])
def test_an_axis_ends_with_round_ticks_around_all_values(values):
    axis = Axis.over(values, start=100, end=0)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 8
    assert ticks[0] - 1e-9 * axis.tick <= min(values) <= max(values) <= ticks[-1] + 1e-9 * axis.tick
    assert (axis(ticks[0]), axis(ticks[-1])) == pytest.approx((100, 0), abs=1e-6)
    assert float(f"{axis.tick:.1g}") == pytest.approx(axis.tick)


def test_numbers_of_ticks():
    values = (0, 3 * 0.1, 1000, 1500, 12_000, 1.5e6, 2e6, 1e-16)
    assert [short(value) for value in values] == ["0", "0.3", "1 k", "1500", "12 k", "1500 k", "2 M", "0"]


def test_long_runs_are_thinned_to_means():
    points = tuple(Point(x=i, y=float(i % 2)) for i in range(2 * MAX_POINTS))
    thinned = thin(Series(label="", style="", key="", points=points)).points
    assert len(thinned) == MAX_POINTS
    assert {point.y for point in thinned} == {0.5}


def test_nothing_measured_is_said():
    assert draw("τ", "step", [Series(label="", style="", key="", points=(Point(x=1, y=None),))]).startswith("<p>")


def test_a_browser_shows_it(runs, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    file = report(runs, tmp_path / "report.html")
    picture = tmp_path / "report.png"
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}")
    command = [browser, *options, "--window-size=1400,2200", f"--screenshot={picture}", file.as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
