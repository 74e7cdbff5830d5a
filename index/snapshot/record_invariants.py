"""What a record must be before anything is done with it: the numbered rules M16 to M22 of design 0001.

Whether a record is valid, void or closed is decided from a whole log (`log`); here stands what one record alone tells.
"""

from collections.abc import Iterable
from typing import Final

from index.errors import UnknownFormatError
from index.snapshot.bounds import broken, check_hash, check_number, check_session, check_text
from index.snapshot.keys import INDEXES, encode_component, encode_scope, parse_upload_key
from index.snapshot.model import (
    Boundary,
    CommitPointer,
    CommitRecord,
    IndexReference,
    NameRecord,
    Pin,
    RepositoryRecord,
    Scope,
    ScopeLayout,
    StoreReference,
)

STORES_MAX: Final = 200_000
KEY_LAYOUT: Final = 1

_ID_BYTES_MAX: Final = 200
_OFFSETS_BYTES_MAX: Final = 64 * 1024 * 1024


def check_index_reference(reference: IndexReference, rule: str, what: str) -> None:
    """M16. An index reference has the key of an upload in `indexes/`, a hash of 32 bytes and a size above zero.

    Raises:
        IndexInvariantError: Hash, size or room is wrong.
        UnsafeNameError: The key is not the key of an upload.
    """
    if parse_upload_key(reference.key).room != INDEXES:
        raise broken(rule, f"{reference.key} is not in {INDEXES}", what)
    check_hash(reference.sha256, rule, f"hash of the {what}")
    check_number(reference.size_bytes, rule, f"size of the {what}", low=1)


def check_commit(record: CommitRecord) -> None:
    """Refuse a commit record that breaks one of these rules.

    - M17. Its stores are strictly ascending by task and store, at most STORES_MAX, each with a valid index reference
      (M16), texts that fit, and counts, sizes and version that are not negative; in the scope of one task all are
      that task's. Each was first named by a record from 1 to this record's number.
    - M18. Its number is at least 1 and above that of its predecessor and, in a rewind, of its source. A rewind names a
      source; a fork names a source and its scope; a commit names neither. Its version and its times are not negative.

    Raises:
        IndexInvariantError: One of them is broken; its number is in the message.
        UnsafeNameError: Job, task or an index key has a form that none has.
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
    """M19. A boundary's number is at least 1; the records that it keeps have ascending numbers from 1 to its own.

    Raises:
        IndexInvariantError: That is broken.
        UnsafeNameError: The scope has a form that none has.
    """
    encode_scope(boundary.scope)
    check_number(boundary.number, "M19", "number", low=1)
    previous = 0
    for pointer in boundary.kept:
        _check_pointer(pointer, "M19", "kept record", number_max=boundary.number)
        if pointer.number <= previous:
            raise broken("M19", f"{pointer.number} stands after {previous}", "kept records")
        previous = pointer.number


def check_pin(pin: Pin) -> None:
    """M20. A pin's id is 20 lower-case hexadecimal digits, its duration is not negative, its stores are as in M17.

    Raises:
        IndexInvariantError: That is broken.
        UnsafeNameError: The scope or an index key has a form that none has.
    """
    check_session(pin.id, "M20", "pin id")
    encode_scope(pin.scope)
    _check_pointer(pin.source, "M20", "source")
    check_number(pin.duration_ms, "M20", "duration_ms")
    check_text(pin.purpose, "M20", "purpose", empty=True)
    _check_stores(pin.stores, pin.scope, named_by_max=pin.source.number)


def check_name(record: NameRecord) -> None:
    """M21. A name is a name for a key; its version and time are not negative, its stores are as in M17.

    Raises:
        IndexInvariantError: That is broken.
        UnsafeNameError: The name, the scope or an index key has a form that none has.
    """
    encode_scope(record.scope)
    encode_component(record.name)
    _check_pointer(record.source, "M21", "source")
    check_number(record.version, "M21", "version")
    check_number(record.committed_at_ms, "M21", "committed_at_ms")
    _check_stores(record.stores, record.scope, named_by_max=record.source.number)


def check_repository(record: RepositoryRecord) -> None:
    """M22. A repository has an id, a TTL above its margin, and a collection period; its key layout is one we know.

    Raises:
        IndexInvariantError: That is broken.
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
        if record.kind == "rewind":
            _check_pointer(record.source, "M18", "source", number_max=below)
        else:
            _check_pointer(record.source, "M18", "source")
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
    _check_store_order((reference.task, reference.store) for reference in stores)
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


def _check_store_order(names: Iterable[tuple[str, str]]) -> None:
    previous = ("", "")
    for name in names:
        if name <= previous:
            raise broken("M17", f"{name} stands after {previous}", "stores")
        previous = name


def _check_pointer(pointer: CommitPointer, rule: str, what: str, *, number_max: int | None = None) -> None:
    if number_max is None:
        check_number(pointer.number, rule, f"number of the {what}", low=1)
    else:
        check_number(pointer.number, rule, f"number of the {what}", low=1, high=number_max)
    check_text(pointer.write_id, rule, f"write id of the {what}", bytes_max=_ID_BYTES_MAX)
