"""What a restore drill measures: a line of JSON in its history (design 0009, H1 to H4), and a forecast (F1 to F5)."""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final

import msgspec

from engine.text import table
from index.display import DisplayMixin, count, human_bytes, human_duration
from index.errors import FormatError, UnknownFormatError

SCHEMA: Final = 1
HISTORY_NAME: Final = "restore-drills.jsonl"
# The name by earlier releases.
EARLIER_NAME: Final = "rehearsals.jsonl"
LINE_BYTES_MAX: Final = 64 * 1024
# Of an error, so that a line of the history keeps within its cap.
MESSAGE_LENGTH_MAX: Final = 1000

_HINT: Final = "look at this line: it is kept as it is, and left out of the report"

# A finite number of seconds: JSON has no other infinities than those that overflow.
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Count what a restore moved."""

    # GETs of indexes and blobs, and their bytes as asked for.
    requests_count: Count
    bytes_fetched: Count
    # RocksDB databases that were opened.
    opened_count: Count


class RestoreDrill(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="done"):
    """Describe a restore drill that succeeded. Phases are in seconds of wall time, without the removal of the files."""

    json_properties: ClassVar = {name: name for name in ("total_s", "slo_met")}

    # By this machine's clock: for people.
    began_at_ms: Count
    release: str
    repository_id: str
    job: str
    # None: the job commits as a whole.
    task: str | None
    commit_number: Count
    version: Count
    # False: no pin could be written.
    pinned: bool
    # False: everything was read and hashed, and nothing written.
    to_disk: bool
    # The directory, if it is still there: it was kept, or could not be removed.
    kept_at: str = ""
    stores_at_once: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    stores_count: Count
    files_count: Count
    size_bytes: Count
    largest_store_bytes: Count
    # Finding and pinning the commit; restoring all its stores; opening those that are RocksDB.
    find_s: Amount
    restore_s: Amount
    open_s: Amount
    measured: Measured
    slo_ms: Count | None = None

    @property
    def total_s(self) -> float:
        """Return the time of all three phases."""
        return self.find_s + self.restore_s + self.open_s

    @property
    def is_slow(self) -> bool:
        """Return whether the drill took longer than its SLO."""
        return self.slo_ms is not None and self.total_s * 1000 > self.slo_ms

    @property
    def slo_met(self) -> bool | None:
        """Return whether the drill met its SLO; None: it has none."""
        return not self.is_slow if self.slo_ms is not None else None


class FailedDrill(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="failed"):
    """Describe a restore drill that an error ended: the state could not have been restored then."""

    began_at_ms: Count
    release: str
    repository_id: str
    job: str
    task: str | None
    # The class of the error, and its message.
    error: str
    message: str


Entry = RestoreDrill | FailedDrill


class DrillHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the lines of a history in their order, and the errors of those that cannot be read."""

    entries: tuple[Entry, ...] = ()
    broken: tuple[FormatError, ...] = ()


class _Head(msgspec.Struct):
    schema: int = 0


_DECODER: Final[msgspec.json.Decoder[Entry]] = msgspec.json.Decoder(Entry)
_HEAD_DECODER: Final = msgspec.json.Decoder(_Head)


def history_path(directory: Path) -> Path:
    """Return the file of the history in a directory; one that an earlier release began keeps its name."""
    earlier = directory / EARLIER_NAME
    return earlier if earlier.exists() else directory / HISTORY_NAME


def append(path: Path, entry: Entry) -> None:
    """Add a line durably; no other line changes.

    One write under a lock, so that two drills at a time do not mix; behind half a line, which a crash has left, a new
    one is begun.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = msgspec.json.encode({"schema": SCHEMA, **msgspec.to_builtins(entry)}) + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes and os.pread(descriptor, 1, size_bytes - 1) != b"\n":
            line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(descriptor)


def read_history(path: Path) -> DrillHistory:
    """Read all lines; those that cannot be read are reported, and stay. An absent file has no lines."""
    entries: list[Entry] = []
    broken: list[FormatError] = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return DrillHistory()
    with file:
        number = 0
        while line := file.readline(LINE_BYTES_MAX + 1):
            number += 1
            try:
                entries.append(decode_line(line, f"{path}, line {number}"))
            except FormatError as error:
                broken.append(error)
            while line and not line.endswith(b"\n"):
                line = file.readline(LINE_BYTES_MAX)  # the rest of one that is too long
    return DrillHistory(entries=tuple(entries), broken=tuple(broken))


def decode_line(line: bytes, subject: str) -> Entry:
    """Decode one line of a history.

    Raises:
        UnknownFormatError: A newer tidemark wrote it.
        FormatError: It is not a restore drill.
    """
    if len(line) > LINE_BYTES_MAX:
        raise FormatError("exceeds 64 KiB", subject=subject, hint=_HINT)
    try:
        schema = _HEAD_DECODER.decode(line).schema
        if schema > SCHEMA:
            raise UnknownFormatError(f"is of schema {schema}", subject=subject, hint="read it with a newer tidemark")
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"is not a restore drill: {error}", subject=subject, hint=_HINT) from None


SIZES: Final = (1, 2, 10)
EXECUTORS: Final = (1, 4, 16)
# From here on without a fraction; from here on in milliseconds; and in whole ones.
_WHOLE_S: Final = 100
_SECOND_S: Final = 1
_WHOLE_MS_S: Final = 0.01


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """One forecast; both times are in seconds."""

    # Multiple of the bytes, files and requests of the drill, in the same stores.
    size: int
    executors: int
    # Each executor gets from the store what this machine got.
    best_s: float
    # All executors together get no more bytes per second from it than this machine got.
    worst_s: float


def forecast(
    drill: RestoreDrill, *, sizes: Sequence[int] = SIZES, executors: Sequence[int] = EXECUTORS
) -> tuple[Forecast, ...]:
    """Forecast restores of the same state, at multiples of its size and over several machines with a disk of their own.

    Returns:
        For each size, each number of executors. For 1 and 1 it is the measurement.
    """
    # A store is restored by one executor: none has less to do than the largest.
    largest = min(1.0, drill.largest_store_bytes / max(1, drill.size_bytes))

    def at(size: int, number: int) -> Forecast:
        share = size * max(1 / number, largest)
        opened_s = drill.find_s + share * drill.open_s
        best_s, worst_s = opened_s + share * drill.restore_s, opened_s + size * drill.restore_s
        return Forecast(size=size, executors=number, best_s=best_s, worst_s=worst_s)

    return tuple(at(size, number) for size in sizes for number in executors)


def format_phase(seconds: float) -> str:
    """Format a measured time; of a short one the digits that matter."""
    if seconds >= _WHOLE_S:
        return human_duration(round(seconds * 1000))
    if seconds >= _SECOND_S:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= _WHOLE_MS_S or not seconds else f"{seconds * 1000:.2f} ms"


def format_slo(drill: RestoreDrill) -> str:
    """Return whether the drill met its SLO; empty if it had none."""
    if drill.slo_ms is None:
        return ""
    return f"SLO {human_duration(drill.slo_ms)}: {'MISSED' if drill.is_slow else 'met'}"


def summary_line(drill: RestoreDrill) -> str:
    """Format the drill as one line, for a log."""
    restored = f"restored {human_bytes(drill.size_bytes)} in {format_phase(drill.total_s)}"
    return "; ".join(line for line in (restored, _headline(drill), format_slo(drill)) if line)


def summary_lines(drill: RestoreDrill) -> list[str]:
    """Format the drill with its phases and the forecast."""
    measured = drill.measured
    phases = [("find the commit", drill.find_s), ("restore", drill.restore_s)]
    if measured.opened_count:
        phases.append((f"open RocksDB ({measured.opened_count:,})", drill.open_s))
    phases.append(("total", drill.total_s))
    rows = [
        (
            f"{size}x, {human_bytes(size * drill.size_bytes)}",
            *(_format_range(found) for found in forecast(drill, sizes=(size,))),
        )
        for size in SIZES
    ]
    slo = format_slo(drill)
    return [
        _headline(drill),
        f"fetched {human_bytes(measured.bytes_fetched)} in {count(measured.requests_count, 'request')}",
        "",
        *table(("phase", "time"), [(name, format_phase(s)) for name, s in phases], right=("time",)),
        *([slo] if slo else []),
        "",
        *table(("forecast", *(count(number, "executor") for number in EXECUTORS)), rows),
        "From a store that gives each executor what it gave this machine, to one that gives all of them that together.",
    ]


def _headline(drill: RestoreDrill) -> str:
    what = f"{count(drill.stores_count, 'store')}, {human_bytes(drill.size_bytes)}"
    where = "to disk" if drill.to_disk else "to nowhere: read and hashed, nothing written or opened"
    files = count(drill.files_count, "file")
    return f"commit {drill.commit_number}, version {drill.version}: {what} in {files}, {where}"


def _format_range(found: Forecast) -> str:
    best, worst = format_phase(found.best_s), format_phase(found.worst_s)
    return best if best == worst else f"{best} to {worst}"
