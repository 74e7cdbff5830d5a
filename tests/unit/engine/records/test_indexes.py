"""Indexes in a store: every way in which one can be wrong, and when one is stored as a delta (design 0002, P2)."""

import hashlib
import os
from collections.abc import Callable

import msgspec
import pytest

from blobstore.base import BytesBody
from blobstore.errors import AccessDeniedError, BlobNotFoundError, StoreUnavailableError
from blobstore.memory import MemoryStore
from engine.errors import DamagedError
from engine.records import indexes as index_io
from engine.records.indexes import IndexCache, StoredSnapshot, delta_pays, read_index, read_stored_snapshot, write_index
from index.errors import FormatError, IndexInvariantError
from index.snapshot import codec
from index.snapshot.codec import decode_index, encode_index
from index.snapshot.delta import make_delta
from index.snapshot.keys import BLOBS, INDEXES, upload_key
from index.snapshot.model import (
    DirIndex,
    FileBlob,
    FileIndex,
    FileMetadata,
    IndexDelta,
    IndexReference,
    LineageItem,
    Scope,
    SnapshotIndex,
    SnapshotMetadata,
    StoredIndex,
    UniqueId,
)
from tests.contract.store_calls import get_bytes
from tests.doubles import InterposedStore

SCOPE = Scope("job")
TTL_MS = 1000


def session(number: int) -> str:
    return f"{number:020x}"


def a_file(name: str, number: int) -> FileIndex:
    # A hash that does not compress, as real ones.
    digest = hashlib.sha256(f"{name} {number}".encode()).digest()
    blob = FileBlob(upload_key(BLOBS, SCOPE, session(number), int(name)), 0, 0, 9)
    return FileIndex(name, FileMetadata(9, 0o644, 1), digest, 1, (blob,))


def snapshot(version: int, files: int = 3, *, changed: int = 0, before: SnapshotIndex | None = None) -> SnapshotIndex:
    """Version `version` of a directory, of which the first `changed` files are new and the others as `before`."""
    old = {file.name: file for file in before.dir.files_present} if before is not None else {}
    names = [f"{i:06d}" for i in range(files)]
    present = tuple(a_file(n, version) if i < changed or n not in old else old[n] for i, n in enumerate(names))
    base = LineageItem(version - 1, UniqueId(f"u{version - 1}")) if before is not None else None
    return SnapshotIndex(
        metadata=SnapshotMetadata(
            job="job", task="0", store="default", version=version, unique_id=UniqueId(f"u{version}"), base=base
        ),
        session=session(version),
        dir=DirIndex("", present, (), tuple(old[n] for i, n in enumerate(names) if n in old and i < changed)),
    )


async def chain_of(store: MemoryStore, length: int, files: int = 400) -> list[StoredSnapshot]:
    """A number of snapshots, each written on top of the one before."""
    written: list[StoredSnapshot] = []
    for version in range(1, length + 1):
        base = written[-1] if written else None
        index = snapshot(version, files, changed=1, before=base.index if base else None)
        stored, _ = await write_index(store, index, scope=SCOPE, ttl_ms=TTL_MS, base=base)
        written.append(stored)
    return written


async def test_what_is_written_is_read(store: MemoryStore) -> None:
    index = snapshot(1)
    stored, created = await write_index(store, index, scope=SCOPE, ttl_ms=TTL_MS, base=None)
    (reference,) = stored.chain
    info = await store.stat(reference.key)
    assert info is not None
    assert (info.size_bytes, info.created_at_ms) == (reference.size_bytes, created.created_at_ms)
    assert info.expires_at_ms == created.created_at_ms + TTL_MS
    assert reference.key == upload_key(INDEXES, SCOPE, index.session, 0)
    assert await read_index(store, reference) == index
    assert await read_stored_snapshot(store, reference) == StoredSnapshot(index=index, chain=(reference,))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


class TestDamage:
    @pytest.fixture
    async def reference(self, store: MemoryStore) -> IndexReference:
        stored, _ = await write_index(store, snapshot(1), scope=SCOPE, ttl_ms=TTL_MS, base=None)
        return stored.chain[0]

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data[:-1],
            lambda data: b"",
            lambda data: data + b"x",
            lambda data: data * 2,
            lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:],
            lambda data: os.urandom(len(data)),
        ],
        ids=["cut", "empty", "longer", "twice", "flipped", "foreign"],
    )
    async def test_altered_index_is_damage(
        self, store: MemoryStore, reference: IndexReference, damage: Callable[[bytes], bytes]
    ) -> None:
        data = await get_bytes(store, reference.key)
        await store.put(reference.key, BytesBody(damage(data)))
        with pytest.raises(DamagedError) as raised:
            await read_index(store, reference)
        assert raised.value.subject == reference.key

    async def test_valid_index_that_is_another_one_is_damage(
        self, store: MemoryStore, reference: IndexReference
    ) -> None:
        await store.put(reference.key, BytesBody(encode_index(snapshot(2))))
        with pytest.raises(DamagedError, match="cut short or altered"):
            await read_index(store, reference)

    async def test_missing_index_is_damage_with_its_cause(self, store: MemoryStore, reference: IndexReference) -> None:
        await store.delete([reference.key])
        with pytest.raises(DamagedError) as raised:
            await read_index(store, reference)
        assert isinstance(raised.value.__cause__, BlobNotFoundError)

    async def test_reference_of_an_absurd_size_is_not_fetched(
        self, store: MemoryStore, reference: IndexReference
    ) -> None:
        watched = InterposedStore(store)
        with pytest.raises(DamagedError, match="is said to have"):
            await read_index(watched, msgspec.structs.replace(reference, size_bytes=1 << 40))
        assert watched.requests == []

    @pytest.mark.parametrize("error", [StoreUnavailableError, AccessDeniedError])
    async def test_what_the_store_says_of_itself_is_no_damage(
        self, store: MemoryStore, reference: IndexReference, error: type[Exception]
    ) -> None:
        failing = InterposedStore(store)
        failing.fail("get", reference.key, error("no", operation="get", key=reference.key))  # type: ignore[call-arg]
        with pytest.raises(error):
            await read_index(failing, reference)

    async def test_right_bytes_of_an_unknown_format_are_no_damage(self, store: MemoryStore) -> None:
        key = upload_key(INDEXES, SCOPE, session(5), 0)
        data = b"TIDEMARKI\x63" + bytes(60)
        await store.put(key, BytesBody(data))
        reference = IndexReference(key=key, sha256=hashlib.sha256(data).digest(), size_bytes=len(data))
        with pytest.raises(FormatError):
            await read_index(store, reference)


@pytest.mark.parametrize(
    "whole_bytes, delta_bytes, pays",
    [
        (256 * 1024, 10, False),
        (256 * 1024 + 1, 10, True),
        (1_000_000, 249_999, True),
        (1_000_000, 250_000, False),
        (1_000_000, 2_000_000, False),
    ],
)
def test_delta_pays_for_a_large_index_of_which_it_is_less_than_a_quarter(
    whole_bytes: int, delta_bytes: int, pays: bool
) -> None:
    assert delta_pays(whole_bytes=whole_bytes, delta_bytes=delta_bytes) == pays


class TestDeltas:
    @pytest.fixture(autouse=True)
    def _small_is_less_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(index_io, "WHOLE_BYTES_MAX", 16 * 1024)

    async def test_small_index_is_stored_whole(self, store: MemoryStore) -> None:
        written = await chain_of(store, 2, files=20)
        assert [stored.depth for stored in written] == [0, 0]

    async def test_large_index_with_few_changes_is_stored_as_a_delta_up_to_the_longest_chain(
        self, store: MemoryStore
    ) -> None:
        written = await chain_of(store, 19)
        assert [stored.depth for stored in written] == [*range(17), 0, 1]
        sizes = [stored.chain[0].size_bytes for stored in written]
        assert max(sizes[1:17]) < 1000
        assert sizes[0] > 16 * 1024
        for stored in written:
            assert await read_stored_snapshot(store, stored.chain[0]) == stored

    async def test_whole_of_an_index_that_would_be_large_is_checked_and_not_made(
        self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (first,) = await chain_of(store, 1)
        made: list[type] = []

        def watched(index: StoredIndex, base: SnapshotIndex | None = None) -> bytes:
            made.append(type(index))
            return encode_index(index, base)

        monkeypatch.setattr(index_io, "encode_index", watched)
        index = snapshot(2, 400, changed=1, before=first.index)
        stored, _ = await write_index(store, index, scope=SCOPE, ttl_ms=TTL_MS, base=first)
        assert made == [IndexDelta]
        assert stored.depth == 1
        # Of a blob that is not a pack, not its beginning: no file that is new shows it, nor a delta.
        files = index.dir.files_present
        torn = msgspec.structs.replace(
            files[9], blobs=(msgspec.structs.replace(files[9].blobs[0], blob_offset_bytes=1),)
        )
        bad = msgspec.structs.replace(index, dir=DirIndex("", (*files[:9], torn, *files[10:]), (), (files[9],)))
        with pytest.raises(IndexInvariantError, match="M9"):
            await write_index(store, bad, scope=SCOPE, ttl_ms=TTL_MS, base=first, counter=1)

    async def test_a_store_that_has_shrunk_gets_a_whole_index_again(self, store: MemoryStore) -> None:
        (large,) = await chain_of(store, 1, files=2000)
        small = snapshot(2, 40, before=large.index)
        # The files that are gone make the whole one large once more.
        shrunk = msgspec.structs.replace(
            small, dir=msgspec.structs.replace(small.dir, files_removed=large.index.dir.files_present[40:])
        )
        stored, _ = await write_index(store, shrunk, scope=SCOPE, ttl_ms=TTL_MS, base=large)
        index = snapshot(3, 40, changed=1, before=stored.index)
        newest, _ = await write_index(store, index, scope=SCOPE, ttl_ms=TTL_MS, base=stored)
        assert newest.depth == 0
        grown = snapshot(3, 2000, before=stored.index)
        newest, _ = await write_index(store, grown, scope=SCOPE, ttl_ms=TTL_MS, base=stored, counter=1)
        assert newest.depth == 0

    async def test_an_index_that_is_too_large_whole_is_refused_before_its_chain_is_full(
        self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (first,) = await chain_of(store, 1, files=600)
        index = snapshot(2, 601, changed=1, before=first.index)
        monkeypatch.setattr(index_io, "INDEX_BYTES_MAX", first.chain[0].size_bytes)
        monkeypatch.setattr(codec, "INDEX_BYTES_MAX", first.chain[0].size_bytes)
        with pytest.raises(IndexInvariantError, match="F4"):
            await write_index(store, index, scope=SCOPE, ttl_ms=TTL_MS, base=first)

    async def test_large_index_with_many_changes_is_stored_whole(self, store: MemoryStore) -> None:
        (first,) = await chain_of(store, 1)
        index = snapshot(2, 400, changed=200, before=first.index)
        stored, _ = await write_index(store, index, scope=SCOPE, ttl_ms=TTL_MS, base=first)
        assert stored.depth == 0

    async def test_index_that_does_not_follow_from_its_base_alone_is_stored_whole(self, store: MemoryStore) -> None:
        (first,) = await chain_of(store, 1)
        index = snapshot(2, 400, changed=1, before=first.index)
        forgetful = msgspec.structs.replace(index, dir=DirIndex("", index.dir.files_present))
        stored, _ = await write_index(store, forgetful, scope=SCOPE, ttl_ms=TTL_MS, base=first)
        assert stored.depth == 0
        assert await read_index(store, stored.chain[0]) == forgetful

    async def test_reading_takes_one_request_per_link(self, store: MemoryStore) -> None:
        written = await chain_of(store, 4)
        watched = InterposedStore(store)
        await read_index(watched, written[-1].chain[0])
        assert watched.requests == [("get", reference.key) for reference in written[-1].chain]

    @pytest.mark.parametrize("link", [0, 1, 2])
    async def test_damage_anywhere_in_the_chain_is_damage(self, store: MemoryStore, link: int) -> None:
        written = await chain_of(store, 3)
        key = written[-1].chain[link].key
        await store.delete([key])
        with pytest.raises(DamagedError) as raised:
            await read_index(store, written[-1].chain[0])
        assert raised.value.subject == key

    async def forged(self, store: MemoryStore, delta: IndexDelta, counter: int) -> IndexReference:
        data = encode_index(delta)
        key = upload_key(INDEXES, SCOPE, session(99), counter)
        await store.put(key, BytesBody(data))
        return IndexReference(key=key, sha256=hashlib.sha256(data).digest(), size_bytes=len(data))

    @pytest.mark.parametrize("depth", [2, 16])
    async def test_delta_that_lies_about_its_depth_is_damage(self, store: MemoryStore, depth: int) -> None:
        (first,) = await chain_of(store, 1, files=3)
        delta = make_delta(first.index, first.chain[0], 0, snapshot(2, before=first.index, changed=1))
        reference = await self.forged(store, msgspec.structs.replace(delta, depth=depth), 0)
        with pytest.raises(DamagedError, match="chain of deltas is broken"):
            await read_index(store, reference)

    async def test_chain_of_deltas_that_never_get_lower_ends(self, store: MemoryStore) -> None:
        (first,) = await chain_of(store, 1, files=3)
        delta = make_delta(first.index, first.chain[0], 0, snapshot(2, before=first.index, changed=1))
        reference = await self.forged(store, delta, 0)
        for counter in range(1, 40):
            looped = msgspec.structs.replace(delta, base=reference, depth=1)
            reference = await self.forged(store, looped, counter)
        watched = InterposedStore(store)
        with pytest.raises(DamagedError, match="chain of deltas is broken"):
            await read_index(watched, reference)
        assert len(watched.requests) == 2

    async def test_delta_on_another_index_is_damage(self, store: MemoryStore) -> None:
        (first,) = await chain_of(store, 1, files=3)
        other, _ = await write_index(store, snapshot(7), scope=SCOPE, ttl_ms=TTL_MS, base=None)
        delta = make_delta(first.index, first.chain[0], 0, snapshot(2, before=first.index, changed=1))
        reference = await self.forged(store, msgspec.structs.replace(delta, base=other.chain[0]), 0)
        with pytest.raises(DamagedError, match="chain of deltas is broken"):
            await read_index(store, reference)


async def test_index_that_breaks_an_invariant_is_not_written(store: MemoryStore) -> None:
    index = snapshot(1)
    twice = DirIndex("", (index.dir.files_present[0],) * 2)
    with pytest.raises(IndexInvariantError):
        await write_index(store, msgspec.structs.replace(index, dir=twice), scope=SCOPE, ttl_ms=TTL_MS, base=None)
    assert (await store.list_page("")).blobs == ()


def stored(index: SnapshotIndex) -> StoredSnapshot:
    key = upload_key(INDEXES, SCOPE, index.session, 0)
    return StoredSnapshot(index=index, chain=(IndexReference(key=key, sha256=b"", size_bytes=1),))


@pytest.mark.parametrize("weight_max, kept", [(0, 2), (11, 2), (12, 3), (99, 3)])
def test_cache_of_indexes_keeps_the_newest_and_distinguishes_same_keys(
    monkeypatch: pytest.MonkeyPatch, weight_max: int, kept: int
) -> None:
    """Each has three files in a directory."""
    monkeypatch.setattr(index_io, "CACHED_MAX", 2)
    monkeypatch.setattr(index_io, "CACHED_WEIGHT_MAX", weight_max)
    cache = IndexCache()
    offered = [stored(snapshot(v)) for v in (1, 2, 3)]
    for one in offered:
        cache.keep(one)
    assert [cache.find(one.chain[0]) for one in offered] == [*[None] * (3 - kept), *offered[3 - kept :]]
    assert cache.find(msgspec.structs.replace(offered[2].chain[0], sha256=b"x")) is None


FILES = snapshot(9).dir.files_present


@pytest.mark.parametrize(
    "root, weight",
    [
        (DirIndex("", FILES), 4),
        (DirIndex("", FILES[:1], (), FILES[1:]), 4),
        (DirIndex("", (), (DirIndex("a", FILES[:2]),), (), (DirIndex("b", FILES[2:]),)), 6),
        (DirIndex("", (msgspec.structs.replace(FILES[0], blobs=(), inline=bytes(10 * 256)),)), 12),
        (DirIndex("", (msgspec.structs.replace(FILES[0], blobs=FILES[0].blobs * 10),)), 11),
    ],
    ids=["present", "removed", "below", "inline", "blobs"],
)
def test_cache_of_indexes_weighs_all_that_they_hold(
    monkeypatch: pytest.MonkeyPatch, root: DirIndex, weight: int
) -> None:
    """A light one stays beside a heavy one that just fits, however often that is offered."""
    monkeypatch.setattr(index_io, "CACHED_MAX", 1)
    light, heavy = stored(snapshot(1)), stored(msgspec.structs.replace(snapshot(2), dir=root))
    for slack, stays in ((0, True), (-1, False)):
        monkeypatch.setattr(index_io, "CACHED_WEIGHT_MAX", 4 + weight + slack)
        cache = IndexCache()
        for one in (light, heavy, heavy):
            cache.keep(one)
        assert (cache.find(light.chain[0]) is not None, cache.find(heavy.chain[0])) == (stays, heavy)


def test_stored_form_of_a_delta_says_that_it_is_one() -> None:
    first = snapshot(1)
    reference = IndexReference(key=upload_key(INDEXES, SCOPE, session(1), 0), sha256=b"0" * 32, size_bytes=1)
    delta = make_delta(first, reference, 0, snapshot(2, before=first, changed=1))
    assert decode_index(encode_index(delta), subject="") == delta
