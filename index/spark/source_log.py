"""The log of a file source, `sources/<n>/`, cut back to the offsets that are restored with it (design 0005, R2).

A file source notes in an entry of its log which files it has seen, before the offsets of a batch name the entry, and
takes up whatever its log is ahead of the offsets as *one* batch. A checkpoint whose log leads further than its offsets
so goes on with other rows under the numbers of batches that a sink has seen already.

Spark keeps one file per entry, and now and then an `<entry>.compact` that has the lines of all before it, which then
go. It takes the number of entries between two of those from their names, and fails where it then misses one.

Source:
    Spark `CompactibleFileStreamLog.getAllValidBatches` and `compactInterval`, `FileStreamSourceLog`.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Final

import msgspec

from index.decoding import UNDECODABLE
from index.errors import BatchLogError
from index.spark.query_logs import SourceOffset

_NAME: Final = re.compile(r"(?P<entry>0|[1-9][0-9]{0,17})(?P<compact>\.compact)?")
_COMPACT: Final = ".compact"
_MISSING_TOLD_MAX: Final = 16
_VERSION: Final = re.compile(rb"v[0-9]+\r?")


class LogCut(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a log so that it ends where it should."""

    # Names of entries that go.
    dropped: tuple[str, ...] = ()
    # Names of those whose lines, as far as they are of entries that stay, make up the file `written`.
    joined: tuple[str, ...] = ()
    # Empty if nothing is to be written.
    written: str = ""


class _FileOffset(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    log_offset: int


class _Line(msgspec.Struct, rename="camel"):
    path: str
    batch_id: int


def newest_entry(offset: SourceOffset) -> int | None:
    """The newest log entry that an offset of a file source names, -1 for none; None for an offset of anything else."""
    try:
        return msgspec.json.decode(offset.offset or "", type=_FileOffset).log_offset
    except (*UNDECODABLE, UnicodeEncodeError):
        return None


def plan_cut(names: Collection[str], newest: int) -> LogCut:
    """How a log is made to end with an entry.

    Args:
        names: Of the files in its directory; others than entries are passed over.
        newest: The entry; -1 or less: no entry stays.

    Returns:
        Nothing to do, if nothing stands beyond the entry, or if not all before it is there: then the log is not what
        it seems.
    """
    plain, compacts = _sort(names)
    if not any(entry > newest for entry in plain | compacts):
        return LogCut()
    older = sorted(entry for entry in compacts if entry <= newest)
    first = older[-1] if older else -1
    is_whole = plain.issuperset(range(first + 1, newest + 1))
    # Spark takes the distance of compact entries from the last two, so two have to be left, or all. If none is, every
    # entry stood alone: the distance, which only the query's settings say, is greater than their number.
    if is_whole and (not older or len(older) > 1 or compacts == set(older)):
        return LogCut(dropped=_names(plain, compacts, above=newest))
    later = min((entry for entry in compacts if entry > newest), default=None)
    if later is not None:
        joined: tuple[str, ...] = (f"{later}{_COMPACT}",)
    elif is_whole:
        joined = (f"{first}{_COMPACT}", *map(str, range(first + 1, newest + 1)))
    else:
        return LogCut()
    # One compact entry alone fits every distance that Spark can find for it.
    written = f"{newest}{_COMPACT}"
    dropped = tuple(name for name in _names(plain, compacts, above=-1) if name != written)
    return LogCut(dropped=dropped, joined=joined, written=written)


def join_entries(files: Iterable[tuple[str, bytes]], newest: int) -> bytes:
    """The compact entry that has the lines of some files up to an entry.

    Args:
        files: Names and contents, as `LogCut.joined` has them.
        newest: The last entry that stays.

    Raises:
        BatchLogError: A file is not what Spark writes.
    """
    version = b""
    kept: list[bytes] = []
    for name, data in files:
        lines = _lines(name, data)
        version = next(lines)
        kept += [line for line in lines if _entry_of(line, name) <= newest]
    return b"\n".join([version, *kept])


def missing_entries(names: Collection[str], newest: int) -> tuple[str, ...]:
    """The first entries that a log lacks to be whole up to one.

    Args:
        names: Of the files in its directory; others than entries are passed over.
        newest: The entry that offsets name.
    """
    plain, compacts = _sort(names)
    if any(entry >= newest for entry in compacts):
        return ()
    first = max(compacts, default=-1) + 1
    lacking = (str(entry) for entry in range(first, newest + 1) if entry not in plain)
    return tuple(itertools.islice(lacking, _MISSING_TOLD_MAX))


def is_entry(name: str) -> bool:
    """Whether a file in the directory of a log is an entry, compacted or not."""
    return _NAME.fullmatch(name) is not None


def check_entry(data: bytes, *, subject: str) -> None:
    """Refuse an entry with a line that cannot be read.

    Raises:
        BatchLogError: It is not what Spark writes.
    """
    lines = _lines(subject, data)
    next(lines)
    for line in lines:
        _entry_of(line, subject)


def _entry_of(line: bytes, subject: str) -> int:
    try:
        return msgspec.json.decode(line, type=_Line).batch_id
    except UNDECODABLE as error:
        raise BatchLogError(f"has a line that cannot be read: {error}", subject=subject) from error


def _lines(name: str, data: bytes) -> Iterator[bytes]:
    first, *lines = data.split(b"\n")
    if _VERSION.fullmatch(first) is None:
        raise BatchLogError("does not begin with a version", subject=name)
    yield first
    yield from filter(None, lines)


def _sort(names: Collection[str]) -> tuple[set[int], set[int]]:
    plain: set[int] = set()
    compacts: set[int] = set()
    for name in names:
        m = _NAME.fullmatch(name)
        if m is not None:
            (compacts if m["compact"] else plain).add(int(m["entry"]))
    return plain, compacts


def _names(plain: set[int], compacts: set[int], *, above: int) -> tuple[str, ...]:
    names = {entry: str(entry) for entry in plain}, {entry: f"{entry}{_COMPACT}" for entry in compacts}
    return tuple(name for kind in names for entry, name in sorted(kind.items()) if entry > above)
