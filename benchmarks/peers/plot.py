"""Plots as SVGs that are the same for the same samples."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.peers.contestants import OURS
from benchmarks.peers.figures import Ratio, good, quartiles
from benchmarks.peers.outcome import Outcome

_OURS, _THEIRS = "#1b6ca8", "#b9c4cc"
_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8f5ba8", "#d09a2d", "#3a9ca6", "#7d6b5d", "#d0649a", "#333333")
_MARKERS = "osD^vPX*<"


class Curve(NamedTuple):
    """One line: at each x all values."""

    name: str
    points: Sequence[tuple[float, Sequence[float]]]


class Line(NamedTuple):
    """One line of the summary: how many times longer than ours each took."""

    label: str
    others: Mapping[str, Ratio]


@contextlib.contextmanager
def _drawn(path: Path, width: float, height: float) -> Iterator[Figure]:
    with mpl.rc_context({"svg.hashsalt": "tidemark", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None})


def plot_bars(outcome: Outcome, path: Path) -> None:
    """One panel per step, one bar per contestant, every sample a dot."""
    steps = outcome.steps()
    with _drawn(path, 5.2 * max(1, len(steps)), 0.8 + 0.36 * max(2, len(outcome.contestants))) as figure:
        panels = figure.subplots(1, max(1, len(steps)), squeeze=False)[0]
        for panel, step in zip(panels, steps, strict=False):
            names = [name for name in outcome.contestants if good(outcome.of(step, name))][::-1]
            for row, name in enumerate(names):
                values = [sample.work_s for sample in good(outcome.of(step, name))]
                middle = quartiles(values).median
                panel.barh(row, middle, color=_OURS if name.startswith(OURS) else _THEIRS)
                panel.plot(values, [row] * len(values), ".", color="#333333", markersize=3)
                panel.annotate(f" {middle:.3g}", (max(middle, *values), row), va="center")
            panel.set_yticks(range(len(names)), names)
            panel.margins(x=0.12)
            panel.set_xlim(left=0)
            panel.set_xlabel("seconds")
            panel.set_title(step)
            panel.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"{outcome.title} ({outcome.server}, to {outcome.target})")


def plot_curves(panels: Mapping[str, Sequence[Curve]], path: Path, *, title: str, x_label: str) -> None:
    """One panel per name: seconds over x, both logarithmic, medians joined and every sample a dot."""
    with _drawn(path, 4.6 * len(panels), 3.6) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for panel, (name, curves) in zip(axes, panels.items(), strict=True):
            for curve, colour in zip(curves, _COLOURS, strict=False):
                points = [(x, values) for x, values in curve.points if values]
                medians = [quartiles(values).median for _, values in points]
                panel.plot([x for x, _ in points], medians, "-o", color=colour, markersize=4, label=curve.name)
                for x, values in points:
                    panel.plot([x] * len(values), values, ".", color=colour, markersize=3)
            panel.set_xscale("log")
            panel.set_yscale("log")
            ticks = sorted({x for curve in curves for x, _ in curve.points})
            panel.set_xticks(ticks, [f"{x:g}" for x in ticks])
            panel.minorticks_off()
            panel.set_xlabel(x_label)
            panel.set_title(name)
            panel.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("seconds")
        axes[-1].legend(frameon=False)
        figure.suptitle(title)


def plot_lines(lines: Sequence[Line], path: Path) -> None:
    """How many times longer than ours: medians with quartiles, ours is the line at 1."""
    names = list(dict.fromkeys(name for line in lines for name in line.others))
    with _drawn(path, 8.6, 1.4 + 0.36 * max(2, len(lines))) as figure:
        panel = figure.subplots()
        for number, name in enumerate(names):
            colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
            rows = [(row, line.others[name].quartiles) for row, line in enumerate(lines[::-1]) if name in line.others]
            middles = [q.median for _, q in rows]
            reach = [[q.median - q.low for _, q in rows], [q.high - q.median for _, q in rows]]
            panel.errorbar(middles, [row for row, _ in rows], xerr=reach, fmt="none", ecolor=colour, alpha=0.5)
            panel.plot(middles, [row for row, _ in rows], marker, color=colour, markersize=5, label=name)
        panel.axvline(1, color=_OURS, linewidth=1.5)
        panel.set_yticks(range(len(lines)), [line.label for line in lines[::-1]])
        panel.set_ylim(-0.6, max(1, len(lines)) - 0.4)
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set_xlabel(f"times as long as {OURS} took (right of the line: slower)")
        panel.grid(axis="x", color="#e5e5e5")
        panel.spines[["top", "right"]].set_visible(False)
        if names:
            panel.legend(frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
        else:
            panel.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center")
