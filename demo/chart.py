"""The chart of the demo: what each month's commit uploaded, where the disks went, what collection freed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt  # the backend is chosen before

MB: Final = 1_000_000
NEW, RETAINED, STORED, KEPT, FREED = "#d95f02", "#b3cde3", "#333333", "#999999", "#1b9e77"


class MonthBar(NamedTuple):
    """One commit."""

    label: str
    new_bytes: int
    retained_bytes: int
    # What the repository held after it.
    stored_bytes: int
    seconds: float


def draw(
    path: Path, months: Sequence[MonthBar], *, lost_after: int, restore: str, freed: str, stored_after_bytes: int
) -> None:
    """Write a PNG.

    Args:
        path: Where to.
        months: One bar per commit, in order.
        lost_after: Behind which bar the disks were lost, counted from 1.
        restore: What to say of the restore.
        freed: What to say of the collection.
        stored_after_bytes: What the repository held after the collection.
    """
    figure, axes = plt.subplots(figsize=(11, 6), layout="constrained")
    places = range(1, len(months) + 1)
    retained = [month.retained_bytes / MB for month in months]
    new = [month.new_bytes / MB for month in months]
    axes.bar(places, retained, color=RETAINED, label="snapshot: bytes retained (already in the repository)")
    axes.bar(places, new, bottom=retained, color=NEW, label="snapshot: bytes new (uploaded by this commit)")
    stored = [month.stored_bytes / MB for month in months]
    end = len(months) + 1
    axes.plot(places, stored, color=STORED, marker="o", label="repository: everything it holds")
    kept_mb = stored_after_bytes / MB
    axes.bar(end, kept_mb, color=KEPT, label="repository after collection")
    axes.bar(end, stored[-1] - kept_mb, bottom=kept_mb, color="white", edgecolor=FREED, hatch="//")
    axes.axvline(lost_after + 0.5, color="black", linestyle=":")
    top = max([*stored, *(n + r for n, r in zip(new, retained, strict=True))])
    axes.text(lost_after + 0.42, top * 1.09, restore, ha="right", va="top")
    axes.text(end + 0.4, top * 1.03, freed, ha="right", va="bottom", color=FREED)
    axes.set_xticks([*places, end], [*(month.label for month in months), "collect"])
    axes.set_ylim(0, top * 1.18)
    axes.set_ylabel("MB")
    axes.set_title("State of 4,043 aircraft, 4 tasks, one commit per month: what each commit had to upload")
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
