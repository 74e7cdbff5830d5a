"""The names of a scope: what `tidemark list` shows of them, and what retention may have left to them alone.

Each naming has a key of its own that is never used again, so that neither a late release nor a late collector can hit
another one. A name refers to the earliest of its namings that is live.
"""

from collections import defaultdict

import msgspec

from blobstore.base import BlobStore, BytesBody, list_blobs
from blobstore.errors import BlobNotFoundError, InvalidRequestError
from engine.errors import NotFoundError
from engine.records.log import Noted, Unreadable, read_record, repository_created_ms
from index.errors import FormatError, UnknownFormatError, UnsafeNameError
from index.plan.commits import Naming, choose_naming
from index.snapshot.codec import decode_name, encode_record
from index.snapshot.keys import NAMES, name_prefix, names_prefix, parse_name_key
from index.snapshot.model import Scope
from index.snapshot.records import NameRecord


async def list_names(store: BlobStore, scope: Scope, noted: Noted | None = None) -> tuple[NameRecord, ...]:
    """Return every name of a scope that holds, sorted: not released, and written in time (design 0002, D5).

    One that cannot be read is passed over, and noted.

    Requests: one LIST per 1,000 namings, one GET for each.
    """
    by_name: defaultdict[str, list[Naming]] = defaultdict(list)
    for naming in await list_namings(store, noted or Noted(), names_prefix(scope)):
        by_name[naming.record.name].append(naming)
    chosen = [choose_naming(namings) for _, namings in sorted(by_name.items())]
    return tuple(naming.record for naming in chosen if naming is not None)


async def read_name(store: BlobStore, scope: Scope, name: str) -> NameRecord:
    """Read a name that holds. Requests as `read_namings`.

    Raises:
        NotFoundError: There is none, it was released, or it came too late to protect anything.
    """
    return find_name(await read_namings(store, scope, name), scope, name).record


async def read_namings(store: BlobStore, scope: Scope, name: str) -> tuple[Naming, ...]:
    """Read every record of a name, released and void ones too: one LIST, and a GET for each, mostly one.

    Raises:
        FormatError: One cannot be read.
    """
    noted = Noted()
    namings = await list_namings(store, noted, name_prefix(scope, name))
    if noted.unreadable:
        raise noted.unreadable[0].error
    return namings


async def release_naming(store: BlobStore, naming: Naming) -> None:
    """Overwrite one naming as released: one PUT, harmless to every other naming."""
    released = msgspec.structs.replace(naming.record, released=True)
    await store.put(naming.key, BytesBody(encode_record(released)))


def find_name(namings: tuple[Naming, ...], scope: Scope, name: str) -> Naming:
    """Find the naming that a name refers to.

    Raises:
        NotFoundError: As `read_name`.
    """
    chosen = choose_naming(namings)
    if chosen is None:
        what = "was released" if any(n.record.released for n in namings) else "is not there"
        raise NotFoundError(f"the name {name!r} {what}", operation="find", subject=str(scope))
    return chosen


async def read_first_name(store: BlobStore, key: str) -> NameRecord | None:
    """Return a name as the first commits of tidemark wrote it, at a key without an id; None if that is none.

    Its writer may have put it twice, so that it cannot be believed as others are.
    """
    try:
        record = await read_record(store, key, decode_name)
    except (BlobNotFoundError, FormatError, InvalidRequestError):
        return None
    return record if key == name_prefix(record.scope, record.name).rstrip("/") else None


def _first_name_error(key: str, record: NameRecord) -> UnknownFormatError:
    return UnknownFormatError(
        f"is the name {record.name!r} of commit {record.source.number} of {record.scope}, "
        "as the first commits of tidemark wrote it",
        subject=key,
        hint="give that commit a name once more with `tidemark name`, then remove this one with `tidemark discard`",
    )


async def list_namings(store: BlobStore, noted: Noted, prefix: str = NAMES) -> tuple[Naming, ...]:
    """Return every record of every name below a prefix; what cannot be read, and foreign keys, are noted."""
    namings: list[Naming] = []
    async for blob in list_blobs(store, prefix):
        try:
            naming_id = parse_name_key(blob.key)[2]
        except UnsafeNameError:
            first = await read_first_name(store, blob.key)
            if first is None:
                noted.foreign.append(blob.key)
            else:
                noted.unreadable.append(Unreadable(key=blob.key, error=_first_name_error(blob.key, first)))
            continue
        try:
            record = await noted.read(blob.key, read_record(store, blob.key, decode_name))
        except BlobNotFoundError:
            continue  # released, and collected since the listing
        if record is None:
            continue
        namings.append(Naming(key=blob.key, created_at_ms=blob.created_at_ms, id=naming_id, record=record))
    if all(n.record.released or n.is_live for n in namings):
        return tuple(namings)
    # One is late: it holds all the same where it was copied with the whole repository.
    created_at_ms = await repository_created_ms(store)
    return tuple(msgspec.structs.replace(n, repository_created_at_ms=created_at_ms) for n in namings)
