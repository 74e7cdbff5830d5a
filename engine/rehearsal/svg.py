"""Plots as SVG inside a page: no script, no link, every text escaped."""

import math
from collections.abc import Sequence
from html import escape
from typing import Final

import msgspec

WIDTH: Final = 720
_LEFT: Final = 64
_RIGHT: Final = 12
_TOP: Final = 12
_HEIGHT: Final = 220
_BOTTOM: Final = 26
_ROW: Final = 26
_TICKS: Final = 4
_LABEL_LEFT: Final = 140

# A limit that is higher than so many times what was measured is left out: it would flatten the rest.
_LIMIT_MAX: Final = 3

GREY: Final = "#b9c4cc"
RED: Final = "#c0392b"


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One bar of a history: parts from the bottom up, or none, which is a failure."""

    parts: Sequence[tuple[float, str]]
    title: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a plot."""

    points: Sequence[tuple[float, float]]
    colour: str
    title: str


def stacked_bars(bars: Sequence[Bar], *, limit: float | None, unit: str) -> str:
    """Bars side by side, the oldest first; a failure is a red cross, the limit a dashed line."""
    limit, top = _scale([sum(value for value, _ in bar.parts) for bar in bars], limit)
    step = (WIDTH - _LEFT - _RIGHT) / max(1, len(bars))
    wide = min(36.0, step * 0.7)
    drawn = [_y_axis(top, unit)]
    for number, bar in enumerate(bars):
        x = _LEFT + step * (number + 0.5)
        inside = [f"<title>{escape(bar.title)}</title>"]
        if not bar.parts:
            inside.append(_text(x, _y(0, top) - 4, "x", colour=RED, anchor="middle", size=18))
        base = 0.0
        for value, colour in bar.parts:
            y, height = _y(base + value, top), _y(base, top) - _y(base + value, top)
            inside.append(_rect(x - wide / 2, y, wide, height, colour))
            base += value
        drawn.append(f"<g>{''.join(inside)}</g>")
    if limit is not None:
        drawn.append(_limit(limit, top))
    return _svg(_HEIGHT, drawn)


def lines(drawn_lines: Sequence[Line], *, ticks: Sequence[float], limit: float | None, unit: str, x_name: str) -> str:
    """Lines over a logarithmic x axis from the first tick to the last."""
    limit, top = _scale([y for line in drawn_lines for _, y in line.points], limit)
    low, high = math.log(ticks[0]), math.log(ticks[-1])

    def place(x: float) -> float:
        share = (math.log(x) - low) / (high - low)
        return _LEFT + 20 + share * (WIDTH - _LEFT - _RIGHT - 40)

    drawn = [_y_axis(top, unit)]
    drawn += [_text(place(tick), _HEIGHT - 10, f"{tick:g}", anchor="middle") for tick in ticks]
    drawn.append(_text(WIDTH - _RIGHT, _HEIGHT + 8, x_name, anchor="end"))
    for line in drawn_lines:
        points = " ".join(f"{place(x):.1f},{_y(y, top):.1f}" for x, y in line.points)
        title = f"<title>{escape(line.title)}</title>"
        drawn.append(
            f'<polyline fill="none" stroke="{line.colour}" stroke-width="2" points="{points}">{title}</polyline>'
        )
        drawn += [
            f'<circle cx="{place(x):.1f}" cy="{_y(y, top):.1f}" r="3" fill="{line.colour}"></circle>'
            for x, y in line.points
        ]
    if limit is not None:
        drawn.append(_limit(limit, top))
    return _svg(_HEIGHT + 14, drawn)


def rows(named: Sequence[tuple[str, float, str, str]], *, whole: float) -> str:
    """Bars below each other: a name, a length, a colour and what stands behind it; `whole` is the full width."""
    longest = max([whole, *(value for _, value, _, _ in named)]) or 1.0
    wide = WIDTH - _LABEL_LEFT - 90
    drawn = []
    for number, (name, value, colour, told) in enumerate(named):
        y = _TOP + number * _ROW
        length = wide * value / longest
        drawn.append(_text(_LABEL_LEFT - 8, y + 14, name, anchor="end"))
        drawn.append(_rect(_LABEL_LEFT, y, max(1.0, length), _ROW - 8, colour))
        drawn.append(_text(_LABEL_LEFT + max(1.0, length) + 6, y + 14, told))
    if 0 < whole <= longest:
        x = _LABEL_LEFT + wide * whole / longest
        drawn.append(_segment(x, _TOP - 6, x, _TOP + len(named) * _ROW - 4, "#333333", dashed=True))
    return _svg(2 * _TOP + len(named) * _ROW, drawn)


def _svg(height: int, drawn: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'font-family="sans-serif" font-size="12">{"".join(drawn)}</svg>'
    )


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)


def _y_axis(top: float, unit: str) -> str:
    drawn = []
    for tick in range(_TICKS + 1):
        value = top * tick / _TICKS
        y = _y(value, top)
        drawn.append(_segment(_LEFT, y, WIDTH - _RIGHT, y, "#333333" if tick == 0 else "#e3e8ec"))
        drawn.append(_text(_LEFT - 6, y + 4, f"{value:g} {unit}", anchor="end"))
    return "".join(drawn)


def _limit(limit: float, top: float) -> str:
    y = _y(limit, top)
    # Above the line, but where that would be outside.
    label_y = y - 4 if y > 2 * _TOP else y + 14
    line = _segment(_LEFT, y, WIDTH - _RIGHT, y, RED, dashed=True)
    return line + _text(WIDTH - _RIGHT, label_y, "SLO", colour=RED, anchor="end")


def _scale(heights: Sequence[float], limit: float | None) -> tuple[float | None, float]:
    """The limit, if it is worth drawing, and the top of the y axis."""
    highest = max(heights, default=0.0)
    shown = limit if limit is not None and limit <= _LIMIT_MAX * highest else None
    return shown, _nice_top(max(highest, shown or 0.0))


def _nice_top(value: float) -> float:
    """The next of 1, 2, 4, 5, 8, 10 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((power * step for step in (1, 2, 4, 5, 8) if power * step >= value), power * 10)


def _text(
    x: float, y: float, text: str, *, colour: str = "#333333", anchor: str = "start", size: int | None = None
) -> str:
    sized = f' font-size="{size}"' if size is not None else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}"{sized}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"></rect>'


def _segment(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}></line>'
