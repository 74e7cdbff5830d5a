"""Follow the history of a repository by the requests that changed it, and judge each of them (design 0007).

Plain dicts. Of the project's own code only the codecs and the walker's following of indexes are used.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from index.snapshot.codec import decode_boundary, decode_commit, decode_index, decode_name, decode_pin
from index.snapshot.delta import apply_delta
from index.snapshot.keys import commit_key, parse_log_key
from index.snapshot.model import (
    Boundary,
    CommitPointer,
    CommitRecord,
    DirIndex,
    IndexReference,
    NameRecord,
    Scope,
    SnapshotIndex,
    StoreReference,
)
from tests.simulation.checks.pins import StandingPins
from tests.simulation.checks.uploads import Uploads
from tests.simulation.model.s3 import SimObject

# Who judges, and does the upkeep (S9).
JUDGE: Final = "judge"

Tree = dict[str, bytes]
# Task and store.
StoreName = tuple[str, str]


class Collecting(msgspec.Struct, kw_only=True):
    """A collection under way: what it may close is what its rule does not keep."""

    keep_last: int
    keep_since_ms: int | None
    began: int


class Written(msgspec.Struct, kw_only=True):
    """A commit record that the server created, whatever became of it."""

    record: CommitRecord
    # The process whose request created it. Its number may be another's once it is closed and collected.
    writer: str
    created_at_ms: int
    # Neither void nor closed from birth on.
    was_valid: bool
    # It was void, and whole when everything was copied: there it looks like one that was acknowledged (C5).
    revived: bool = False
    # The numbers of the events that created it and that closed it; 0 while it is open.
    created: int
    closed: int = 0

    @property
    def is_open(self) -> bool:
        return self.was_valid and not self.closed


class RecordHistory:
    """Every record, boundary and name that was ever there, and what a request may not do to them.

    Args:
        objects: What the bucket holds, by name.
        root: What every name of the repository begins with.
        clock: The server's, in ms.

    Attributes:
        ttl_ms: Of the repository, once it is known.
        events: Changes seen so far.
        violations: What broke a rule or an invariant, with its code, as it happened.
        collecting: Every collection that was begun, by the name of its process: a boundary of one may land late.
        forgetting: Who has asked to forget a scope, by the name of the process.
        forgotten_until: The highest number that a forgetting has closed, by scope.
        forgettings: How often one did.
        closings: Boundaries written, and records, indexes and blobs deleted.
        deltas: Indexes that were stored as differences.
        delta_chains: Those among them whose base is one, too.
        uploads: Judges what happens to single objects.
        pins: Knows which pins protect what.
        bases: Which index each one was diffed against, by their keys, as its maker saw them.
        rotten: What objects held before a byte of theirs rotted, by key.
        tampered: Keys that a test has taken away behind everybody's back.
    """

    def __init__(self, objects: Mapping[str, SimObject], root: str, clock: Callable[[], int]) -> None:
        self.objects = objects
        self.root = root
        self._clock = clock
        self.ttl_ms = 0
        self.events = 0
        self.violations: list[str] = []
        self.records: dict[Scope, dict[CommitPointer, Written]] = {}
        self.boundaries: dict[Scope, dict[int, Boundary]] = {}
        self.names: dict[str, tuple[NameRecord, int]] = {}
        self.collecting: dict[str, list[Collecting]] = {}
        self.forgetting: dict[Scope, set[str]] = {}
        self.forgotten_until: dict[Scope, int] = {}
        self.forgettings = 0
        self.closings = 0
        self.deltas = 0
        self.delta_chains = 0
        self.bases: dict[str, str | None] = {}
        self.rotten: dict[str, bytes] = {}
        self.tampered: set[str] = set()
        self._indexes: dict[str, SnapshotIndex] = {}
        self._ways: dict[str, frozenset[str]] = {}
        self._reachable: frozenset[str] | None = None
        self.uploads = Uploads(objects, root, self._ways, self._violated)
        self.pins = StandingPins(self._ways, clock)

    def copy(self, objects: Mapping[str, SimObject], clock: Callable[[], int]) -> "RecordHistory":
        """The same, of copies of the objects."""
        copied = RecordHistory(objects, self.root, clock)
        copied.events, copied.ttl_ms = self.events, self.ttl_ms
        copied.records = {
            scope: {pointer: msgspec.structs.replace(written) for pointer, written in records.items()}
            for scope, records in self.records.items()
        }
        copied.boundaries = {scope: dict(boundaries) for scope, boundaries in self.boundaries.items()}
        copied.names, copied.bases = dict(self.names), dict(self.bases)
        copied._indexes, copied._ways = dict(self._indexes), dict(self._ways)
        copied.uploads = self.uploads.copy(objects, copied._ways, copied._violated)
        copied.pins = self.pins.copy(copied._ways, clock)
        return copied

    # ------------------------------------------------------------------ what the server reports

    def created(self, process: str, key: str) -> None:
        """An object was created or replaced; it is in `objects`."""
        self.events += 1
        self.uploads.look(self.tampered)
        self.uploads.created(process, key)
        stored = self.objects[self.root + key]
        self.rotten.pop(key, None)
        match key.split("/", 1)[0]:
            case "log" if key.endswith(".commit"):
                self._record_created(process, key, stored)
            case "log":
                self._boundary_created(process, key, stored)
            case "names":
                self.names[key] = decode_name(stored.data, subject=key), stored.created_ms
                self._reachable = None
            case "indexes":
                self._ways[key], self._indexes[key] = self._follow(key, stored.data)
            case "pins":
                pin = decode_pin(stored.data, subject=key)
                self.pins.put(key, pin, stored.created_ms, finds_open=self._is_protected(pin.scope, pin.source))
            case _:
                pass

    def deleting(self, process: str, key: str) -> None:
        """An object is about to be deleted, by a process or (with an empty name) by the store itself."""
        self.events += 1
        self.closings += key.startswith(("log/", "indexes/", "blobs/"))
        self.rotten.pop(key, None)
        self.uploads.look(self.tampered)
        self.uploads.deleting(process, key, may_delete=process == JUDGE or process in self.collecting)
        match key.split("/", 1)[0]:
            case "log" if key.endswith(".commit"):
                parsed = parse_log_key(key)
                for written in self.records.get(parsed.scope, {}).values():
                    if written.record.number == parsed.number and written.is_open:
                        self._violated(f"D3: {process} deletes the open record {key}")
            case "log":
                self._boundary_deleted(process, key)
            case "names":
                name, created_at_ms = self.names.pop(key)
                if not name.released and created_at_ms <= name.valid_until_ms:
                    self._violated(f"D5: {process} deletes the live name {key}")
                self._reachable = None
            case "pins":
                if self.pins.deleting(key):
                    self._violated(f"D5: {process} deletes the live pin {key}")
            case "blobs" | "indexes":
                self._upload_deleted(process, key)
            case _:
                pass

    def copied(self) -> None:
        """Everything was moved to another place: the newest record of a scope counts there, if it is whole."""
        for scope, known in self.records.items():
            standing = [w for w in known.values() if self.root + commit_key(scope, w.record.number) in self.objects]
            newest = max(standing, key=lambda w: w.record.number, default=None)
            if newest is None or newest.was_valid or self._is_closed(newest.record):
                continue
            stores = newest.record.stores
            new = [s for s in stores if s.number == newest.record.number] or stores
            if all(self.root + store.index.key in self.objects for store in new):
                newest.was_valid = newest.revived = True
        self._reachable = None

    def _is_closed(self, record: CommitRecord) -> bool:
        boundaries = self.boundaries.get(record.scope, {}).items()
        return any(n >= record.number and record.pointer not in b.kept for n, b in boundaries)

    # ------------------------------------------------------------------ what follows from it

    def open_records(self, scope: Scope) -> list[Written]:
        """The valid records that no boundary has closed, by number."""
        written = (w for w in self.records.get(scope, {}).values() if w.is_open)
        return sorted(written, key=lambda w: w.record.number)

    def live_names(self) -> list[NameRecord]:
        """Every naming that protects something."""
        return [n for n, created_at_ms in self.names.values() if not n.released and created_at_ms <= n.valid_until_ms]

    def reachable(self) -> frozenset[str]:
        """Every index and blob that a valid open commit or a live name leads to."""
        if self._reachable is None:
            found: set[str] = set()
            for reference in self._references():
                found |= self.way(reference)
            self._reachable = frozenset(found)
        return self._reachable

    def way(self, store: StoreReference) -> frozenset[str]:
        """Every index and blob that a store leads to."""
        return self._ways.get(store.index.key, frozenset({store.index.key}))

    def is_tampered(self, stores: tuple[StoreReference, ...]) -> bool:
        """Whether a test has taken away something that these lead to."""
        return any(self.tampered & self.way(store) for store in stores)

    def content(self, reference: IndexReference) -> Tree:
        """The files of a snapshot, from the bytes that are there now.

        Raises:
            KeyError: A blob or an index is missing.
        """
        for key in self._ways[reference.key]:
            if key.startswith("indexes/") and self.root + key not in self.objects:
                raise KeyError(key)
        found: Tree = {}
        self._read(self._indexes[reference.key].dir, "", found)
        return found

    def index_of(self, reference: IndexReference) -> SnapshotIndex | None:
        """The index that a reference names, if it was ever created."""
        return self._indexes.get(reference.key)

    def check_there(self, what: str, stores: tuple[StoreReference, ...]) -> None:
        """Everything that some stores lead to is there."""
        for store in stores:
            missing = [k for k in self.way(store) if self.root + k not in self.objects]
            if not self.tampered.issuperset(missing):
                self._violated(f"2 missing: {what} needs {min(missing)} ({len(missing)} in all), which is not there")

    # ------------------------------------------------------------------ inside

    def _violated(self, what: str) -> None:
        self.violations.append(what)

    def _is_protected(self, scope: Scope, pointer: CommitPointer) -> bool:
        """Whether a pin on a commit comes in time: it is open, or a live name stands for it."""
        written = self.records.get(scope, {}).get(pointer)
        return (written is not None and written.is_open) or any(
            name.scope == scope and name.source == pointer for name in self.live_names()
        )

    def _references(self) -> list[StoreReference]:
        found = [s for scope in self.records for w in self.open_records(scope) for s in w.record.stores]
        return found + [s for name in self.live_names() for s in name.stores]

    def _record_created(self, process: str, key: str, stored: SimObject) -> None:
        record = decode_commit(stored.data, subject=key)
        in_time = stored.created_ms <= record.valid_until_ms
        written = Written(
            record=record,
            writer=process,
            created_at_ms=stored.created_ms,
            was_valid=in_time and not self._is_closed(record),
            created=self.events,
        )
        known = self.records.setdefault(record.scope, {})
        if record.pointer in known:
            # A late copy of a request whose record was collected meanwhile: nobody may take it for valid.
            if written.was_valid:
                self._violated(f"D3: record {record.number} of {record.scope} comes back")
            return
        until = self.forgotten_until.get(record.scope)
        began_again = record.predecessor is None and until is not None and record.number > until
        if written.was_valid:
            for other in known.values():
                if other.was_valid and other.record.predecessor == record.predecessor and not began_again:
                    self._violated(f"6 chain: records {other.record.pointer} and {record.pointer} have one predecessor")
                if other.was_valid and other.record.number == record.number:
                    self._violated(f"6 number: two valid records have number {record.number} of {record.scope}")
        self._check_bases(record, known)
        self._check_layout(record, known)
        known[record.pointer] = written
        self._reachable = None
        self.uploads.recorded(key, record, was_valid=written.was_valid)
        if written.was_valid:
            self.check_there(f"record {record.number} of {record.scope}, just created,", record.stores)

    def _check_layout(self, record: CommitRecord, known: Mapping[CommitPointer, Written]) -> None:
        """K3: a commit has its predecessor's layout, or no store of it; a copy has its source's."""
        copied = self.records.get(record.source_scope or record.scope, {})
        of = known.get(record.predecessor) if record.predecessor else None
        of = copied.get(record.source) if record.source else of
        if of is None or of.record.layout == record.layout:
            return
        kept = {s.index.key for s in of.record.stores} & {s.index.key for s in record.stores}
        if record.kind != "commit" or kept:
            self._violated(f"K3: record {record.number} of {record.scope} has another layout, and keeps {sorted(kept)}")

    def _boundary_created(self, process: str, key: str, stored: SimObject) -> None:
        boundary = decode_boundary(stored.data, subject=key)
        self.closings += 1
        scope = boundary.scope
        self.boundaries.setdefault(scope, {})[boundary.number] = boundary
        valid = self.open_records(scope)
        self._reachable = None
        is_forgetting = not boundary.kept and process in self.forgetting.get(scope, ())
        closes = [w for w in valid if w.record.number <= boundary.number and w.record.pointer not in boundary.kept]
        if is_forgetting:
            self.forgettings += 1
            self.forgotten_until[scope] = max(boundary.number, self.forgotten_until.get(scope, 0))
        elif closes:
            if closes[-1] is valid[-1]:
                self._violated(f"D3 newest: {process} closes {closes[-1].record.number}, the newest valid of {scope}")
            rules = self._rules(process, boundary)
            if not any(all(self._may_close(written, rule) for written in closes) for rule in rules):
                numbers = [written.record.number for written in closes]
                self._violated(f"D3 kept: {process} closes {numbers} of {scope}, which its rule keeps: {rules}")
        for written in closes:
            written.closed = self.events

    def _rules(self, process: str, boundary: Boundary) -> Sequence[Collecting]:
        """Of the collections of a process those that may have written a boundary: an older one's may land late.

        A process collects once at a time: an older collection knows no record that came when a later one had begun.
        """
        begun = self.collecting.get(process, [])
        if len(begun) < 2:
            return begun
        known = self.records.get(boundary.scope, {}).values()
        newest = max((w.created for w in known if w.record.number <= boundary.number), default=0)
        return [rule for rule, later in itertools.pairwise(begun) if newest <= later.began] + begun[-1:]

    def _check_bases(self, record: CommitRecord, known: Mapping[CommitPointer, Written]) -> None:
        """C2: what is new in a record was diffed against what its predecessor holds."""
        if record.kind != "commit" or (record.predecessor is not None and record.predecessor not in known):
            return
        before = known[record.predecessor].record.stores if record.predecessor is not None else ()
        held = {(store.task, store.store): store.index.key for store in before}
        for store in record.stores:
            if store.number != record.number or store.index.key not in self.bases:
                continue
            base = self.bases[store.index.key]
            if base != held.get((store.task, store.store)):
                self._violated(f"C2: record {record.number} of {record.scope} has {store.store} on top of {base}")

    def _may_close(self, written: Written, collecting: Collecting) -> bool:
        newer = [
            w
            for w in self.records[written.record.scope].values()
            if w.was_valid and w.record.number > written.record.number and (not w.closed or w.closed > collecting.began)
        ]
        if not newer or len(newer) < collecting.keep_last:
            return False
        since_ms = collecting.keep_since_ms
        # The one that was the newest at that time stays, and with it all later ones (C7: times do not go backwards).
        return since_ms is None or any(w.created_at_ms < since_ms for w in newer)

    def _boundary_deleted(self, process: str, key: str) -> None:
        parsed = parse_log_key(key)
        there = self.boundaries[parsed.scope]
        number = there.pop(parsed.number).number
        newer = [b for b in there.values() if b.number > number]
        if all(any(p.number == number for p in b.kept) for b in newer):
            self._violated(f"D3: {process} deletes {key}, which lasts: it is the newest, or newer ones list its number")
        for pointer, written in self.records.get(parsed.scope, {}).items():
            is_closed = any(n >= pointer.number and pointer not in b.kept for n, b in there.items())
            if written.closed and not is_closed:
                # A second boundary of one number may be deleted by who slept: what it closed has to be there.
                written.closed, self._reachable = 0, None
                if self.root + commit_key(parsed.scope, pointer.number) not in self.objects:
                    self._violated(f"D3: {process} deletes {key}, and record {pointer.number} is open again, and gone")
                self.check_there(f"record {pointer.number} of {parsed.scope}, open again,", written.record.stores)

    def _upload_deleted(self, process: str, key: str) -> None:
        if key in self.tampered:
            return
        if key in self.reachable():
            self._violated(f"D7: {process or 'the store'} deletes {key}, which a valid commit or a name needs")
        elif process and (pin := self.pins.protector(key)):
            self._violated(f"D5: {process} deletes {key}, which {pin} protects")
        elif process and self._clock() < self.objects[self.root + key].created_ms + self.ttl_ms:
            self._violated(f"D2: {process} deletes {key} before it is a TTL old")

    def _read(self, directory: DirIndex, path: str, found: Tree) -> None:
        for file in directory.files_present:
            data = bytearray(file.inline or b"")
            for blob in file.blobs:
                at = blob.blob_offset_bytes
                data += self.objects[self.root + blob.key].data[at : at + blob.size_bytes]
            found[path + file.name] = bytes(data)
        for sub in directory.sub_dirs_present:
            self._read(sub, f"{path}{sub.name}/", found)

    def _follow(self, key: str, data: bytes) -> tuple[frozenset[str], SnapshotIndex]:
        index = decode_index(data, subject=key)
        keys = {key}
        if not isinstance(index, SnapshotIndex):
            self.deltas += 1
            self.delta_chains += sum(k.startswith("indexes/") for k in self._ways[index.base.key]) > 1
            # Chains may be read again and again: each link is remembered once it was followed.
            keys |= {k for k in self._ways[index.base.key] if k.startswith("indexes/")}
            index = apply_delta(self._indexes[index.base.key], index)
        _blobs(index.dir, keys.add)
        return frozenset(keys), index


def _blobs(directory: DirIndex, add: Callable[[str], object]) -> None:
    for file in directory.files_present:
        for blob in file.blobs:
            add(blob.key)
    for sub in directory.sub_dirs_present:
        _blobs(sub, add)
