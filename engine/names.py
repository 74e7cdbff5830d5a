"""The names of a scope: what `tidemark list` shows of them, and what retention may have left to them alone."""

from blobstore.base import BlobStore, list_blobs, read_blob
from blobstore.errors import BlobNotFoundError
from engine.errors import NotFoundError
from index.codec import RECORD_BYTES_MAX, decode_name
from index.collect_plan import name_is_live
from index.keys import NAMES, encode_scope, name_key
from index.model import NameRecord, Scope


async def list_names(store: BlobStore, scope: Scope) -> tuple[NameRecord, ...]:
    """Every name of a scope that holds, sorted: not released, and written in time (design 0002, D5).

    Requests: one LIST per 1,000 names, one GET for each.

    Raises:
        FormatError: A name's bytes are damaged.
        StoreError: As the store says.
    """
    names: list[NameRecord] = []
    async for blob in list_blobs(store, f"{NAMES}{encode_scope(scope)}/"):
        try:
            data = await read_blob(store, blob.key, size_bytes_max=RECORD_BYTES_MAX)
        except BlobNotFoundError:
            continue  # released, and collected since the listing
        record = decode_name(data, subject=blob.key)
        if name_is_live(record, blob.created_at_ms):
            names.append(record)
    return tuple(sorted(names, key=lambda record: record.name))


async def read_name(store: BlobStore, scope: Scope, name: str) -> NameRecord:
    """A name that holds: one HEAD, because only the store knows when it was created, and one GET.

    Raises:
        NotFoundError: There is none, it was released, or it came too late to protect anything.
    """
    key = name_key(scope, name)
    info = await store.stat(key)
    try:
        record = (
            decode_name(await read_blob(store, key, size_bytes_max=RECORD_BYTES_MAX), subject=key) if info else None
        )
    except BlobNotFoundError:
        record = None
    if info is None or record is None or not name_is_live(record, info.created_at_ms):
        what = "was released" if record is not None and record.released else "is not there"
        raise NotFoundError(f"the name {name!r} {what}", operation="find", subject=str(scope))
    return record
