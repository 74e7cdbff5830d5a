"""Read a scope's log: which records are valid, closed or void, which of a name counts, and what is kept.

Also what a writer builds on, and which boundaries may go. All of it is decided from what was listed and read; nothing
here asks a store (design 0002, C1 to C7, D3, D5, D8 and T4; 0006, P5).
"""

import fnmatch
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from enum import Enum, StrEnum
from typing import Final

import msgspec

from index.display import DisplayMixin, format_files, format_value, iso_time, printable
from index.errors import IndexInvariantError, UnsafeNameError
from index.snapshot import model
from index.snapshot.keys import commit_key, parse_log_key

# What to say of a void record.
NOTHING_VOUCHES: Final = "late: nothing vouches for it"
# The share of its bytes by which a state may shrink, where nobody said another (design 0006, P8 and P9).
SHRINK_MAX: Final = 0.5
# Of several stores together; what is less is lost in the noise of small files and changelogs.
SHRINK_FLOOR_BYTES: Final = 1024 * 1024
# How far above the newest number the boundary of `plan_forget` is. A writer may commit between the listing and the
# writing of the boundary, and remember what it committed; nobody commits this often meanwhile (three years at ten a
# second).
FORGOTTEN_AHEAD: Final = 1_000_000_000


class ShortListingError(IndexInvariantError):
    """Records that must be there are not in the listing: it cannot be trusted, or it raced with a collection (C1)."""


class LogListing(msgspec.Struct, frozen=True, kw_only=True):
    """What one LIST of a scope's log, or of its tail, has shown."""

    scope: model.Scope
    # Number and store-side creation time of each record, ascending by number.
    records: tuple[tuple[int, int], ...] = ()
    # Numbers of the boundaries, ascending.
    boundaries: tuple[int, ...] = ()
    # Keys below the log's prefix that tidemark never wrote.
    foreign: tuple[str, ...] = ()
    # Store-side creation time of the newest boundary; 0 without one.
    closed_at_ms: int = 0

    @property
    def newest_number(self) -> int:
        """The newest number in sight, void records and boundaries counted; 0 for an empty log."""
        return max((self.records[-1][0] if self.records else 0), (self.boundaries[-1] if self.boundaries else 0))

    def created_at_ms(self, number: int) -> int | None:
        """Return the store-side creation time of a record, None if it is not listed."""
        return dict(self.records).get(number)


class Commit(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """A valid commit record together with what only the blob store knows of it."""

    record: model.CommitRecord
    # When the store created the record, and the time of the commit, monotone along the chain (C7).
    created_at_ms: int
    committed_at_ms: int
    # TTL removal is known to be complete. If not: the next commit, a collection or `verify --heal` completes it (T2).
    settled: bool = False
    # The name that it was found by: then that name keeps it, whatever became of the record.
    name: str | None = None

    @property
    def scope(self) -> model.Scope:
        """Whose commit it is."""
        return self.record.scope

    @property
    def pointer(self) -> model.CommitPointer:
        """Its number and write id."""
        return self.record.pointer

    def _figures(self) -> dict[str, str]:  # type: ignore[explicit-override]  # as in `DisplayMixin`
        stores = self.record.stores
        return {
            "number": f"{self.record.number:,}",
            "of": printable(str(self.scope)),
            "version": f"{self.record.version:,}",
            "at": iso_time(self.committed_at_ms),
            "kind": self.record.kind if self.record.kind != "commit" else "",
            "stores": f"{len(stores):,}",
            "files": format_files(sum(s.files_count for s in stores), self.record.state_bytes),
            "name": format_value("name", self.name),
            "offsets": format_value("offsets", self.record.offsets),
            "TTLs left to remove": "" if self.settled else "perhaps",
        }

    def store(self, task: str, store: str) -> model.StoreReference | None:
        """Return the reference of one store, None if the commit has no such store."""
        return next((s for s in self.record.stores if s.task == task and s.store == store), None)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a scope for a writer."""

    newest: Commit | None
    # The number that the next record takes: the newest number loaded, void ones and boundaries counted, plus one (C1).
    next_number: int
    # When the newest boundary was created; 0 without one, and where `newest` is known, in which case nobody asks.
    closed_at_ms: int = 0

    @property
    def pointer(self) -> model.CommitPointer | None:
        """Number and write id of the newest commit."""
        return self.newest.pointer if self.newest else None

    @property
    def committed_at_ms(self) -> int:
        """When the newest commit was made; 0 without one."""
        return self.newest.committed_at_ms if self.newest else 0

    def store(self, of: model.StoreReference) -> model.StoreReference | None:
        """Return what the newest commit holds of the store of a reference."""
        return self.newest.store(of.task, of.store) if self.newest else None

    def may_know(self, new: model.StoreReference) -> bool:
        """Return whether a fitting result may be committed already: its base came back, or the store was gone (T4)."""
        held = self.store(new)
        if self.newest is None or held is None:
            return self.next_number > 1
        # A fork gives new numbers to what it takes over, also where its scope was forgotten and had the same stores.
        # A number above the newest commit was perhaps that of a commit that was discarded.
        is_first = held.number == self.newest.pointer.number == self.next_number - 1
        return not is_first or self.newest.record.kind == "fork"


def listing_of(scope: model.Scope, entries: Iterable[tuple[str, int]]) -> LogListing:
    """Return the listing of one scope from (key, creation time) pairs; a key of another scope is refused."""
    found: dict[str, list[tuple[int, int]]] = {"commit": [], "boundary": []}
    foreign: list[str] = []
    for key, created_at_ms in entries:
        try:
            parsed = parse_log_key(key)
        except UnsafeNameError:
            foreign.append(key)
            continue
        if parsed.scope != scope:
            raise IndexInvariantError(f"is not in the log of {scope}", subject=key)
        found[parsed.kind].append((parsed.number, created_at_ms))
    return LogListing(
        scope=scope,
        records=tuple(sorted(found["commit"])),
        boundaries=tuple(sorted(number for number, _ in found["boundary"])),
        closed_at_ms=max(found["boundary"], default=(0, 0))[1],
        foreign=tuple(foreign),
    )


def is_shrunk(before_bytes: int, after_bytes: int, share_max: float, *, floor_bytes: int = 0) -> bool:
    """Return whether a state loses a larger share of its bytes than it may, and `floor_bytes` or more (P8, P9)."""
    lost_bytes = before_bytes - after_bytes
    return lost_bytes > share_max * before_bytes and lost_bytes >= floor_bytes


def check_dense(listing: LogListing, boundaries: Sequence[model.Boundary]) -> None:
    """Refuse a listing of the whole log of a scope with a hole in it (C1), by the boundaries that can be read.

    Raises:
        ShortListingError: A number above the newest boundary is missing, or a record that every boundary keeps.
    """
    floor = listing.boundaries[-1] if listing.boundaries else 0
    above = [number for number, _ in listing.records if number > floor]
    if above != list(range(floor + 1, floor + 1 + len(above))):
        first = next(wanted for wanted, number in enumerate(above, floor + 1) if number != wanted)
        raise _short_listing(listing, first, f"records above {floor} are {above}: not dense")
    newest = next((b for b in boundaries if b.number == floor), None)
    if newest is not None:
        listed = {number for number, _ in listing.records}
        missing = [p.number for p in newest.kept if p.number not in listed and not is_closed(p, boundaries)]
        if missing:
            raise _short_listing(
                listing, missing[0], f"records {missing}, kept by boundary {newest.number}, are missing"
            )


def _short_listing(listing: LogListing, first: int, message: str) -> ShortListingError:
    """Make the error; what a collection beside us took is there no more in the next listing, so it says what to do."""
    return ShortListingError(
        message,
        subject=f"log of {listing.scope}",
        hint="run again; if it persists, somebody deleted a record: put it back, or give it up with `tidemark discard "
        f"{commit_key(listing.scope, first)}`",
    )


def is_closed(pointer: model.CommitPointer, boundaries: Iterable[model.Boundary]) -> bool:
    """Return whether any boundary at or above the record's number does not list it (D3); closed stays closed."""
    return any(b.number >= pointer.number and pointer not in b.kept for b in boundaries)


def is_number_closed(number: int, boundaries: Iterable[model.Boundary]) -> bool:
    """Return whether a boundary closes a number, so that its record need not be read (D3)."""
    return any(b.number >= number and all(p.number != number for p in b.kept) for b in boundaries)


def lasting_boundaries(boundaries: Collection[model.Boundary]) -> tuple[model.Boundary, ...]:
    """Return the boundaries of which everything stays closed: no newer one closes their number (D3).

    A number that a newer one closes may have come twice, and somebody may be about to delete its first boundary.
    """
    return tuple(
        b
        for b in boundaries
        if not is_number_closed(b.number, (newer for newer in boundaries if newer.number > b.number))
    )


def find_reopenable(boundaries: Collection[model.Boundary]) -> frozenset[model.CommitPointer]:
    """Return what is closed, but by no boundary that lasts (D3): the newest lists it."""
    lasting = lasting_boundaries(boundaries)
    listed = {pointer for b in boundaries for pointer in b.kept} if len(lasting) < len(boundaries) else ()
    return frozenset(p for p in listed if is_closed(p, boundaries) and not is_closed(p, lasting))


def choose_superseded_boundaries(
    boundaries: Sequence[model.Boundary], unreadable: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the numbers of the boundaries that may be deleted (D3).

    A newer one that lasts closes their number and keeps, at or below it, a subset of what they keep: of one that cannot
    be read, nothing. The newest is never among them.
    """
    kept = {b.number: frozenset(b.kept) for b in boundaries} | {number: frozenset() for number in unreadable}
    lasting = lasting_boundaries(boundaries)
    return tuple(
        old
        for old in sorted(kept)
        if any(
            b.number > old and is_number_closed(old, (b,)) and {p for p in b.kept if p.number <= old} <= kept[old]
            for b in lasting
        )
    )


def is_late(record: model.CommitRecord, created_at_ms: int) -> bool:
    """Return whether the store created the record after its lease; it is void unless something vouches for it (C5)."""
    return created_at_ms > record.valid_until_ms


def find_late(
    listing: LogListing, records: Mapping[int, model.CommitRecord], boundaries: Sequence[model.Boundary]
) -> tuple[model.CommitRecord, ...]:
    """Return the late records for which nothing in the log vouches, oldest first (C5).

    A later record that names it as its predecessor vouches for a late record: the writer of that one saw it when it
    counted. So does a boundary that lists it. Every object of a copied repository is late, and keeps its witnesses.
    """
    named = {record.predecessor for record in records.values()}
    return tuple(
        record
        for number, created_at_ms in listing.records
        if (record := records.get(number)) is not None
        and is_late(record, created_at_ms)
        and record.pointer not in named
        and not any(record.pointer in b.kept for b in boundaries)
        and not is_closed(record.pointer, boundaries)
    )


def find_doubtful(
    listing: LogListing, records: Mapping[int, model.CommitRecord], boundaries: Sequence[model.Boundary]
) -> model.CommitRecord | None:
    """Return the late record for which something outside the log may vouch: the newest, if at all.

    A later record says of every earlier one whether its writer built on it or passed over it.
    """
    late = find_late(listing, records, boundaries)
    return late[-1] if late and late[-1].number == max(records) else None


def lease_began_ms(record: model.CommitRecord, repository: model.RepositoryRecord) -> int:
    """Return when the lease that a record rests on began: the upload of its oldest new blob, or its pin (C5, D5)."""
    lease_ms = repository.ttl_ms - repository.margin_ms if record.kind == "commit" else model.PIN_DURATION_MS
    return record.valid_until_ms - lease_ms


def commit_of(record: model.CommitRecord, created_at_ms: int, newer: Commit | None = None) -> Commit:
    """Return the commit of a record, with its time (C7); in a copy, `created_at_ms` is the time of copying.

    `newer` is the next valid commit, which says when those before it were committed.
    """
    committed_at_ms = max(created_at_ms, record.predecessor_committed_at_ms)
    if newer is not None and newer.record.predecessor is not None:
        committed_at_ms = min(committed_at_ms, newer.record.predecessor_committed_at_ms)
    return Commit(record=record, created_at_ms=created_at_ms, committed_at_ms=committed_at_ms)


def valid_commits(
    listing: LogListing,
    records: Mapping[int, model.CommitRecord],
    boundaries: Sequence[model.Boundary],
    vouched: Collection[model.CommitPointer] = (),
) -> tuple[Commit, ...]:
    """Return every record of a log, or of its tail, that is neither closed nor void, oldest first.

    The listed records and boundaries are read; something outside the log vouches for those in `vouched`, which are
    late.
    """
    void = {r.pointer for r in find_late(listing, records, boundaries)}.difference(vouched)
    newest_first: list[Commit] = []
    for number, created_at_ms in reversed(listing.records):
        record = records.get(number)
        if record is not None and record.pointer not in void and not is_closed(record.pointer, boundaries):
            newest_first.append(commit_of(record, created_at_ms, newest_first[-1] if newest_first else None))
    return tuple(reversed(newest_first))


def descends_from(pointer: model.CommitPointer, newer: Sequence[Commit]) -> bool:
    """Return whether the newest of the valid commits with a greater number has `pointer` among its predecessors (C4).

    Without any, nothing contradicts.
    """
    by_pointer = {commit.pointer: commit for commit in newer}
    if not newer:
        return True
    step: model.CommitPointer | None = max(newer, key=lambda c: c.pointer.number).pointer
    while step is not None and step in by_pointer:
        step = by_pointer[step].record.predecessor
    return step == pointer


class Verdict(Enum):
    """Why a record that was written is not a commit."""

    FENCED = "a boundary at or above its number does not list it"
    VOID = "it was created after its lease"
    LOST = "later records do not descend from it"
    NOT_LISTED = "it is not in the listing, and no boundary says why"


def judge_record(
    record: model.CommitRecord, tail: LogListing, boundaries: Sequence[model.Boundary], newer: Sequence[Commit]
) -> Commit | Verdict:
    """Judge what became of a record that was found or created, before it is acknowledged (C4 and C5).

    The creation time in the listing decides whether it is void: nothing vouches yet for a record of which nobody has
    heard.

    Args:
        tail: The log from its number on; of that, `boundaries` are read.
        newer: Every valid commit with a greater number. It may be left out where there is a boundary: one that lists
            this record has seen it in the chain.
    """
    if is_closed(record.pointer, boundaries):
        return Verdict.FENCED
    created_at_ms = tail.created_at_ms(record.number)
    if created_at_ms is None:
        return Verdict.NOT_LISTED
    if is_late(record, created_at_ms):
        return Verdict.VOID
    if not boundaries and not descends_from(record.pointer, newer):
        return Verdict.LOST
    return commit_of(record, created_at_ms)


def fits(commit: Commit, *, number: int | None, version: int | None, unique_id: str | None, at_ms: int | None) -> bool:
    """Return whether a commit has this number, version and unique id, and is not later than this time, where given.

    A unique id is that of one of its stores, and the version then that store's; or it is the record's own write id.
    """
    record = commit.record
    if number is not None and record.number != number:
        return False
    if at_ms is not None and commit.committed_at_ms > at_ms:
        return False
    if unique_id is not None and record.write_id != unique_id:
        return any(s.unique_id == unique_id and version in {None, s.version} for s in record.stores)
    return version in {None, record.version}


class Naming(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a name, as it is in the store."""

    key: str
    # By the store's clock, as everything that decides.
    created_at_ms: int
    id: str
    record: model.NameRecord
    # When the repository record was created; 0 where nobody has looked, because the record came in time.
    repository_created_at_ms: int = 0

    @property
    def is_live(self) -> bool:
        """Whether it protects: not released, and written while its pin still held, or copied here (D5).

        One whose pin is older than the repository record was copied with the repository: nobody writes before that.
        """
        valid_until_ms = self.record.valid_until_ms
        was_copied = valid_until_ms - model.PIN_DURATION_MS < self.repository_created_at_ms
        return not self.record.released and (self.created_at_ms <= valid_until_ms or was_copied)


def choose_naming(namings: Iterable[Naming]) -> Naming | None:
    """Choose the record that counts for a name: the earliest live one, by creation and then id; None if none is."""
    return min((n for n in namings if n.is_live), key=lambda n: (n.created_at_ms, n.id), default=None)


def commit_of_name(name: model.NameRecord) -> Commit:
    """Return the commit as its name has kept it: the log's record may be gone."""
    record = model.CommitRecord(
        scope=name.scope,
        number=name.source.number,
        write_id=name.source.write_id,
        version=name.version,
        offsets=name.offsets,
        layout=name.layout,
        stores=name.stores,
        valid_until_ms=model.NEVER_MS,
    )
    at_ms = name.committed_at_ms
    return Commit(record=record, created_at_ms=at_ms, committed_at_ms=at_ms, settled=True, name=name.name)


def plan_forget(listing: LogListing, boundaries: Sequence[model.Boundary]) -> model.Boundary | None:
    """Plan the boundary, which keeps nothing, that closes every record of a scope, found or on its way.

    None if there is nothing to close: the newest of the boundaries that can be read keeps nothing, and no record has
    come since.
    """
    newest = max(boundaries, key=lambda b: b.number, default=None)
    newest_record = listing.records[-1][0] if listing.records else 0
    if newest is None and not listing.records:
        return None
    if newest is not None and not newest.kept and listing.newest_number == newest.number > newest_record:
        return None
    return model.Boundary(scope=listing.scope, number=listing.newest_number + FORGOTTEN_AHEAD)


class KeepReason(StrEnum):
    """Why a commit is kept."""

    NEWEST = "newest"
    LAST = "keep-last"
    SINCE = "keep-since"
    HOURLY = "keep-hourly"
    DAILY = "keep-daily"
    WEEKLY = "keep-weekly"
    MONTHLY = "keep-monthly"
    NAMED = "keep-named"
    UNRULED = "no rule for this job"
    REOPENABLE = "closed by a boundary that does not last"


def _month(at_ms: int) -> object:
    # A file may be of any time; after the year 9999 there is one month.
    day = _EPOCH + timedelta(days=min(at_ms // _DAY_MS, _DAYS_MAX))
    return day.year, day.month


_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
_EPOCH: Final = date(1970, 1, 1)
_DAYS_MAX: Final = (date.max - _EPOCH).days
# By which period a commit is kept, and which one a time is in (UTC).
_PERIODS: Final[Mapping[KeepReason, Callable[[int], object]]] = {
    KeepReason.HOURLY: lambda at_ms: at_ms // _HOUR_MS,
    KeepReason.DAILY: lambda at_ms: at_ms // _DAY_MS,
    # The first day of 1970 was a Thursday, and a week begins on Monday.
    KeepReason.WEEKLY: lambda at_ms: (at_ms // _DAY_MS + 3) // 7,
    KeepReason.MONTHLY: _month,
}


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """A rule with at least one way to keep something; the newest valid commit of a scope is kept whatever it says."""

    # This many of the newest valid commits.
    keep_last: int = 0
    # Every commit at or after this time by the store's clock, and the one that was the newest at that time.
    keep_since_ms: int | None = None
    # Commits that a name refers to stay in the log; what a name holds is safe either way.
    keep_named: bool = True
    # The newest commit of each of the last hours, days, ISO weeks and months (UTC) that have one (0006, P10).
    keep_hourly: int = 0
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_monthly: int = 0

    @property
    def periods(self) -> tuple[tuple[KeepReason, int], ...]:
        """How many periods of each kind are kept, those of which none is left out."""
        counts = (self.keep_hourly, self.keep_daily, self.keep_weekly, self.keep_monthly)
        return tuple((kind, count) for kind, count in zip(_PERIODS, counts, strict=True) if count)

    def __post_init__(self) -> None:
        """Refuse, with an IndexInvariantError, a rule with neither a count nor a time, or with a negative one."""
        counts = (self.keep_last, *(count for _, count in self.periods), self.keep_since_ms or 0)
        if min(counts) < 0:
            reason, hint = "counts and times are not negative", "give a positive number"
            raise IndexInvariantError(reason, subject="retention", hint=hint)
        if max(counts) == 0 and self.keep_since_ms is None:
            hint = "give --keep-last N, --keep-since TIME, or --keep-daily N and the like"
            raise IndexInvariantError("keeps nothing by itself", subject="retention", hint=hint)


class RetentionRule(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of the jobs whose name matches."""

    # As in a shell, case and all: `*` any text, `?` one character, `[abc]` one of these.
    pattern: str
    # None: everything.
    retention: Retention | None


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for many jobs; the first whose pattern a job's name matches is the one that counts (design 0006, P5)."""

    rules: tuple[RetentionRule, ...]

    def choose(self, job: str) -> Retention | None:
        """Return the retention of a job; None keeps everything, as for a job that no rule matches."""
        rule = self._rule(job)
        return None if rule is None else rule.retention

    def ageless(self) -> "RetentionPolicy":
        """Return the rules as where nothing is old: one that goes by a time or by periods keeps everything."""

        def ageless(retention: Retention | None) -> Retention | None:
            if retention is None or (retention.keep_since_ms is None and not retention.periods):
                return retention
            return msgspec.structs.replace(retention, keep_since_ms=0)

        rules = (RetentionRule(pattern=rule.pattern, retention=ageless(rule.retention)) for rule in self.rules)
        return RetentionPolicy(rules=tuple(rules))

    def unused(self, jobs: Iterable[str]) -> tuple[str, ...]:
        """Return the patterns of the rules that count for none of these jobs: perhaps they are misspelled."""
        used = {rule.pattern for job in jobs if (rule := self._rule(job)) is not None}
        return tuple(rule.pattern for rule in self.rules if rule.pattern not in used)

    def unruled(self, jobs: Iterable[str]) -> tuple[str, ...]:
        """Return the jobs that no rule matches: everything of them is kept, perhaps by oversight."""
        return tuple(job for job in sorted(set(jobs)) if self._rule(job) is None)

    def _rule(self, job: str) -> RetentionRule | None:
        return next((rule for rule in self.rules if fnmatch.fnmatchcase(job, rule.pattern)), None)


def shadows(earlier: str, later: str) -> bool:
    """Return whether a pattern is known to match all that a later one matches, so that the later one never counts."""
    # No job has an empty name.
    if earlier == later or (set(earlier) <= {"*", "?"} and "*" in earlier and earlier.count("?") <= 1):
        return True
    if "[" in later or (not set("?[").isdisjoint(earlier) and not set("*?").isdisjoint(later)):
        return False
    # What is any text in the later pattern has to fall into what is any text in the earlier one.
    return fnmatch.fnmatchcase(later, earlier)


def as_policy(retention: Retention | RetentionPolicy) -> RetentionPolicy:
    """Return a retention as the policy that has it for every job."""
    if isinstance(retention, RetentionPolicy):
        return retention
    return RetentionPolicy(rules=(RetentionRule(pattern="*", retention=retention),))


def choose_kept(
    commits: Sequence[Commit], retention: Retention | None, named: Collection[model.CommitPointer] = ()
) -> dict[model.CommitPointer, KeepReason]:
    """Return the commits to keep of the valid ones of a scope, oldest first, each with the first reason that applies.

    Of some, never none is kept; without a rule, all are. `named` are records of this scope that a name refers to.
    """
    kept: dict[model.CommitPointer, KeepReason] = {}
    if not commits:
        return kept
    kept[commits[-1].pointer] = KeepReason.NEWEST
    if retention is None:
        return kept | {commit.pointer: KeepReason.UNRULED for commit in commits[:-1]}
    for commit, reason in _keep_by_time(commits, retention):
        kept.setdefault(commit.pointer, reason)
    if retention.keep_named:
        for commit in commits:
            if commit.pointer in named:
                kept.setdefault(commit.pointer, KeepReason.NAMED)
    return kept


def _keep_by_time(commits: Sequence[Commit], retention: Retention) -> Iterator[tuple[Commit, KeepReason]]:
    """Yield what is kept by number, by age and by periods, a commit for each reason."""
    if retention.keep_last:
        yield from ((commit, KeepReason.LAST) for commit in commits[-retention.keep_last :])
    if retention.keep_since_ms is not None:
        older = [c for c in commits if c.committed_at_ms < retention.keep_since_ms]
        yield from ((commit, KeepReason.SINCE) for commit in (*older[-1:], *commits[len(older) :]))
    if not retention.periods:
        return
    # One that has the time of the commit before has no time of its own: the clock was ahead then (C7).
    own_time = [c for n, c in enumerate(commits) if not n or c.committed_at_ms > commits[n - 1].committed_at_ms]
    for kind, count in retention.periods:
        newest: dict[object, Commit] = {}
        for commit in reversed(own_time):
            newest.setdefault(_PERIODS[kind](commit.committed_at_ms), commit)
        yield from ((commit, kind) for commit in itertools.islice(newest.values(), min(count, len(newest))))
    timed = {commit.pointer for commit in own_time}
    yield from ((commit, retention.periods[0][0]) for commit in commits if commit.pointer not in timed)
