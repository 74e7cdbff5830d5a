"""The plot of an outcome: one panel per step, one bar per contestant, every sample a dot."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.peers.contestants import OURS
from benchmarks.peers.figures import good, quartiles
from benchmarks.peers.outcome import Outcome

_OURS, _THEIRS = "#1b6ca8", "#b9c4cc"


def plot(outcome: Outcome, path: Path) -> None:
    """Write an SVG that is the same for the same samples."""
    with mpl.rc_context({"svg.hashsalt": "tidemark", "svg.fonttype": "none", "font.size": 9}):
        steps = outcome.steps()
        figure = Figure(figsize=(5.2 * len(steps), 0.8 + 0.36 * max(2, len(outcome.contestants))), layout="constrained")
        panels = figure.subplots(1, len(steps), squeeze=False)[0]
        for panel, step in zip(panels, steps, strict=True):
            names = [name for name in outcome.contestants if good(outcome.of(step, name))][::-1]
            for row, name in enumerate(names):
                values = [sample.work_s for sample in good(outcome.of(step, name))]
                middle = quartiles(values).median
                panel.barh(row, middle, color=_OURS if name.startswith(OURS) else _THEIRS)
                panel.plot(values, [row] * len(values), ".", color="#333333", markersize=3)
                panel.annotate(f" {middle:.2f}", (max(middle, *values), row), va="center")
            panel.set_yticks(range(len(names)), names)
            panel.margins(x=0.12)
            panel.set_xlim(left=0)
            panel.set_xlabel("seconds")
            panel.set_title(step)
            panel.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"{outcome.title} ({outcome.server}, to {outcome.target})")
        figure.savefig(path, metadata={"Date": None})
