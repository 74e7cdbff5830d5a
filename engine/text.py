"""Sizes, times, texts and tables as people read them."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from index.text import count, human_bytes, human_duration, iso_time, printable, shortened

__all__ = [
    "count",
    "human_bytes",
    "human_duration",
    "iso_time",
    "printable",
    "shortened",
    "table",
    "without_credentials",
]

# What may be a URL: with a scheme, even where a path has lost one of its slashes, or with a host alone.
_URL: Final = re.compile(r"(?P<begin>[A-Za-z][A-Za-z0-9+.-]{0,31}:/+|(?<!\S)//)(?P<rest>\S*)")
_ATTACHED: Final = re.compile(r"([?#]).*", re.DOTALL)
_HIDDEN: Final = "***"


def without_credentials(text: str) -> str:
    """A text whose URLs have lost what could be a secret: all before their last `@`, queries and fragments.

    Keys of AWS have slashes in them, so that no URL with such a key can be taken apart as the standard says. A prefix
    with an `@` in it loses its beginning: too much is hidden rather than too little.
    """
    return _URL.sub(_hide, text)


def _hide(url: re.Match[str]) -> str:
    before, at, after = url["rest"].rpartition("@")
    if at and _ATTACHED.search(before):
        # The `@` may itself be one of the query.
        return f"{url['begin']}{_HIDDEN}"
    told = _ATTACHED.sub(rf"\1{_HIDDEN}", after)
    return f"{url['begin']}{_HIDDEN}@{told}" if at else f"{url['begin']}{told}"


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
