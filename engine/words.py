"""Sizes, times, texts and tables as people read them."""

from collections.abc import Iterable, Sequence

from index.words import count, human_bytes, human_duration, iso_time, printable, shortened

__all__ = ["count", "human_bytes", "human_duration", "iso_time", "printable", "shortened", "table"]


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> list[str]:
    """Aligned lines, two spaces between columns; the columns named in `right` are numbers."""
    cells = [headers, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    to_right = {i for i, header in enumerate(headers) if header in set(right)}

    def line(row: Sequence[str]) -> str:
        aligned = [
            cell.rjust(w) if i in to_right else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(aligned).rstrip()

    return [line(row) for row in cells]
