"""Sizes, times and results as people read them: a result is one line at a prompt, in a notebook a small table."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from enum import Enum
from html import escape
from typing import Any, Final

import msgspec

# Of one figure, and of a figure that is a list of texts.
TEXT_LENGTH_MAX: Final = 120
TEXTS_MAX: Final = 3
# Of a line: the first few figures are those that matter.
FIGURES_MAX: Final = 7
# From here on without a fraction.
_WHOLE_S: Final = 100

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_UNITS_S: Final = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


class DisplayMixin:
    """A struct that shows its figures to people. What programs read are its fields.

    Everything in a result may come from storage: it is made printable, and escaped in HTML.
    """

    __slots__ = ()

    def figures(self) -> dict[str, str]:
        """Return the figures by name, the most important first: those that say something."""
        return {name: text for name, text in self._figures().items() if text}

    def _figures(self) -> dict[str, str]:
        fields = msgspec.structs.fields(self) if isinstance(self, msgspec.Struct) else ()
        return {format_name(field.name): format_value(field.name, getattr(self, field.name)) for field in fields}

    # `override` is in no standard library before 3.12, and this package has no other dependency.
    def __repr__(self) -> str:  # type: ignore[explicit-override]
        return printable(f"<{type(self).__name__} {format_line(self)}".rstrip() + ">")

    def _repr_html_(self) -> str:
        """Format all figures as a table: what a notebook shows."""
        rows = "".join(
            f'<tr><th scope="row" style="text-align:left">{escape(printable(name))}</th>'
            f'<td style="text-align:left">{escape(printable(text))}</td></tr>'
            for name, text in self.figures().items()
        )
        return f"<table><caption>{escape(type(self).__name__)}</caption><tbody>{rows}</tbody></table>"


def format_line(result: DisplayMixin) -> str:
    """Format the first figures of a result, each behind its name."""
    shown = list(result.figures().items())
    parts = [name if text == "yes" else f"{name} {text}" for name, text in shown[:FIGURES_MAX]]
    return ", ".join([*parts, *(["…"] if len(shown) > FIGURES_MAX else [])])


def format_name(name: str) -> str:
    """Format the name of a field for people: units come with the figure."""
    for unit in ("_bytes", "_ms", "_count"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def format_value(name: str, value: Any) -> str:  # noqa: ANN401  (a field has any type)
    """Format one field by the unit in its name; empty if it says nothing.

    `size_bytes` is a size, `committed_at_ms` a time, `seconds` a duration.
    """
    if value is None or isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, DisplayMixin):
        return format_line(value)
    if isinstance(value, int | float):
        return _format_number(name, value)
    if isinstance(value, Collection) and not isinstance(value, str):
        if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
            return format_texts(value)
        return f"{len(value):,}" if value else ""
    return shortened(printable(str(value.value if isinstance(value, Enum) else value)), TEXT_LENGTH_MAX)


def format_texts(texts: Iterable[str]) -> str:
    """List the first few texts, and the number of the others."""
    found = [shortened(printable(text), TEXT_LENGTH_MAX) for text in texts]
    left = len(found) - TEXTS_MAX
    return ", ".join(found[:TEXTS_MAX]) + (f" and {left:,} more" if left > 0 else "")


def format_seconds(seconds: float) -> str:
    """Format a measured time."""
    return human_duration(round(seconds * 1000)) if seconds < 1 or seconds >= _WHOLE_S else f"{seconds:.1f} s"


def format_files(files: int, size_bytes: int) -> str:
    """Format a number of files and their bytes."""
    return f"{files:,} ({human_bytes(size_bytes)})"


def _format_number(name: str, value: Any) -> str:  # noqa: ANN401  (to a type checker, a float may be an int)
    if isinstance(value, float):
        return format_seconds(value) if name.endswith(("seconds", "_s")) else f"{value:g}"
    if name.endswith("_at_ms") or name == "now_ms":
        return iso_time(value)
    if name.endswith("_ms"):
        return human_duration(value)
    if name.endswith("_bytes") or name.startswith("bytes_"):
        return human_bytes(value)
    return f"{value:,}"


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
    for (size, unit), (below, below_unit) in itertools.pairwise(_UNITS_S):
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


def encodable(text: str) -> str:
    """Spell out bytes of a path or a command line that are not UTF-8: Python has them as what cannot be encoded."""
    return text.encode(errors="backslashreplace").decode()


def shortened(text: str, length_max: int) -> str:
    """Cut off the end of a text that is too long."""
    return text if len(text) <= length_max else text[: length_max - 1] + "…"


def count(number: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun: `1 file`, `2 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or f'{noun}s'}"
