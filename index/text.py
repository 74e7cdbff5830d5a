"""Sizes, times and texts as people read them."""

from datetime import UTC, datetime
from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DAY_S: Final = 86_400
_HOUR_S: Final = 3_600
_MINUTE_S: Final = 60


def human_bytes(size_bytes: int) -> str:
    """Format a size with a unit that leaves at most four digits before the point."""
    size = float(size_bytes)
    for unit in _UNITS[:-1]:
        if size < 1023.95:  # noqa: PLR2004  (1,024 once it is rounded to one digit)
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"


def human_duration(duration_ms: int) -> str:
    """Format a duration with its two largest units."""
    if duration_ms < 1000:  # noqa: PLR2004
        return f"{duration_ms} ms"
    seconds = duration_ms // 1000
    for size, unit, below, below_unit in (
        (_DAY_S, "d", _HOUR_S, "h"),
        (_HOUR_S, "h", _MINUTE_S, "m"),
        (_MINUTE_S, "m", 1, "s"),
    ):
        if seconds >= size:
            rest = seconds % size // below
            return f"{seconds // size}{unit} {rest}{below_unit}" if rest else f"{seconds // size}{unit}"
    return f"{seconds}s"


def iso_time(at_ms: int) -> str:
    """Format a time in ISO 8601, UTC, to the millisecond."""
    try:
        at = datetime.fromtimestamp(at_ms // 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"  # a stored time that no calendar has
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at_ms % 1000:03d}Z"


def printable(text: str) -> str:
    """Make a stored text safe for a terminal: what would move the cursor or colour the screen is spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def shortened(text: str, length_max: int) -> str:
    """Cut off the end of a text that is too long."""
    return text if len(text) <= length_max else text[: length_max - 1] + "…"


def count(number: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun: `1 file`, `2 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or f'{noun}s'}"
