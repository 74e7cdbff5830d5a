"""Plots as SVGs that are the same for the same samples."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.peers.contestants import OURS
from benchmarks.peers.figures import Panel, good, quartiles
from benchmarks.peers.outcome import Outcome

_OURS, _THEIRS = "#1b6ca8", "#b9c4cc"
_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8f5ba8", "#d09a2d", "#3a9ca6", "#7d6b5d", "#d0649a", "#333333")


class Curve(NamedTuple):
    """One line: at each x all values."""

    name: str
    points: Sequence[tuple[float, Sequence[float]]]


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


def plot_panels(panels: Sequence[Panel], path: Path, *, across: int = 3) -> None:
    """Draw a small panel for each work, one bar per contestant, with its seconds and how many times longer it took."""
    down = -(-len(panels) // across)
    with _drawn(path, 3.0 * across, 1.45 * max(1, down)) as figure:
        figure.set_layout_engine("constrained", hspace=0.08, wspace=0.04)
        grid = list(figure.subplots(max(1, down), across, squeeze=False).flat)
        for axes in grid[len(panels) :]:
            axes.axis("off")
        for axes, panel in zip(grid, panels, strict=False):
            rows = list(panel.took_s.items())[::-1]
            longest_s = max(panel.took_s.values())
            for row, (name, took_s) in enumerate(rows):
                axes.barh(row, took_s, height=0.7, color=_OURS if name == OURS else _THEIRS)
                text = f" {took_s:.3g} s" + (f", {panel.times[name]}" if name in panel.times else "")
                inside = took_s > 0.6 * longest_s
                colour = "white" if inside and name == OURS else "black"
                axes.annotate(
                    text.strip() + " " if inside else text,
                    (took_s, row),
                    va="center",
                    ha="right" if inside else "left",
                    color=colour,
                )
            axes.set_yticks(range(len(rows)), [name for name, _ in rows])
            axes.tick_params(length=0)
            axes.set_xticks([])
            axes.set_title(panel.label, fontsize=9, loc="left", fontweight="bold")
            axes.spines[["top", "right", "bottom"]].set_visible(False)
