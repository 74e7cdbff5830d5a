"""Sizes, times, texts and tables as people write and read them."""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore
from engine.errors import UsageError
from index.display import printable

# What may be a URL: with a scheme, even where a path has lost one of its slashes, or with a host alone.
_URL: Final = re.compile(r"(?P<begin>[A-Za-z][A-Za-z0-9+.-]{0,31}:/+|(?<!\S)//)(?P<rest>\S*)")
_ATTACHED: Final = re.compile(r"([?#]).*", re.DOTALL)
_HIDDEN: Final = "***"

_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_ONE_MS: Final = timedelta(milliseconds=1)
_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_DURATION: Final = re.compile(r"(?:[0-9]{1,9}(?:ms|[wdhms]))+")
_DURATION_PART: Final = re.compile(r"([0-9]+)(ms|[wdhms])")
_DAYS_AGO: Final = {"today": 0, "yesterday": 1}
_DAY: Final = re.compile(r"(today|yesterday) ([01]?[0-9]|2[0-3]):([0-5][0-9])")
_UNIT_BYTES: Final = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_SIZE: Final = re.compile(r"([0-9]{1,12}) ?([kmgt]?)(?:i?b)?", re.IGNORECASE)
_SHARE: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)(%?)")


class Where(msgspec.Struct, frozen=True):
    """Of what a log line is: the place of a store, and what in it. Found out only where the line is written."""

    store: BlobStore
    of: object

    @override
    def __str__(self) -> str:
        kind, *parts = self.store.place() or ("store",)
        place = without_credentials(f"{kind}:{'/'.join(parts).replace('//', '/')}")
        return printable(f"{place} {self.of}")


class Moment(msgspec.Struct, frozen=True):
    """A time as people give it: absolute, so long before the store's present, or a time of a day before it."""

    at_ms: int | None = None
    ago_ms: int = 0
    # So long after the beginning of that day, `ago_ms` being whole days; None: no time of day was named.
    of_day_ms: int | None = None

    def resolve_ms(self, now_ms: int) -> int:
        """Return the time in milliseconds since the epoch, given the store's clock. Days are those of UTC."""
        if self.at_ms is not None:
            return self.at_ms
        begin_ms = now_ms if self.of_day_ms is None else now_ms - now_ms % _UNIT_MS["d"] + self.of_day_ms
        return max(0, begin_ms - self.ago_ms)


def without_credentials(text: str) -> str:
    """Hide in the URLs of a text what could be a secret: all before their last `@`, queries and fragments.

    Keys of AWS have slashes in them, so that no URL with such a key can be taken apart as the standard says. A prefix
    with an `@` in it loses its beginning: too much is hidden rather than too little.
    """
    return _URL.sub(_hide, text)


def _hide(url: re.Match[str]) -> str:
    before, at, after = url["rest"].rpartition("@")
    if at and _ATTACHED.search(before):
        # The `@` may itself be one of the query.
        return f"{url['begin']}{_HIDDEN}"
    after = _ATTACHED.sub(rf"\1{_HIDDEN}", after)
    return f"{url['begin']}{_HIDDEN}@{after}" if at else f"{url['begin']}{after}"


class Prose(str):
    """A line of words alone, which a terminal that is too narrow may break between them."""

    __slots__ = ()


class TableLine(str):
    """A line of a table that knows its cells, for a terminal that is too narrow for it."""

    __slots__ = ("cells", "right", "table_id")

    # The same for the lines of one table.
    table_id: object
    cells: tuple[str, ...]
    # Of each column, whether it is one of numbers.
    right: tuple[bool, ...]


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> list[str]:
    """Align cells in lines, two spaces between columns; the columns named in `right` are numbers."""
    cells = [headers, *rows]
    to_right = set(right)
    columns = []
    for header, *column in zip(*cells, strict=True):
        width = max(map(len, (header, *column)))
        columns.append([cell.rjust(width) if header in to_right else cell.ljust(width) for cell in (header, *column)])
    lines = [TableLine("  ".join(row).rstrip()) for row in zip(*columns, strict=True)]
    table_id, numbers = object(), tuple(header in to_right for header in headers)
    for line, row in zip(lines, cells, strict=True):
        line.cells, line.right, line.table_id = tuple(row), numbers, table_id
    return [*lines]


def parse_duration_ms(text: str) -> int:
    """Parse a duration such as `36h`, `7d` or `1d12h`, in milliseconds; refuse another text with a `UsageError`."""
    if _DURATION.fullmatch(text) is None:
        hint = "write it as 30m, 36h, 7d or 1d12h"
        raise UsageError("not a duration", operation="read", subject=repr(text), hint=hint)
    return sum(int(count) * _UNIT_MS[unit] for count, unit in _DURATION_PART.findall(text))


def parse_moment(text: str) -> Moment:
    """Parse a time: in ISO 8601, UTC unless it names a zone; an age such as `36h`; or `yesterday 18:00` (UTC).

    Another text is refused with a `UsageError`.
    """
    if _DURATION.fullmatch(text) is not None:
        return Moment(ago_ms=parse_duration_ms(text))
    if (day := _DAY.fullmatch(text)) is not None:
        of_day_ms = int(day[2]) * _UNIT_MS["h"] + int(day[3]) * _UNIT_MS["m"]
        return Moment(ago_ms=_DAYS_AGO[day[1]] * _UNIT_MS["d"], of_day_ms=of_day_ms)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        hint = "write 2026-05-01T12:30:00Z, 36h for 36 hours ago, or 'yesterday 18:00'; a time without a zone is UTC"
        raise UsageError("neither a time nor a duration", operation="read", subject=repr(text), hint=hint) from None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return Moment(at_ms=(at - _EPOCH) // _ONE_MS)


def parse_size_bytes(text: str) -> int:
    """Parse a size such as `4096`, `64MiB` or `1g` (powers of 1,024); refuse another text with a `UsageError`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError("not a size", operation="read", subject=repr(text), hint="write it as 4096, 256KiB or 64MiB")
    return int(match[1]) * _UNIT_BYTES[match[2].lower()]


def parse_share(text: str) -> float:
    """Parse a share above 0 and up to 1, of `10%` or `0.1`; refuse another text with a `UsageError`."""
    match = _SHARE.fullmatch(text)
    share = float(match[1]) / (100 if match[2] else 1) if match is not None else 0.0
    if not 0 < share <= 1:
        raise UsageError("not a share of a whole", operation="read", subject=repr(text), hint="write it as 10% or 0.1")
    return share
