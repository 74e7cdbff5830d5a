"""How many requests a query makes of its store in a day, and their price, as measured from a listing of its checkpoint.

Every object is there by one PUT, and has a time. What was written between the oldest batch that is listed whole and the
newest one so gives a rate. Spark's file managers by default write a temporary object and rename it, which an object
store does as a copy: one request more for each file but SSTs (`FileContextBasedCheckpointFileManager`; SSTs are copied
up as they are). What leaves no object is not seen and not counted: LISTs, GETs, HEADs, deletes, requests that were
repeated, and what a client of the store asks beside. Of two real queries with 5 partitions the price was 6 to 10 %
below what was counted (`tests/spark/state/test_explained.py`); S3A asks more than a file system of one machine does.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, Literal, Protocol, TypeAlias

import msgspec

from index.spark.checkpoint import COMMITS, OFFSETS, SOURCES, STATE
from index.spark.names import LOGS, SSTS, parse_state_name
from index.spark.query_logs import parse_batch_name

# `log`: of `offsets/`, `commits/` and `sources/`.
Kind: TypeAlias = Literal["changelog", "snapshot", "sst", "checksum", "log"]

DAY_MS: Final = 24 * 3_600_000
DAYS_PER_MONTH: Final = 30.44
GB: Final = 1e9
# What is written as it is, and not renamed.
_PLAIN: Final = "sst"
# A batch is logged before it, and committed after it; of a copy its files were written at another pace.
_COPY_SHARE: Final = 0.1
# Files of a checkout or an archive have times that are nearly one.
_WINDOW_MS_MIN: Final = 1_000
_COPY_MS: Final = 60_000


class ListedFile(Protocol):
    """A file of a listing, by its path in the checkpoint; `blobstore.checkpoint_files.FileStatus` is one."""

    @property
    def path(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def modified_at_ms(self) -> int: ...


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """What a store charges: by default list prices of S3 Standard in one region, when this was written."""

    # PUT, COPY, POST and LIST.
    usd_per_1000_writes: float = 0.005
    usd_per_gb_month: float = 0.023


class RequestRate(msgspec.Struct, frozen=True, kw_only=True):
    """What a query wrote in a window of time, by the listing of its checkpoint."""

    # After the first was committed, until the newest was.
    first_batch: int
    newest_batch: int
    batches: int
    window_ms: int
    # The longest time between two commits: a query that was stopped meanwhile has a lower rate than while it runs.
    longest_pause_ms: int
    # Objects that are there and were written in the window, by kind.
    written: Mapping[Kind, int]
    # Of all that is listed.
    stored_bytes: int
    # Whether each file but SSTs is a PUT and a COPY, as of Spark's managers by default; else one PUT.
    renames: bool = True

    @property
    def puts_per_day(self) -> float:
        return self.per_day(sum(self.written.values()))

    @property
    def copies_per_day(self) -> float:
        return self.per_day(sum(n for kind, n in self.written.items() if kind != _PLAIN)) if self.renames else 0.0

    @property
    def batches_per_day(self) -> float:
        return self.per_day(self.batches)

    def requests_per_day(self, kind: Kind | None = None) -> float:
        """Return PUTs and COPYs a day, of one kind or of all."""
        if kind is None:
            return self.puts_per_day + self.copies_per_day
        return self.per_day(self.written.get(kind, 0) * (2 if self.renames and kind != _PLAIN else 1))

    def per_day(self, count: float) -> float:
        """Return what a count of the window is in a day."""
        return count * DAY_MS / self.window_ms

    def requests_usd_per_day(self, prices: Prices) -> float:
        return self.requests_per_day() / 1000 * prices.usd_per_1000_writes

    def stored_usd_per_day(self, prices: Prices) -> float:
        return self.stored_bytes / GB * prices.usd_per_gb_month / DAYS_PER_MONTH


def measure_requests(
    files: Iterable[ListedFile], *, logged_at_ms: Mapping[int, int] | None = None, renames: bool = True
) -> RequestRate | None:
    """Measure what a query writes in a day; None if its files do not say: times of one batch only, or of a copy.

    The files are all of the checkpoint, in any order. `logged_at_ms` is when a few batches began, by their offsets: a
    copy has other times, of when it was made. Empty or None: that is not looked at.
    """
    listed = [(of, kind_of(of.path)) for of in files]
    committed = log_times((of for of, _ in listed), COMMITS)
    # Where older state was deleted than Spark deletes, commits go further back than what they committed.
    names = [parse_state_name(of.path.rpartition("/")[2]) for of, kind in listed if kind == "changelog"]
    first_whole = min((name.of.version for name in names if name is not None), default=0) - 1
    times = sorted((batch, at_ms) for batch, at_ms in committed.items() if batch >= first_whole)
    if len(times) < 2:  # noqa: PLR2004  # it takes two to be a window
        return None
    (first, begin_ms), (newest, end_ms) = times[0], times[-1]
    logged = logged_at_ms or {}
    if end_ms - begin_ms < _WINDOW_MS_MIN or _is_of_copy(committed, logged):
        return None
    written = Counter(kind for of, kind in listed if kind is not None and begin_ms < of.modified_at_ms <= end_ms)
    return RequestRate(
        first_batch=first,
        newest_batch=newest,
        batches=len(times) - 1,
        window_ms=end_ms - begin_ms,
        longest_pause_ms=max(after - before for (_, before), (_, after) in itertools.pairwise(times)),
        written=dict(written),
        stored_bytes=sum(of.size_bytes for of, _ in listed),
        renames=renames,
    )


def log_times(files: Iterable[ListedFile], log: str) -> dict[int, int]:
    """Return when each batch of a log of the query was written, by the store's clock."""
    named = ((of.path.removeprefix(f"{log}/"), of.modified_at_ms) for of in files if of.path.startswith(f"{log}/"))
    return {batch: at_ms for name, at_ms in named if (batch := parse_batch_name(name)) is not None}


def kind_of(path: str) -> Kind | None:
    """Return what Spark writes a file of a checkpoint as, again and again; None for what it writes once, and others."""
    parts = path.split("/")
    if parts[-1].startswith("."):
        return None
    match parts:
        case [log, name] if log in {OFFSETS, COMMITS}:
            return "log" if parse_batch_name(name) is not None else None
        case [log, _, _, *_] if log == SOURCES:
            return "log"
        case [log, _, _, *_, directory, _] if log == STATE and directory in {SSTS, LOGS}:
            return "sst"
        case [log, _, _, *_, _] if log == STATE:
            found = parse_state_name(parts[-1])
            return None if found is None else "checksum" if found.checksum else found.kind
    return None


def _is_of_copy(committed: Mapping[int, int], logged: Mapping[int, int]) -> bool:
    """Return whether the files have other times than the batches that they are of: somebody copied them."""
    both = sorted(committed.keys() & logged.keys())
    if len(both) < 2:  # noqa: PLR2004  # as above
        return False
    by_files, by_logs = (times[both[-1]] - times[both[0]] for times in (committed, logged))
    return abs(by_files - by_logs) > max(_COPY_MS, _COPY_SHARE * by_logs)
