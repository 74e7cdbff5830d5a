"""The records that a repository stores beside snapshots (commits, boundaries, pins, names, itself), and their rules.

Every struct here is frozen and is stored bytes, as in `model`: fields are only ever added at the end and with a default
(design 0001, F6). Then come the numbered rules M17 to M22 of design 0001, which are checked before a record is written
and after it is read, with the errors of `invariants`. They say what one record alone shows; whether it is valid, void
or closed is decided from a whole log (`index.plan.commits`).
"""

from typing import Final, Literal, NewType

import msgspec

from index.errors import UnknownFormatError
from index.snapshot.invariants import broken, check_index_reference, check_number, check_session, check_text
from index.snapshot.keys import encode_component, encode_scope
from index.snapshot.model import SIZE_BYTES_MAX, IndexReference, Scope, UniqueId

# What other people's programs may rely on.
__all__ = [
    "Boundary",
    "CommitPointer",
    "CommitRecord",
    "NameRecord",
    "Pin",
    "RepositoryRecord",
    "ScopeLayout",
    "StoreReference",
]

WriteId = NewType("WriteId", str)

# A time that no clock reaches.
NEVER_MS = SIZE_BYTES_MAX
# How long a pin lasts after its last write, without the margin that writers add.
PIN_DURATION_MS = 3_600_000
STORES_MAX: Final = 200_000
KEY_LAYOUT: Final = 1

_ID_BYTES_MAX: Final = 200
_OFFSETS_BYTES_MAX: Final = 64 * 1024 * 1024


class ScopeLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How keys are spread over the tasks of a scope; fixed by its first record (design 0002, K3)."""

    tasks_count: int = 0
    # The name of the function from key to task, such as "spark-hash-v1"; empty where the caller places keys.
    key_hash: str = ""
    key_columns: tuple[str, ...] = ()


class CommitPointer(msgspec.Struct, frozen=True, order=True):
    """One commit record: its number in its scope, and the write id that distinguishes two records of one number."""

    number: int
    write_id: WriteId


class StoreReference(msgspec.Struct, frozen=True, kw_only=True):
    """One store at one version, as a commit record names it."""

    task: str
    store: str
    version: int
    unique_id: UniqueId
    index: IndexReference
    # The record that first named this index; carried over unchanged by later ones.
    number: int
    files_count: int
    size_bytes: int


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One commit of a scope: the write of this record is the commit point (design 0002, C1 to C7)."""

    scope: Scope
    number: int
    write_id: WriteId
    kind: Literal["commit", "rewind", "fork"] = "commit"
    # The newest valid record that the writer had loaded; None for a scope's first.
    predecessor: CommitPointer | None = None
    # Reserved: older releases read it, and nobody has ever written it.
    base: CommitPointer | None = None
    # Where a rewind or a fork took its stores from.
    source: CommitPointer | None = None
    source_scope: Scope | None = None
    # The caller's own version and offsets, opaque to us.
    version: int = 0
    offsets: str = ""
    layout: ScopeLayout = ScopeLayout()
    stores: tuple[StoreReference, ...] = ()
    # The record is void if the store says that it was created later than this, and nothing vouches (design 0002, C5).
    valid_until_ms: int
    # The commit time of the predecessor: time never goes backwards along a chain (design 0002, C7).
    predecessor_committed_at_ms: int = 0
    # Reserved: older releases wrote it, and nobody has ever read it.
    settled_through: int = 0

    @property
    def pointer(self) -> CommitPointer:
        """This record's number and write id."""
        return CommitPointer(self.number, self.write_id)


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """Which records at or below its number are open; every other one there is closed for ever (design 0002, D3)."""

    scope: Scope
    number: int
    kept: tuple[CommitPointer, ...] = ()


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A lease of a reader on one commit; it ends `duration_ms` after the store's time of its last write (D5).

    A duration of zero is a released pin: the collector removes it.
    """

    id: str
    scope: Scope
    source: CommitPointer
    duration_ms: int
    purpose: str
    stores: tuple[StoreReference, ...] = ()


class NameRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A name that keeps what it refers to until it is released (design 0002, D5)."""

    scope: Scope
    name: str
    source: CommitPointer
    version: int
    committed_at_ms: int
    stores: tuple[StoreReference, ...] = ()
    released: bool = False
    # A name that the store created later than this protects nothing, unless it was copied here (design 0002, D5).
    valid_until_ms: int = NEVER_MS
    # As in the commit record, which may be collected before the name is.
    offsets: str = ""
    layout: ScopeLayout = ScopeLayout()


class RepositoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What every writer, reader and collector of a repository agrees on (design 0002, K1)."""

    id: str
    # How long an upload lives that no commit has taken over: the lease of design 0002, C5.
    ttl_ms: int
    # Safety margin that C5 takes off the lease and T3 wants left at a commit.
    margin_ms: int
    # How often a collector is expected to run; a lifecycle rule of the store waits at least three of these (T3).
    collection_period_ms: int
    key_layout: int = 1


StoredRecord = CommitRecord | Boundary | Pin | NameRecord | RepositoryRecord


def check_commit(record: CommitRecord) -> None:
    """Refuse a commit record that breaks one of these rules.

    - M17. Its stores are strictly ascending by task and store, at most STORES_MAX, each with a valid index reference
      (M16), texts that fit, and counts, sizes and version that are not negative; in the scope of one task all are that
      task's. Each was first named by a record from 1 to this record's number.
    - M18. Its number is at least 1 and above that of its predecessor and, in a rewind, of its source. A rewind names a
      source; a fork names a source and its scope; a commit names neither. Its version and its times are not negative.
    """
    encode_scope(record.scope)
    check_number(record.number, "M18", "number", low=1)
    check_text(record.write_id, "M18", "write id", bytes_max=_ID_BYTES_MAX)
    check_number(record.version, "M18", "version")
    check_text(record.offsets, "M18", "offsets", bytes_max=_OFFSETS_BYTES_MAX, empty=True)
    check_number(record.valid_until_ms, "M18", "valid_until_ms")
    check_number(record.predecessor_committed_at_ms, "M18", "predecessor_committed_at_ms")
    _check_ancestry(record)
    _check_layout(record.layout)
    _check_stores(record.stores, record.scope, named_by_max=record.number)


def check_boundary(boundary: Boundary) -> None:
    """Check M19: a boundary's number is at least 1; those of the records that it keeps ascend from 1 to its own."""
    encode_scope(boundary.scope)
    check_number(boundary.number, "M19", "number", low=1)
    previous = 0
    for pointer in boundary.kept:
        _check_pointer(pointer, "M19", "kept record", number_max=boundary.number)
        if pointer.number <= previous:
            raise broken("M19", f"{pointer.number} comes after {previous}", "kept records")
        previous = pointer.number


def check_pin(pin: Pin) -> None:
    """Check M20: a pin's id is 20 lower-case hexadecimal digits, its duration not negative, its stores as in M17."""
    check_session(pin.id, "M20", "pin id")
    encode_scope(pin.scope)
    _check_pointer(pin.source, "M20", "source")
    check_number(pin.duration_ms, "M20", "duration_ms")
    check_text(pin.purpose, "M20", "purpose", empty=True)
    _check_stores(pin.stores, pin.scope, named_by_max=pin.source.number)


def check_name(record: NameRecord) -> None:
    """Check M21: a name is a name for a key; its version and time are not negative, its stores are as in M17."""
    encode_scope(record.scope)
    encode_component(record.name)
    _check_pointer(record.source, "M21", "source")
    check_number(record.version, "M21", "version")
    check_number(record.committed_at_ms, "M21", "committed_at_ms")
    _check_stores(record.stores, record.scope, named_by_max=record.source.number)


def check_repository(record: RepositoryRecord) -> None:
    """Check M22: a repository has an id, a TTL above its margin, a collection period and a known key layout.

    Raises:
        UnknownFormatError: The key layout is a newer one.
    """
    if record.key_layout > KEY_LAYOUT:
        raise UnknownFormatError(
            f"the repository has key layout {record.key_layout}; this version knows {KEY_LAYOUT}",
            subject="repository",
            hint="use a newer tidemark",
        )
    check_number(record.key_layout, "M22", "key layout", low=KEY_LAYOUT)
    check_text(record.id, "M22", "repository id", bytes_max=_ID_BYTES_MAX)
    check_number(record.ttl_ms, "M22", "ttl_ms", low=1)
    check_number(record.margin_ms, "M22", "margin_ms", high=record.ttl_ms - 1)
    check_number(record.collection_period_ms, "M22", "collection_period_ms", low=1)


def _check_ancestry(record: CommitRecord) -> None:
    below = record.number - 1
    if record.predecessor is not None:
        _check_pointer(record.predecessor, "M18", "predecessor", number_max=below)
    if (record.source is not None) != (record.kind != "commit"):
        raise broken("M18", f"a {record.kind} names a source, or names none", "source")
    if (record.source_scope is not None) != (record.kind == "fork"):
        raise broken("M18", f"a {record.kind} names its scope, or does not", "source")
    if record.source is not None:
        _check_pointer(record.source, "M18", "source", number_max=below if record.kind == "rewind" else SIZE_BYTES_MAX)
    if record.source_scope is not None:
        encode_scope(record.source_scope)


def _check_layout(layout: ScopeLayout) -> None:
    check_number(layout.tasks_count, "M18", "tasks_count")
    check_text(layout.key_hash, "M18", "key_hash", bytes_max=_ID_BYTES_MAX, empty=True)
    for column in layout.key_columns:
        check_text(column, "M18", "key column")


def _check_stores(stores: tuple[StoreReference, ...], scope: Scope, *, named_by_max: int) -> None:
    if len(stores) > STORES_MAX:
        raise broken("M17", f"more than {STORES_MAX} stores", str(scope))
    previous = ("", "")
    for reference in stores:
        name = (reference.task, reference.store)
        if name <= previous:
            raise broken("M17", f"{name} comes after {previous}", "stores")
        previous = name
    for task in {reference.task for reference in stores}:
        encode_component(task)
    for reference in stores:
        what = f"store {reference.task}/{reference.store}"
        check_text(reference.store, "M17", "store")
        check_text(reference.unique_id, "M17", f"unique id of {what}", bytes_max=_ID_BYTES_MAX)
        if scope.task is not None and reference.task != scope.task:
            raise broken("M17", f"is not a store of {scope}", what)
        check_index_reference(reference.index, "M16", f"index of {what}")
        check_number(reference.version, "M17", f"version of {what}")
        check_number(reference.number, "M17", f"number of {what}", low=1, high=named_by_max)
        check_number(reference.files_count, "M17", f"files_count of {what}")
        check_number(reference.size_bytes, "M17", f"size_bytes of {what}")


def _check_pointer(pointer: CommitPointer, rule: str, what: str, *, number_max: int = SIZE_BYTES_MAX) -> None:
    check_number(pointer.number, rule, f"number of the {what}", low=1, high=number_max)
    check_text(pointer.write_id, rule, f"write id of the {what}", bytes_max=_ID_BYTES_MAX)
