"""Curves as SVG: a few lines over one pair of linear axes. Colours and line styles are those of the page's CSS."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

WIDTH, HEIGHT = 640, 280  # units of the drawing; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40  # margins
NUM_TICKS = 6  # at most so many intervals on an axis
MAX_POINTS = 1000  # of a line: more would not be seen


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    y: float | None  # None: nothing was counted, the line has a gap
    half_width: float | None = None  # of an interval around y


@dataclass(frozen=True, kw_only=True)
class Series:
    label: str  # for the reader who points at the line
    style: str  # CSS classes
    key: str  # which metric it is
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear scale from `first` to `last`, both ticks, onto pixels."""

    first: float
    last: float
    tick: float
    start: float  # pixel of `first`
    end: float

    @classmethod
    def over(cls, values: Iterable[float], *, start: float, end: float) -> "Axis":
        """Round numbers around all `values`."""
        values = list(values)
        low, high = min(values), max(values)
        if low == high:
            low, high = low - abs(low) / 2, high + (abs(high) / 2 or 1)
        rough = (high - low) / (NUM_TICKS - 1)
        power = 10.0 ** math.floor(math.log10(rough))
        tick = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
        return cls(
            first=math.floor(low / tick + 1e-9) * tick,
            last=math.ceil(high / tick - 1e-9) * tick,
            tick=tick,
            start=start,
            end=end,
        )

    def __call__(self, value: float) -> float:
        return self.start + (value - self.first) / (self.last - self.first) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return [self.first + i * self.tick for i in range(round((self.last - self.first) / self.tick) + 1)]


def draw(name: str, x_name: str, series: Sequence[Series]) -> str:
    """The `<svg>` of the series, or a sentence when they have no points."""
    series = [thin(line) for line in series]
    shown = [point for line in series for point in line.points if point.y is not None]
    if not shown:
        return "<p>nothing was measured</p>"
    x_axis = Axis.over((point.x for point in shown), start=LEFT, end=WIDTH - RIGHT)
    bounds = (point.y + side * (point.half_width or 0) for point in shown for side in (-1, 1))
    y_axis = Axis.over(bounds, start=HEIGHT - BOTTOM, end=TOP)
    parts = [*_grid(x_axis, y_axis), f'<text class="name" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}">{escape(x_name)}</text>']
    for line in series:
        parts += _line(line, x_axis, y_axis)
    label = escape(name, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def thin(series: Series) -> Series:
    """At most MAX_POINTS: neighbours are averaged, and intervals left out, where there are more."""
    points = series.points
    if len(points) <= MAX_POINTS:
        return series
    size = -(-len(points) // MAX_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    averaged = tuple(Point(x=_mean([p.x for p in group]), y=_mean([p.y for p in group])) for group in groups)
    return Series(label=series.label, style=series.style, key=series.key, points=averaged)


def _mean(values: Sequence[float | None]) -> float | None:
    counted = [value for value in values if value is not None]
    return sum(counted) / len(counted) if counted else None


def _grid(x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    for value in y_axis.ticks():
        y = f"{y_axis(value):.2f}"
        yield f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
        yield f'<text class="y tick" data-value="{value!r}" x="{LEFT - 6}" y="{y}" dy="4">{short(value)}</text>'
    for value in x_axis.ticks():
        x = f"{x_axis(value):.2f}"
        yield f'<path class="grid" d="M{x} {TOP}V{HEIGHT - BOTTOM}"/>'
        yield f'<text class="x tick" data-value="{value!r}" x="{x}" y="{HEIGHT - BOTTOM + 16}">{short(value)}</text>'


def _line(series: Series, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    yield f'<g class="{series.style}" data-key="{escape(series.key)}"><title>{escape(series.label)}</title>'
    for is_gap, group in groupby(series.points, key=lambda point: point.y is None):
        if not is_gap:
            points = [(x_axis(p.x), y_axis(p.y), p) for p in group]
            yield f'<polyline points="{" ".join(f"{x:.2f},{y:.2f}" for x, y, _ in points)}"/>'
            if len(points) == 1:  # which a line would not show
                yield f'<circle cx="{points[0][0]:.2f}" cy="{points[0][1]:.2f}" r="3"/>'
            for x, _, p in points:
                if p.half_width is not None:
                    low, high = y_axis(p.y - p.half_width), y_axis(p.y + p.half_width)
                    yield f'<path class="interval" d="M{x:.2f} {low:.2f}V{high:.2f}"/>'
    yield "</g>"


def short(value: float) -> str:
    """A number for a tick, without the dust of binary fractions."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size and value % size == 0):
            return f"{value / size:.6g} {unit}"
    return f"{value:.6g}" if abs(value) > 1e-12 else "0"
