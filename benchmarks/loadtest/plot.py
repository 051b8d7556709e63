"""Small SVG plots. Colours are CSS variables of the page; hovering a mark tells its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape

from benchmarks.loadtest.text import number

WIDTH, HEIGHT = 620, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 48
NUM_COLOURS = 6
MOST_TICKS = 6


@dataclass(frozen=True, slots=True)
class Point:
    """A mark."""

    x: float
    y: float
    low: float | None = None
    """Of its interval."""
    high: float | None = None
    label: str = ""
    """Beside the mark."""


@dataclass(frozen=True, slots=True)
class Series:
    """Marks of one thing."""

    name: str
    points: tuple[Point, ...]
    colour: int
    """Index of the page's colours, and of a mark's shape."""
    dashed: bool = False
    marked: bool = True
    """Whether its points have marks."""


@dataclass(frozen=True, slots=True)
class Line:
    """A value to compare with, across the plot."""

    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the horizontal axis."""

    start: float
    end: float
    name: str
    colour: int | None = None
    """None: only its start is marked."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What it shows."""

    label: str
    log: bool = False
    ticks: tuple[float, ...] = ()
    """By default round numbers."""
    end: float | None = None
    """By default where the data end."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to places in the drawing."""

    low: float
    high: float
    start: float
    stop: float
    log: bool

    def __call__(self, value: float) -> float:
        low, high = self._turned(self.low), self._turned(self.high)
        part = (self._turned(max(value, self.low)) - low) / (high - low)
        return self.start + min(1.0, part) * (self.stop - self.start)

    def _turned(self, value: float) -> float:
        return math.log10(value) if self.log else value


def line_plot(
    series: Sequence[Series],
    x_axis: Axis,
    y_axis: Axis,
    lines: Sequence[Line] = (),
    spans: Sequence[Span] = (),
) -> str:
    """Empty where no series has a point that the axes can show."""
    shown = [_showable(each, x_axis, y_axis) for each in series]
    points = [point for each in shown for point in each.points]
    if not points:
        return ""
    x = _scale(x_axis, [point.x for point in points], LEFT, WIDTH - RIGHT)
    ends = [value for point in points for value in (point.low, point.y, point.high) if value]
    heights = [*ends, *(line.y for line in lines), *(point.y for point in points)]
    y = _scale(y_axis, heights, HEIGHT - BOTTOM, TOP)
    drawn = [_axes(x_axis, y_axis, x, y)]
    drawn += [_span(span, x) for span in spans]
    drawn += [_reference(line, y) for line in lines]
    drawn += [_series(each, x, y) for each in shown]
    return _svg(f"{y_axis.label} against {x_axis.label}", drawn)


def area_plot(
    layers: Sequence[Series], x_axis: Axis, y_axis: Axis, spans: Sequence[Span] = ()
) -> str:
    """Layers on one another; their points have the same x. Empty without points."""
    if not layers or not layers[0].points:
        return ""
    xs = [point.x for point in layers[0].points]
    tops = [0.0] * len(xs)
    stacked: list[tuple[Series, list[float], list[float]]] = []
    for layer in layers:
        floor = tops
        tops = [top + point.y for top, point in zip(tops, layer.points, strict=True)]
        stacked.append((layer, floor, tops))
    x = _scale(x_axis, xs, LEFT, WIDTH - RIGHT)
    y = _scale(y_axis, tops, HEIGHT - BOTTOM, TOP)
    drawn = [_axes(x_axis, y_axis, x, y)]
    for layer, floor, top in stacked:
        way = [*zip(xs, top, strict=True), *reversed(list(zip(xs, floor, strict=True)))]
        drawn.append(
            f'<polygon class="area c{layer.colour % NUM_COLOURS}" points="{_way(way, x, y)}">'
            f"<title>{escape(layer.name)}</title></polygon>"
        )
    drawn += [_span(span, x) for span in spans]
    return _svg(f"{y_axis.label} against {x_axis.label}", drawn)


def bar_plot(
    names: Sequence[str], layers: Sequence[tuple[str, int, Sequence[float]]], axis: Axis
) -> str:
    """A horizontal bar for each name, of layers (name, colour, values) after one another."""
    totals = [sum(values[row] for _, _, values in layers) for row in range(len(names))]
    if not totals or not max(totals):
        return ""
    step, left = 24, 190
    height = TOP + step * len(names) + BOTTOM
    x = _Scale(0.0, max(totals), left, WIDTH - RIGHT, log=False)
    drawn = []
    for row, name in enumerate(names):
        top, done = TOP + step * row, 0.0
        drawn.append(_text("tick", left - 8, top + 15, name, "end"))
        for layer, colour, values in layers:
            start, done = x(done), done + values[row]
            drawn.append(
                f'<rect class="fill c{colour % NUM_COLOURS}" x="{start:.1f}" y="{top + 3}" '
                f'width="{x(done) - start:.1f}" height="{step - 6}">'
                f"<title>{escape(f'{name}: {layer} {number(values[row])}')}</title></rect>"
            )
    foot = TOP + step * len(names) + 4
    for tick in _round_ticks(0.0, max(totals)):
        drawn.append(_text("tick", x(tick), foot + 14, number(tick)))
    drawn.append(_text("label", (left + WIDTH) / 2, foot + 34, axis.label))
    return _svg(axis.label, drawn, height)


class Key(StrEnum):
    """How a series looks in a legend."""

    MARKED = "marked"
    LINE = "line"
    AREA = "area"


def legend(entries: Iterable[tuple[str, int]], key: Key = Key.MARKED) -> str:
    """Of (name, colour)."""
    items = "".join(
        f'<li><svg viewBox="0 0 26 12" width="26" height="12" aria-hidden="true">'
        f"{_swatch(colour, key)}</svg>{escape(name)}</li>"
        for name, colour in entries
    )
    return f'<ul class="legend">{items}</ul>'


def _swatch(colour: int, key: Key) -> str:
    name = f"c{colour % NUM_COLOURS}"
    if key is Key.AREA:
        return f'<rect class="fill {name}" x="4" y="1" width="18" height="10"/>'
    return _rule(f"line {name}", 1, 6, 25, 6) + (_mark(colour, 13, 6) if key is Key.MARKED else "")


def _showable(series: Series, x_axis: Axis, y_axis: Axis) -> Series:
    """Without what a logarithmic axis cannot show."""
    points = tuple(
        point
        for point in series.points
        if (point.x > 0 or not x_axis.log) and (point.y > 0 or not y_axis.log)
    )
    return Series(series.name, points, series.colour, series.dashed, series.marked)


def _scale(axis: Axis, values: Sequence[float], start: float, stop: float) -> _Scale:
    low, high = min((*values, *axis.ticks)), max((*values, *axis.ticks))
    if axis.end is not None:
        high = axis.end
    if axis.log:
        low, high = low / 1.15, high * 1.15
        return _Scale(low, high, start, stop, log=True)
    low = min(0.0, low)
    high = high if axis.end is not None else high * 1.05
    return _Scale(low, high if high > low else low + 1.0, start, stop, log=False)


def _ticks(axis: Axis, scale: _Scale) -> list[float]:
    if axis.ticks:
        return list(axis.ticks)
    return _log_ticks(scale) if axis.log else _round_ticks(scale.low, scale.high)


def _round_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / MOST_TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step)
    return [tick * step for tick in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(scale: _Scale) -> list[float]:
    powers = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    for factors in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        within = [tick for tick in ticks if scale.low <= tick <= scale.high]
        if len(within) <= MOST_TICKS + 2:
            break
    return within if len(within) > 1 else _round_ticks(scale.low, scale.high)


def _axes(x_axis: Axis, y_axis: Axis, x: _Scale, y: _Scale) -> str:
    floor, end = HEIGHT - BOTTOM, WIDTH - RIGHT
    drawn = [_rule("axis", LEFT, floor, end, floor)]
    for tick in _ticks(y_axis, y):
        drawn.append(_rule("grid", LEFT, y(tick), end, y(tick)))
        drawn.append(_text("tick", LEFT - 7, y(tick) + 4, number(tick), "end"))
    for tick in _ticks(x_axis, x):
        drawn.append(_rule("axis", x(tick), floor, x(tick), floor + 4))
        drawn.append(_text("tick", x(tick), floor + 17, number(tick)))
    drawn.append(_text("label", (LEFT + end) / 2, HEIGHT - 8, x_axis.label))
    turned = f"rotate(-90 14 {(TOP + floor) / 2})"
    drawn.append(_text("label", 14, (TOP + floor) / 2, y_axis.label, "middle", turned))
    return "".join(drawn)


def _reference(line: Line, y: _Scale) -> str:
    end = WIDTH - RIGHT
    rule = _rule("reference", LEFT, y(line.y), end, y(line.y))
    return rule + _text("reference-label", end - 2, y(line.y) - 4, line.label, "end")


def _span(span: Span, x: _Scale) -> str:
    """A coloured strip along the top, or a rule at its start."""
    left, right = x(span.start), x(span.end)
    name = f"<title>{escape(span.name)}</title>"
    if span.colour is None:
        return f"<g>{_rule('start', left, TOP, left, HEIGHT - BOTTOM)}{name}</g>"
    return (
        f'<rect class="fill c{span.colour % NUM_COLOURS}" x="{left:.1f}" y="2" '
        f'width="{max(0.0, right - left):.1f}" height="6">{name}</rect>'
    )


def _rule(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(
    kind: str, x: float, y: float, text: str, anchor: str = "middle", turned: str = ""
) -> str:
    transform = f' transform="{turned}"' if turned else ""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{transform}>'
        f"{escape(text)}</text>"
    )


def _series(series: Series, x: _Scale, y: _Scale) -> str:
    colour = f"c{series.colour % NUM_COLOURS}"
    dashed = " dashed" if series.dashed else ""
    way = _way([(point.x, point.y) for point in series.points], x, y)
    drawn = [f'<polyline class="line {colour}{dashed}" points="{way}"/>']
    for point in series.points if series.marked else ():
        drawn.append(_point(series, point, colour, x, y))
    return "".join(drawn)


def _point(series: Series, point: Point, colour: str, x: _Scale, y: _Scale) -> str:
    across, up = x(point.x), y(point.y)
    interval, told = "", f"{series.name}: {number(point.y)}"
    if point.low is not None and point.high is not None:
        told += f" [{number(point.low)}, {number(point.high)}]"
        interval = _rule(f"line thin {colour}", across, y(point.low), across, y(point.high))
    label = ""
    if point.label:
        told += f", {point.label}"
        label = _text("mark-label", across + 7, up - 6, point.label, "start")
    told += f" at {number(point.x)}"
    mark = _mark(series.colour, across, up)
    return f"<g>{interval}{mark}{label}<title>{escape(told)}</title></g>"


def _mark(colour: int, x: float, y: float) -> str:
    """Of another shape for each colour, for those who do not tell colours apart."""
    kind = f'class="fill c{colour % NUM_COLOURS}"'
    shapes: tuple[Callable[[], str], ...] = (
        lambda: f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        lambda: f'<rect {kind} x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2"/>',
        lambda: f'<path {kind} d="M{x:.1f} {y - 5:.1f}l4.8 8.4h-9.6z"/>',
        lambda: f'<path {kind} d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"/>',
        lambda: f'<path {kind} d="M{x:.1f} {y + 5:.1f}l4.8 -8.4h-9.6z"/>',
        lambda: f'<rect {kind} x="{x - 5:.1f}" y="{y - 2:.1f}" width="10" height="4"/>',
    )
    return shapes[colour % NUM_COLOURS]()


def _way(points: Iterable[tuple[float, float]], x: _Scale, y: _Scale) -> str:
    return " ".join(f"{x(across):.1f},{y(up):.1f}" for across, up in points)


def _svg(title: str, drawn: Sequence[str], height: float = HEIGHT) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(drawn)}</svg>"
    )
