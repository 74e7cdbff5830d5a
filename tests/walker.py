"""Which keys a repository should have, worked out without the engine: the judge of collection and of crashes."""

import hashlib
from collections.abc import Collection, Mapping
from contextlib import suppress

from blobstore.base import BlobInfo, BlobStore, list_blobs, read_blob
from index.snapshot.codec import (
    decode_boundary,
    decode_commit,
    decode_index,
    decode_name,
    decode_pin,
    decode_repository,
)
from index.snapshot.delta import apply_delta
from index.snapshot.model import (
    PIN_DURATION_MS,
    Boundary,
    CommitPointer,
    CommitRecord,
    DirIndex,
    IndexReference,
    SnapshotIndex,
    StoreReference,
)


async def expected_keys(store: BlobStore, now_ms: int) -> set[str]:
    """Return every key with a reason to exist: open records, what they, names and pins lead to, young uploads."""
    found = {blob.key: blob async for blob in list_blobs(store, "") if blob.key != "profile"}
    data = {key: await read_blob(store, key, size_bytes_max=1 << 30) for key in found if not key.startswith("blobs/")}
    return keys_to_keep(found, data, now_ms)


def keys_to_keep(
    found: Mapping[str, BlobInfo], data: Mapping[str, bytes], now_ms: int, *, late_pins: Collection[str] = ()
) -> set[str]:
    """`expected_keys` of what was read.

    Args:
        found: Every object as it is listed.
        data: The bytes of all but blobs.
        now_ms: The store's clock.
        late_pins: Pins that came when what they lead to may have been collected (design 0002, D5):
            they keep what is left of it. Of every other live pin all has to be there.

    Raises:
        KeyError: An index is missing.
    """
    # Audit records are evidence; of what a collection writes down for itself nothing stays when it has ended.
    repository = decode_repository(data["repository"], subject="repository")
    keep = {"repository", *(key for key in found if key.startswith("audit/"))}
    references: list[StoreReference] = []
    left: list[StoreReference] = []
    # Where this is later than leases, everything was copied from another place (C5).
    made_at_ms = found["repository"].created_at_ms // 1000 * 1000
    for keep_log, kept, reopenable in read_logs(found, data).values():
        keep |= keep_log
        references += [s for record in kept for s in record.stores]
        left += [s for record in reopenable for s in record.stores]
    for key, stored in data.items():
        if key.startswith("names/"):
            stays, stores = _name(key, stored, found[key].created_at_ms, now_ms, made_at_ms, repository.margin_ms)
            keep |= {key} if stays else set()
            references += stores
        if key.startswith("pins/"):
            stays, stores = _pin(key, stored, found[key].created_at_ms, now_ms, repository.margin_ms)
            keep |= {key} if stays else set()
            if key in late_pins:
                left += stores
            else:
                references += stores
    for reference in references:
        keep |= _reach(reference.index, data)
    for reference in left:
        with suppress(KeyError):
            keep |= _reach(reference.index, data) & found.keys()
    for key, blob in found.items():
        if key.startswith(("blobs/", "indexes/")) and now_ms < blob.created_at_ms + repository.ttl_ms:
            keep.add(key)
    return keep


def _pin(
    key: str, stored: bytes, created_at_ms: int, now_ms: int, margin_ms: int
) -> tuple[bool, tuple[StoreReference, ...]]:
    pin = decode_pin(stored, subject=key)
    ends_at_ms = created_at_ms + pin.duration_ms
    # For a margin longer a renewal may be on its way.
    stays = pin.duration_ms > 0 and now_ms < ends_at_ms + margin_ms
    return stays, pin.stores if now_ms < ends_at_ms else ()


def _name(
    key: str, stored: bytes, created_at_ms: int, now_ms: int, made_at_ms: int, margin_ms: int
) -> tuple[bool, tuple[StoreReference, ...]]:
    name = decode_name(stored, subject=key)
    is_copied = name.valid_until_ms - PIN_DURATION_MS < made_at_ms
    if not name.released and (created_at_ms <= name.valid_until_ms or is_copied):
        return True, name.stores
    # Until then a late copy of the request that created it must find its key taken; and what rests on a pin that was
    # written when it was live may still come.
    pins_last = name.released and now_ms < created_at_ms + PIN_DURATION_MS + margin_ms
    return now_ms <= name.valid_until_ms or pins_last, ()


def read_logs(
    found: Mapping[str, BlobInfo], data: Mapping[str, bytes]
) -> dict[str, tuple[set[str], list[CommitRecord], list[CommitRecord]]]:
    """By scope: the keys of its log with a reason to exist, its valid open records in their order, and those
    that are closed, but not for good."""
    logs: dict[str, dict[str, bytes]] = {}
    for key in sorted(found):
        if key.startswith("log/"):
            logs.setdefault(key.split("/")[1], {})[key] = data[key]
    return {scope: _log(scope, log, found, data["repository"]) for scope, log in logs.items()}


def _log(
    scope: str, data: Mapping[str, bytes], found: Mapping[str, BlobInfo], root: bytes
) -> tuple[set[str], list[CommitRecord], list[CommitRecord]]:
    boundaries = [decode_boundary(data[key], subject=key) for key in data if key.endswith(".boundary")]
    records = [(key, decode_commit(data[key], subject=key)) for key in data if key.endswith(".commit")]

    def is_open(record: CommitRecord) -> bool:
        me = CommitPointer(record.number, record.write_id)
        return all(b.number < me.number or me in b.kept for b in boundaries)

    def closes(boundary: Boundary, number: int) -> bool:
        return boundary.number >= number and all(p.number != number for p in boundary.kept)

    # No newer one closes the number of these; what no such one closes may be open again one day (D3).
    lasting = [b for b in boundaries if not any(n.number > b.number and closes(n, b.number) for n in boundaries)]

    def is_closed_for_good(record: CommitRecord) -> bool:
        me = CommitPointer(record.number, record.write_id)
        return any(b.number >= me.number and me not in b.kept for b in lasting)

    open_records = [(key, record) for key, record in records if is_open(record)]
    keep = {key for key, record in records if not is_closed_for_good(record)}
    if boundaries:
        newest = max(b.number for b in boundaries)
        keep.add(f"log/{scope}/{newest:020d}.boundary")
        # A boundary stays until a newer one that lasts closes its number, and keeps no more than it does.
        for old in boundaries:
            newer = [b for b in lasting if b.number > old.number and closes(b, old.number)]
            if not any({p for p in b.kept if p.number <= old.number} <= set(old.kept) for b in newer):
                keep.add(f"log/{scope}/{old.number:020d}.boundary")
    late = {key for key, record in records if found[key].created_at_ms > record.valid_until_ms}
    # Later records and boundaries vouch for a late one, and for the newest that it was copied (C5).
    vouched = {record.predecessor for _, record in records} | {p for b in boundaries for p in b.kept}
    repository, made_at_ms = (
        decode_repository(root, subject="repository"),
        found["repository"].created_at_ms // 1000 * 1000,
    )
    for _, newest_record in records[-1:]:
        lease_ms = repository.ttl_ms - repository.margin_ms if newest_record.kind == "commit" else PIN_DURATION_MS
        # One that was void at the old place may lack what was collected there: then it still is.
        new = [s for s in newest_record.stores if s.number == newest_record.number] or newest_record.stores
        came_along = all(store.index.key in found for store in new)
        if newest_record.valid_until_ms - lease_ms < made_at_ms and came_along:
            vouched.add(CommitPointer(newest_record.number, newest_record.write_id))
    valid = [
        record
        for key, record in open_records
        if key not in late or CommitPointer(record.number, record.write_id) in vouched
    ]
    return keep, valid, [record for key, record in records if key in keep and not is_open(record)]


def _reach(reference: IndexReference, data: Mapping[str, bytes]) -> set[str]:
    index, keys = resolve(reference, data)

    def walk(directory: DirIndex) -> None:
        for file in directory.files_present:
            keys.update(blob.key for blob in file.blobs)
        for sub in directory.sub_dirs_present:
            walk(sub)

    walk(index.dir)
    return keys


def resolve(reference: IndexReference, data: Mapping[str, bytes]) -> tuple[SnapshotIndex, set[str]]:
    """The index that a reference leads to, and the keys of the index objects on the way."""
    stored = data[reference.key]
    assert hashlib.sha256(stored).digest() == reference.sha256, reference.key
    index = decode_index(stored, subject=reference.key)
    if isinstance(index, SnapshotIndex):
        return index, {reference.key}
    base, keys = resolve(index.base, data)
    return apply_delta(base, index), keys | {reference.key}
