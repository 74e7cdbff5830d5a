"""Read the history of a job: every record that is still there, what it brought, what became of it.

It reads on past what is damaged: one record that cannot be read is an entry that says so.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from enum import StrEnum
from typing import Final, TypeVar

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.concurrency import map_bounded
from engine.clock import read_now_ms
from engine.errors import DamagedError
from engine.progress import NO_PROGRESS, Progress
from engine.records.indexes import read_index
from engine.records.log import Noted, list_log, read_boundary, read_commit, read_vouched, repeat_reading
from engine.records.names import list_names
from engine.records.roots import read_pins
from index.display import DisplayMixin
from index.errors import FormatError
from index.plan.commits import (
    NOTHING_VOUCHES,
    Commit,
    LogListing,
    check_dense,
    commit_of,
    commit_of_name,
    find_late,
    is_closed,
)
from index.snapshot.contents import SnapshotShare, measure_share
from index.snapshot.keys import commit_key
from index.snapshot.model import Scope
from index.snapshot.records import Boundary, CommitPointer, CommitRecord, NameRecord, RepositoryRecord, StoreReference
from index.spark.checkpoint import decode_checkpoint_backup
from index.text import iso_time, printable, shortened

ENTRIES_MAX: Final = 20
READS_IN_FLIGHT_MAX: Final = 16
INDEXES_IN_FLIGHT_MAX: Final = 8
# More indexes are not read: a job of hundreds of stores has more in a few commits.
INDEXES_MAX: Final = 4000

Read = TypeVar("Read")


class State(StrEnum):
    """What a record is by now."""

    OPEN = "open"
    # A collection has closed it: it is there, and restores nothing any more.
    CLOSED = "closed"
    # It was created after its lease, and nothing vouches for it.
    VOID = "void"
    DAMAGED = "damaged"
    # Its record is gone, and a name holds what it had.
    NAMED = "named"


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One record."""

    number: int
    state: State
    # None: it cannot be read, and no name has what it had.
    commit: Commit | None
    # What its new stores brought, and what they and the carried over ones took over; None: nobody has looked, or an
    # index of it cannot be read, as of a closed one.
    share: SnapshotShare | None = None
    names: tuple[str, ...] = ()
    # Readers that keep it at present.
    pins_count: int = 0
    # The rewind that has left it behind: it is open, and no longer among what the newest commit grew from.
    rewound_by: int | None = None
    # Why it, or an index of it, cannot be read.
    problem: str = ""

    @property
    def restores(self) -> bool:
        """Whether it can be restored: by its number if it is open, else by a name that holds it."""
        return self.state is State.OPEN or bool(self.held_by)

    @property
    def held_by(self) -> str:
        """The name to restore it by, where its record is closed, void, damaged or gone; empty: there is none."""
        return self.names[0] if self.names and self.commit is not None and self.state is not State.OPEN else ""


class History(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """The records of a scope's log, newest first."""

    scope: Scope
    entries: tuple[HistoryEntry, ...]
    # Number of records that are there and were not asked for.
    older_count: int
    # Boundaries, names and pins that cannot be read: what they say is missing here.
    problems: tuple[str, ...] = ()

    @override
    def figures(self) -> dict[str, str]:
        """Return how many commits, and the newest of them."""
        newest = next((entry.commit for entry in self.entries if entry.commit is not None), None)
        shown = {
            "of": str(self.scope),
            "records": f"{len(self.entries):,}",
            "older ones": f"{self.older_count:,}" if self.older_count else "",
            "newest": f"{newest.record.number:,}, {iso_time(newest.committed_at_ms)}" if newest is not None else "",
            "problems": f"{len(self.problems):,}" if self.problems else "",
        }
        return {name: text for name, text in shown.items() if text}


async def read_history(
    store: BlobStore,
    repository: RepositoryRecord,
    scope: Scope,
    *,
    entries_max: int = ENTRIES_MAX,
    since_ms: int | None = None,
    shares: bool = True,
    progress: Progress = NO_PROGRESS,
) -> History:
    """Read the newest records of a scope, and with `shares` what each of them brought.

    Requests: one LIST per 1,000 records, one GET for each record shown, rounded up to 16, and for each boundary; a LIST
    for names and one for pins, with a GET for each; with `shares` a GET or more for each index that is new in a record
    shown, `INDEXES_MAX` at most.

    Args:
        store: The repository's store.
        repository: Its record.
        scope: Whose history.
        entries_max: The most records.
        since_ms: None that was committed earlier, by the store's clock.
        shares: Whether indexes are read.
        progress: Counts indexes, as files.

    Raises:
        UnsafeStoreError: The log kept changing, or had holes (design 0002, C1).
        StoreError: As the store says. What is damaged is reported, not raised.
    """
    reader = _Reader(store, scope, entries_max, since_ms)
    entries, older_count = await repeat_reading(reader.read_entries, operation="history", subject=str(scope))
    noted = Noted()
    names = await list_names(store, scope, noted)
    pins = await read_pins(store, repository, await read_now_ms(store), noted)
    reader.problems += [str(one.error) for one in noted.unreadable]
    entries = _with_named(entries, names, reader, older_count)
    rewinds = [e.commit.record for e in entries if e.commit is not None and e.commit.record.kind == "rewind"]
    entries = [
        msgspec.structs.replace(
            entry,
            names=tuple(sorted(n.name for n in names if _is_of(n.source.number, n.source.write_id, entry))),
            pins_count=sum(
                p.scope == scope and bool(p.stores) and _is_of(p.source.number, p.source.write_id, entry) for p in pins
            ),
            rewound_by=_rewound_by(entry, rewinds),
        )
        for entry in entries
    ]
    if shares:
        entries = await _with_shares(store, entries, progress)
    return History(scope=scope, entries=tuple(entries), older_count=older_count, problems=tuple(reader.problems))


class _Reader:
    """One reading of the log, and what of it could not be read."""

    def __init__(self, store: BlobStore, scope: Scope, entries_max: int, since_ms: int | None) -> None:
        self._store = store
        self._scope = scope
        self._entries_max = entries_max
        self._since_ms = since_ms
        self.problems: list[str] = []
        self.numbers: frozenset[int] = frozenset()

    async def tolerate(self, read: Awaitable[Read]) -> Read | None:
        """Return what is read; None if it is damaged, which is noted."""
        try:
            return await read
        except FormatError as error:
            self.problems.append(str(error))
            return None

    async def read_entries(self) -> tuple[list[HistoryEntry], int]:
        """Read the newest records; return also how many more there are."""
        self.problems.clear()
        listing = await list_log(self._store, self._scope)
        self.numbers = frozenset(number for number, _ in listing.records)
        found = [await self.tolerate(read_boundary(self._store, self._scope, n)) for n in listing.boundaries]
        boundaries = [boundary for boundary in found if boundary is not None]
        if len(boundaries) == len(found):
            check_dense(listing, boundaries)
        entries: list[HistoryEntry] = []
        records: dict[int, CommitRecord] = {}
        vouched: frozenset[CommitPointer] = frozenset()
        newer: Commit | None = None
        waiting = [number for number, _ in reversed(listing.records)]
        while waiting and len(entries) < self._entries_max:
            wave = min(READS_IN_FLIGHT_MAX, self._entries_max - len(entries))
            numbers, waiting = waiting[:wave], waiting[wave:]
            read = await map_bounded(self._read_record, numbers, in_flight_max=READS_IN_FLIGHT_MAX)
            records |= {record.number: record for record in read if isinstance(record, CommitRecord)}
            vouched |= await read_vouched(self._store, listing, records, boundaries)
            late = {record.pointer for record in find_late(listing, records, boundaries)} - vouched
            for number, record in zip(numbers, read, strict=True):
                entry = _entry_of(number, record, listing, boundaries, late=late, newer=newer)
                if self.is_too_old(entry):
                    left = sum(n <= number for n in self.numbers)
                    return entries, left
                entries.append(entry)
                newer = entry.commit if entry.state is State.OPEN else newer
        return entries, len(waiting)

    def is_too_old(self, entry: HistoryEntry) -> bool:
        """Return whether a record is from before what was asked for."""
        commit = entry.commit
        return self._since_ms is not None and commit is not None and commit.committed_at_ms < self._since_ms

    def has_space(self, entries: Sequence[HistoryEntry]) -> bool:
        """Return whether more may be shown."""
        return len(entries) < self._entries_max

    async def _read_record(self, number: int) -> CommitRecord | str:
        try:
            return await read_commit(self._store, self._scope, number)
        except FormatError as error:
            return str(error)


def _entry_of(
    number: int,
    record: CommitRecord | str,
    listing: LogListing,
    boundaries: Iterable[Boundary],
    *,
    late: Collection[CommitPointer],
    newer: Commit | None,
) -> HistoryEntry:
    if isinstance(record, str):
        return HistoryEntry(number=number, state=State.DAMAGED, commit=None, problem=record)
    created_at_ms = listing.created_at_ms(number) or 0
    # Nobody says when a void record was created.
    commit = commit_of(record, created_at_ms, newer if record.pointer not in late else None)
    if is_closed(record.pointer, boundaries):
        return HistoryEntry(number=number, state=State.CLOSED, commit=commit)
    if record.pointer in late:
        return HistoryEntry(number=number, state=State.VOID, commit=commit, problem=NOTHING_VOUCHES)
    return HistoryEntry(number=number, state=State.OPEN, commit=commit)


def _with_named(
    entries: Sequence[HistoryEntry], names: Iterable[NameRecord], reader: _Reader, older_count: int
) -> list[HistoryEntry]:
    """Add what only names hold: once for each commit, in its place, or in that of the record that cannot be read."""
    all_ = list(entries)
    last = min((entry.number for entry in entries), default=0)
    not_shown = reader.numbers - {entry.number for entry in entries}
    for name in names:
        if name.source.number in not_shown or any(_is_of(*_pointer(name), entry) for entry in all_):
            continue
        unreadable = next((n for n, e in enumerate(all_) if e.number == name.source.number and e.commit is None), None)
        if unreadable is not None:
            all_[unreadable] = msgspec.structs.replace(all_[unreadable], commit=commit_of_name(name))
            continue
        entry = HistoryEntry(number=name.source.number, state=State.NAMED, commit=commit_of_name(name))
        fits = not older_count or entry.number > last
        if fits and reader.has_space(all_) and not reader.is_too_old(entry):
            all_.append(entry)
    return sorted(all_, key=lambda entry: -entry.number)


def _pointer(name: NameRecord) -> tuple[int, str]:
    return name.source.number, name.source.write_id


def _is_of(number: int, write_id: str, entry: HistoryEntry) -> bool:
    return entry.commit is not None and (entry.number, entry.commit.record.write_id) == (number, write_id)


def _rewound_by(entry: HistoryEntry, rewinds: Iterable[CommitRecord]) -> int | None:
    """Return the first rewind that went back to before a commit."""
    past = [r.number for r in rewinds if r.source is not None and r.source.number < entry.number < r.number]
    return min(past, default=None)


# ---------------------------------------------------------------------- what each brought


def is_new(reference: StoreReference, record: CommitRecord) -> bool:
    """Return whether a store came with this very record. Rewinds and forks bring nothing: no byte is copied."""
    return record.kind == "commit" and reference.number == record.number


async def _with_shares(store: BlobStore, entries: Sequence[HistoryEntry], progress: Progress) -> list[HistoryEntry]:
    wanted = [
        (entry.number, reference)
        for entry in entries
        if entry.commit is not None and entry.restores
        for reference in entry.commit.record.stores
        if is_new(reference, entry.commit.record)
    ][:INDEXES_MAX]
    progress.total(files=len(wanted), bytes_=sum(reference.index.size_bytes for _, reference in wanted))
    read = await map_bounded(_sharer(store, progress), [r for _, r in wanted], in_flight_max=INDEXES_IN_FLIGHT_MAX)
    known = {
        (number, reference.task, reference.store): found
        for (number, reference), found in zip(wanted, read, strict=True)
    }
    return [_with_share(entry, known) for entry in entries]


def _sharer(store: BlobStore, progress: Progress) -> Callable[[StoreReference], Awaitable[SnapshotShare | str]]:
    async def share(reference: StoreReference) -> SnapshotShare | str:
        try:
            index = await read_index(store, reference.index)
        except (DamagedError, FormatError) as error:
            return str(error)
        finally:
            progress.add(files=1, bytes_=reference.index.size_bytes)
        return measure_share(index, index_bytes=reference.index.size_bytes)

    return share


def _with_share(entry: HistoryEntry, known: dict[tuple[int, str, str], SnapshotShare | str]) -> HistoryEntry:
    if entry.commit is None or not entry.restores:
        return entry
    total = SnapshotShare()
    for reference in entry.commit.record.stores:
        share = known.get((entry.number, reference.task, reference.store))
        if share is None and is_new(reference, entry.commit.record):
            return entry  # beyond the bound
        if isinstance(share, str):
            return msgspec.structs.replace(entry, problem="; ".join(filter(None, (entry.problem, share))))
        carried = SnapshotShare(files_retained=reference.files_count, bytes_retained=reference.size_bytes)
        total = total.plus(share or carried)
    return msgspec.structs.replace(entry, share=total)


def format_offsets(offsets: str, length_max: int) -> str:
    """Shorten what a commit says of itself: of the backup of a checkpoint, to its batch (design 0005, P8)."""
    try:
        backup = decode_checkpoint_backup(offsets)
    except FormatError:
        backup = None
    return f"Spark batch {backup.batch:,}" if backup is not None else printable(shortened(offsets, length_max))


def damaged_keys(history: History) -> tuple[str, ...]:
    """Return the keys of the records that cannot be read."""
    return tuple(commit_key(history.scope, e.number) for e in history.entries if e.state is State.DAMAGED)
