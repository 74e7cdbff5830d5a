"""Read the history of a job: every record that is still there, what it brought, what became of it.

It reads on past what is damaged: one record that cannot be read is an entry that says so.
"""

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import Final

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.concurrency import map_bounded
from engine.errors import DamagedError
from engine.records.indexes import read_index
from engine.records.leases import list_names
from engine.records.log import Noted, Unreadable, list_log, read_boundary, read_commit, read_vouched, repeat_reading
from engine.records.roots import read_pins
from engine.runtime import NO_PROGRESS, Progress, read_now_ms
from index.display import DisplayMixin, count, iso_time, printable, shortened
from index.errors import FormatError
from index.plan import commits
from index.snapshot import model
from index.snapshot.contents import SnapshotShare, measure_share
from index.snapshot.keys import boundary_key, commit_key
from index.spark.checkpoint import decode_checkpoint_backup

ENTRIES_MAX: Final = 20
READS_IN_FLIGHT_MAX: Final = 16
INDEXES_IN_FLIGHT_MAX: Final = 8
# More indexes are not read: a job of hundreds of stores has more in a few commits.
INDEXES_MAX: Final = 4000


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
    commit: commits.Commit | None
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

    scope: model.Scope
    entries: tuple[HistoryEntry, ...]
    # Number of records that are there and were not asked for.
    older_count: int
    # Boundaries, names and pins that cannot be read: what they say is missing here.
    problems: tuple[str, ...] = ()

    @override
    def _figures(self) -> dict[str, str]:
        newest = next((entry.commit for entry in self.entries if entry.commit is not None), None)
        return {
            "of": str(self.scope),
            "records": f"{len(self.entries):,}",
            "older ones": f"{self.older_count:,}" if self.older_count else "",
            "newest": f"{newest.record.number:,}, {iso_time(newest.committed_at_ms)}" if newest is not None else "",
            "problems": f"{len(self.problems):,}" if self.problems else "",
        }


async def read_history(
    store: BlobStore,
    repository: model.RepositoryRecord,
    scope: model.Scope,
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

    At most `entries_max` records are shown, and none that was committed before `since_ms` by the store's clock. Indexes
    count as files of the progress. What is damaged is reported, not raised.

    Raises:
        UnsafeStoreError: The log kept changing, or had holes (design 0002, C1).
    """

    async def read() -> tuple[list[HistoryEntry], frozenset[int], list[Unreadable]]:
        return await _read_entries(store, scope, entries_max, since_ms)

    shown, numbers, unreadable = await repeat_reading(read, operation="history", subject=str(scope))
    noted = Noted()
    names = await list_names(store, scope, noted)
    pins = await read_pins(store, repository, await read_now_ms(store), noted)
    entries = _with_named(shown, numbers, names, entries_max, since_ms)
    # Each with what it went back to.
    rewinds = [(e.number, e.commit.record.source) for e in entries if e.commit and e.commit.record.kind == "rewind"]
    entries = [
        msgspec.structs.replace(
            entry,
            names=tuple(sorted(n.name for n in names if _is_of(n.source, entry))),
            pins_count=sum(p.scope == scope and bool(p.stores) and _is_of(p.source, entry) for p in pins),
            # The first that went back to before it.
            rewound_by=min((n for n, to in rewinds if to is not None and to.number < entry.number < n), default=None),
        )
        for entry in entries
    ]
    if shares:
        entries = await _with_shares(store, entries, progress)
    problems = [str(one.error) for one in (*unreadable, *noted.unreadable)]
    older_count = len(numbers) - len(shown)
    return History(scope=scope, entries=tuple(entries), older_count=older_count, problems=tuple(problems))


async def _read_entries(
    store: BlobStore, scope: model.Scope, entries_max: int, since_ms: int | None
) -> tuple[list[HistoryEntry], frozenset[int], list[Unreadable]]:
    """Read the log once: the entries that were asked for, the numbers of all records, unreadable boundaries."""
    listing, noted = await list_log(store, scope), Noted()
    found = [await noted.read(boundary_key(scope, n), read_boundary(store, scope, n)) for n in listing.boundaries]
    boundaries = [boundary for boundary in found if boundary is not None]
    if not noted.unreadable:
        commits.check_dense(listing, boundaries)

    async def read_one(number: int) -> model.CommitRecord | str:
        try:
            return await read_commit(store, scope, number)
        except FormatError as error:
            return str(error)

    entries: list[HistoryEntry] = []
    records: dict[int, model.CommitRecord] = {}
    vouched: frozenset[model.CommitPointer] = frozenset()
    newer: commits.Commit | None = None
    is_over = False
    newest_first = [number for number, _ in reversed(listing.records)]
    while not is_over and len(entries) < min(entries_max, len(newest_first)):
        numbers = newest_first[len(entries) : min(len(entries) + READS_IN_FLIGHT_MAX, entries_max)]
        read = await map_bounded(read_one, numbers, in_flight_max=READS_IN_FLIGHT_MAX)
        records |= {record.number: record for record in read if isinstance(record, model.CommitRecord)}
        vouched |= await read_vouched(store, listing, records, boundaries)
        late = {record.pointer for record in commits.find_late(listing, records, boundaries)} - vouched
        for number, record in zip(numbers, read, strict=True):
            entry = _entry_of(number, record, listing, boundaries, late=late, newer=newer)
            if is_over := _is_before(entry, since_ms):
                break
            entries.append(entry)
            newer = entry.commit if entry.state is State.OPEN else newer
    return entries, frozenset(newest_first), noted.unreadable


def _is_before(entry: HistoryEntry, since_ms: int | None) -> bool:
    return since_ms is not None and entry.commit is not None and entry.commit.committed_at_ms < since_ms


def _entry_of(
    number: int,
    record: model.CommitRecord | str,
    listing: commits.LogListing,
    boundaries: Iterable[model.Boundary],
    *,
    late: Collection[model.CommitPointer],
    newer: commits.Commit | None,
) -> HistoryEntry:
    if isinstance(record, str):
        return HistoryEntry(number=number, state=State.DAMAGED, commit=None, problem=record)
    state, problem = State.OPEN, ""
    if commits.is_closed(record.pointer, boundaries):
        state = State.CLOSED
    elif record.pointer in late:
        state, problem = State.VOID, commits.NOTHING_VOUCHES
    # Nobody says when a void record was created.
    commit = commits.commit_of(record, listing.created_at_ms(number) or 0, None if record.pointer in late else newer)
    return HistoryEntry(number=number, state=state, commit=commit, problem=problem)


def _with_named(
    shown: Sequence[HistoryEntry],
    numbers: frozenset[int],
    names: Iterable[model.NameRecord],
    entries_max: int,
    since_ms: int | None,
) -> list[HistoryEntry]:
    """Add what only names hold: once for each commit, in its place, or in that of the record that cannot be read."""
    entries = list(shown)
    last = min((entry.number for entry in entries), default=0)
    not_shown = numbers - {entry.number for entry in entries}
    for name in names:
        number = name.source.number
        if number in not_shown or any(_is_of(name.source, entry) for entry in entries):
            continue
        unreadable = next((n for n, e in enumerate(entries) if e.number == number and e.commit is None), None)
        if unreadable is not None:
            entries[unreadable] = msgspec.structs.replace(entries[unreadable], commit=commits.commit_of_name(name))
            continue
        entry = HistoryEntry(number=number, state=State.NAMED, commit=commits.commit_of_name(name))
        is_in_range = not not_shown or number > last
        if is_in_range and len(entries) < entries_max and not _is_before(entry, since_ms):
            entries.append(entry)
    return sorted(entries, key=lambda entry: -entry.number)


def _is_of(pointer: model.CommitPointer, entry: HistoryEntry) -> bool:
    return entry.commit is not None and pointer == model.CommitPointer(entry.number, entry.commit.record.write_id)


def is_new(reference: model.StoreReference, record: model.CommitRecord) -> bool:
    """Return whether a store came with this very record. Rewinds and forks bring nothing: no byte is copied."""
    return record.kind == "commit" and reference.number == record.number


async def _with_shares(store: BlobStore, entries: Sequence[HistoryEntry], progress: Progress) -> list[HistoryEntry]:
    shown = [(e.number, e.commit.record) for e in entries if e.commit is not None and e.restores]
    wanted = [(number, s) for number, record in shown for s in record.stores if is_new(s, record)][:INDEXES_MAX]
    progress.total(files=len(wanted), bytes_=sum(reference.index.size_bytes for _, reference in wanted))

    async def share(numbered: tuple[int, model.StoreReference]) -> SnapshotShare | str:
        reference = numbered[1].index
        try:
            index = await read_index(store, reference)
        except (DamagedError, FormatError) as error:
            return str(error)
        finally:
            progress.add(files=1, bytes_=reference.size_bytes)
        return measure_share(index, index_bytes=reference.size_bytes)

    read = await map_bounded(share, wanted, in_flight_max=INDEXES_IN_FLIGHT_MAX)
    known = {(number, s.task, s.store): found for (number, s), found in zip(wanted, read, strict=True)}
    return [_with_share(entry, known) for entry in entries]


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
    if backup is None:
        return printable(shortened(offsets, length_max))
    return f"Spark batch {backup.batch:,}" + (", DAMAGED" if backup.damaged else "")


def damaged_keys(history: History) -> tuple[str, ...]:
    """Return the keys of the records that cannot be read."""
    return tuple(commit_key(history.scope, e.number) for e in history.entries if e.state is State.DAMAGED)


NAMES_SHOWN_MAX: Final = 32
_BECAME: Final = {
    State.CLOSED: "closed by a collection",
    State.VOID: "void: it came too late",
    State.DAMAGED: "DAMAGED",
    State.NAMED: "held by its name alone",
}


def describe_entry(entry: HistoryEntry, scope: model.Scope) -> str:
    """Say in a few words where a record of a scope is from, and what became of it."""
    parts = []
    record = entry.commit.record if entry.commit is not None else None
    if record is not None and record.kind != "commit" and record.source is not None:
        elsewhere = record.source_scope not in {None, scope}
        where = f" of {printable(str(record.source_scope))}" if elsewhere else ""
        parts.append(f"{record.kind} {'to' if record.kind == 'rewind' else 'from'} {record.source.number}{where}")
    if entry.rewound_by is not None:
        parts.append(f"left behind by {entry.rewound_by}")
    if entry.state in _BECAME:
        parts.append(_BECAME[entry.state])
    if entry.held_by and entry.state is not State.NAMED:
        parts.append(f"held by {printable(shortened(entry.held_by, NAMES_SHOWN_MAX))}")
    if entry.pins_count:
        parts.append(f"being read ({count(entry.pins_count, 'pin')})")
    return ", ".join(parts) or (record.kind if record is not None else "")
