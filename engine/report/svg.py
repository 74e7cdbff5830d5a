"""Plots as SVG inside a page of `engine.report.html`: no script, no link, every text escaped, colours of that page.

Each plot has a title and a description for who cannot see it, and its figures stand in a table beside it.
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from engine.report.html import tell

WIDTH: Final = 720
LEFT: Final = 64
RIGHT: Final = 12
_TOP: Final = 12
_HEIGHT: Final = 220
_BOTTOM: Final = 26
_TICKS: Final = 4

# Light and dark pages show these on their own background: they are neither.
GREY: Final = "#8d9aa5"
BLUE: Final = "#2a80bd"
ORANGE: Final = "#d99a2b"
GREEN: Final = "#1b9e77"


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One bar of a row: parts from the bottom up, or none, which is a failure."""

    parts: Sequence[tuple[float, str]]
    title: str
    label: str = ""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a plot."""

    points: Sequence[tuple[float, float]]
    colour: str
    title: str


class Words(msgspec.Struct, frozen=True):
    """What a plot is, in a few words, and what it shows."""

    title: str
    description: str = ""


def stacked_bars(bars: Sequence[Bar], *, words: Words, unit: str) -> str:
    """Bars side by side, the oldest first; a failure is a red cross."""
    top = _nice_top(max((sum(value for value, _ in bar.parts) for bar in bars), default=0.0))
    step = (WIDTH - LEFT - RIGHT) / max(1, len(bars))
    wide = min(36.0, step * 0.7)
    # Labels are left out where they would run into each other.
    every = max(1, math.ceil(8.0 * max((len(bar.label) for bar in bars), default=0) / step))
    drawn = [_y_axis(top, unit)]
    for number, bar in enumerate(bars):
        x = LEFT + step * (number + 0.5)
        inside = [f"<title>{tell(bar.title)}</title>"]
        if not bar.parts:
            inside.append(text(x, _y(0, top) - 4, "x", style="alarm", anchor="middle", size=18))
        base = 0.0
        for value, colour in bar.parts:
            y, height = _y(base + value, top), _y(base, top) - _y(base + value, top)
            inside.append(rect(x - wide / 2, y, wide, height, colour))
            base += value
        if bar.label and number % every == 0:
            inside.append(text(x, _HEIGHT - 10, bar.label, style="soft", anchor="middle"))
        drawn.append(f"<g>{''.join(inside)}</g>")
    return figure(WIDTH, _HEIGHT, drawn, words)


def points_over_time(
    line: Line, titles: Sequence[str], *, words: Words, unit: str, ticks: Sequence[tuple[float, str]]
) -> str:
    """Points at their times, joined by a thin line.

    Args:
        line: Its x are times in any unit, ascending.
        titles: Of each point.
        words: What it is.
        unit: Of y.
        ticks: Times below the x axis, and what is written there.
    """
    top = _nice_top(max((y for _, y in line.points), default=0.0))
    times = [*(x for x, _ in line.points), *(x for x, _ in ticks)]
    first, last = min(times, default=0.0), max(times, default=0.0)

    def place(x: float) -> float:
        share = (x - first) / (last - first) if last > first else 0.5
        return LEFT + 24 + share * (WIDTH - LEFT - RIGHT - 72)

    points = [(place(x), _y(y, top)) for x, y in line.points]
    drawn = [_y_axis(top, unit), _polyline(points, line.colour, line.title)]
    drawn += [text(place(x), _HEIGHT - 10, told, style="soft", anchor="middle") for x, told in ticks]
    drawn += [circle(x, y, 4, line.colour, title) for (x, y), title in zip(points, titles, strict=True)]
    return figure(WIDTH, _HEIGHT, drawn, words)


# ---------------------------------------------------------------------- pieces


def figure(width: float, height: float, drawn: Sequence[str], words: Words) -> str:
    """A whole picture of some pieces, as large as it says: text keeps its size, and a frame scrolls (`page.framed`)."""
    described = f"<desc>{tell(words.description)}</desc>" if words.description else ""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img">'
        f"<title>{tell(words.title)}</title>{described}{''.join(drawn)}</svg>"
    )


def text(x: float, y: float, told: str, *, style: str = "ink", anchor: str = "start", size: int | None = None) -> str:
    """A text; `style` is a class of the page."""
    sized = f' font-size="{size}"' if size is not None else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}"{sized}>{tell(told)}</text>'


def rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"></rect>'


def circle(x: float, y: float, radius: float, colour: str, title: str = "") -> str:
    """A filled circle."""
    named = f"<title>{tell(title)}</title>" if title else ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}">{named}</circle>'


def segment(x1: float, y1: float, x2: float, y2: float, *, style: str = "axis", dashed: bool = False) -> str:
    """A straight line; `style` is a class of the page."""
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"{dashes}></line>'


def _polyline(points: Sequence[tuple[float, float]], colour: str, title: str) -> str:
    told = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{told}">'
        f"<title>{tell(title)}</title></polyline>"
    )


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)


def _y_axis(top: float, unit: str) -> str:
    drawn = []
    for tick in range(_TICKS + 1):
        value = top * tick / _TICKS
        y = _y(value, top)
        drawn.append(segment(LEFT, y, WIDTH - RIGHT, y, style="axis" if tick == 0 else "grid"))
        drawn.append(text(LEFT - 6, y + 4, f"{value:g} {unit}", anchor="end"))
    return "".join(drawn)


def _nice_top(value: float) -> float:
    """The next of 1, 2, 4, 5, 8, 10 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((power * step for step in (1, 2, 4, 5, 8) if power * step >= value), power * 10)
