"""A repository of millions of blobs whose garbage is known by construction, and stores that count.

The records and the snapshot indexes are real ones, written by the project's own codec. The blobs are rows: anyone who
lists them is given pages of these rows, and deletes are counted. Each store keeps in each snapshot the blobs of
the snapshot before, so that every blob is referred to twice.
"""

import functools
import hashlib
import multiprocessing
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from typing_extensions import override

from blobstore.base import LIST_PAGE_MAX, BlobInfo, BytesBody, DeleteFailure, ListPage
from blobstore.local.store import LocalStore
from blobstore.opening import open_store
from blobstore.wrappers.forwarding import ForwardingStore
from engine.blocking import LoopThread
from engine.repository.repository import Repository, SyncRepository
from engine.spark.access import Access
from index.snapshot.codec import encode_index, encode_record
from index.snapshot.keys import BLOBS, INDEXES, SHARDS_COUNT, commit_key, shard_prefixes, upload_key
from index.snapshot.model import (
    NEVER_MS,
    BlobKey,
    CommitPointer,
    CommitRecord,
    DirIndex,
    FileBlob,
    FileIndex,
    FileMetadata,
    IndexReference,
    RepositoryRecord,
    Scope,
    SnapshotIndex,
    SnapshotMetadata,
    StoreReference,
    UniqueId,
    WriteId,
)

JOBS = 20
STORES = 10
COMMITS = 100
SNAPSHOTS = JOBS * STORES * COMMITS
KEEP_LAST = 90
# What the first commits that are kept retain goes on living.
DEAD_COMMITS = COMMITS - KEEP_LAST - 1
BLOB_BYTES = 8_000_000
DAY_MS = 86_400_000
TTL_MS = 14 * DAY_MS
# Of everything but what waits.
AGE_MS = 30 * DAY_MS
# In parts of all blobs: never committed, and their TTL is over, or running.
EXPIRED_SHARE = 0.01
WAITING_SHARE = 0.01

ROW = np.dtype([("key", "S43"), ("size_bytes", "<i8"), ("created_at_ms", "<i8")])
PROCESSES = 2


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """Uploads, their bytes, and the sum of their keys' digests."""

    count: int = 0
    size_bytes: int = 0
    digest: int = 0

    def __add__(self, other: "Truth") -> "Truth":
        return Truth(
            count=self.count + other.count,
            size_bytes=self.size_bytes + other.size_bytes,
            digest=(self.digest + other.digest) % 2**64,
        )

    @classmethod
    def of(cls, keys: Sequence[bytes], size_bytes: int = 0) -> "Truth":
        """Return the truth of keys whose objects have `size_bytes` each."""
        digests = (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") for key in keys)
        return cls(count=len(keys), size_bytes=size_bytes * len(keys), digest=sum(digests) % 2**64)


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What was built."""

    root: str
    record: RepositoryRecord
    now_ms: int
    blobs: int
    index_bytes: int
    # Blobs to delete, blobs that wait, indexes to delete.
    dead_blobs: Truth
    waiting_blobs: Truth
    dead_indexes: Truth


class CountingStores(ForwardingStore):
    """Lists blobs from rows and counts deletes; everything else is the real store's."""

    def __init__(self, root: Path) -> None:
        super().__init__(open_store(f"file://{root / 'store'}"))
        self._root = root
        self._shard: tuple[str, np.ndarray, np.ndarray] | None = None

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        if not prefix.startswith(BLOBS):
            real = await super().list_page(prefix, start_after=start_after, limit=limit)
            # The indexes were written just now, and are to be as old as the blobs.
            aged = tuple(replace(blob, created_at_ms=blob.created_at_ms - AGE_MS) for blob in real.blobs)
            return ListPage(blobs=aged, truncated=real.truncated)
        _, rows, keys = self._rows(prefix)
        first = int(np.searchsorted(keys, start_after.encode(), side="right"))
        page = rows[first : first + limit].tolist()
        blobs = tuple(
            BlobInfo(key=key.decode(), size_bytes=size_bytes, created_at_ms=created_at_ms)
            for key, size_bytes, created_at_ms in page
        )
        return ListPage(blobs=blobs, truncated=first + limit < len(rows))

    @override
    async def delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        for prefix in (BLOBS, INDEXES):
            counted = [key.encode() for key in keys if key.startswith(prefix)]
            if counted:
                line = msgspec.json.encode(Truth.of(counted)) + b"\n"
                with (self._root / f"deleted-{prefix.rstrip('/')}-{os.getpid()}").open("ab") as shown:
                    shown.write(line)
        rest = [key for key in keys if not key.startswith((BLOBS, INDEXES))]
        return await super().delete(rest) if rest else ()

    def _rows(self, prefix: str) -> tuple[str, np.ndarray, np.ndarray]:
        if self._shard is None or self._shard[0] != prefix:
            rows = np.fromfile(self._root / "rows" / prefix.split("/")[1], dtype=ROW)
            self._shard = prefix, rows, np.ascontiguousarray(rows["key"])
        return self._shard


class CountingAccess(Access, frozen=True, kw_only=True):
    """What a task opens: the stores."""

    root: str

    @override
    def open(self) -> SyncRepository:
        return SyncRepository(
            LoopThread(), Repository(CountingStores(Path(self.root)), self.record, settings=self.transfer)
        )


def deleted(root: Path, prefix: str) -> Truth:
    """What was deleted below a prefix through all stores."""
    shown = Truth()
    for path in root.glob(f"deleted-{prefix.rstrip('/')}-*"):
        for line in path.read_bytes().splitlines():
            shown += msgspec.json.decode(line, type=Truth)
    return shown


def build(root: Path, blobs: int) -> World:
    """Build a world in an empty directory."""
    loop = LoopThread()
    with SyncRepository.init(f"file://{root / 'store'}", ttl_ms=TTL_MS) as repository:
        record = repository.record
        now_ms = repository.loop.run(repository.asynchronous.store.now_ms())
    loop.stop()
    build_job = functools.partial(_build_job, root, blobs, now_ms)
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        jobs = pool.map(build_job, range(JOBS), chunksize=1)
        pool.map(functools.partial(_join_rows, root), range(SHARDS_COUNT))
    world = World(
        root=str(root),
        record=record,
        now_ms=now_ms,
        blobs=sum(job.blobs for job in jobs),
        index_bytes=sum(job.index_bytes for job in jobs),
        dead_blobs=sum((job.dead_blobs for job in jobs), Truth()),
        waiting_blobs=sum((job.waiting_blobs for job in jobs), Truth()),
        dead_indexes=sum((job.dead_indexes for job in jobs), Truth()),
    )
    (root / "world").write_bytes(msgspec.msgpack.encode(world))
    return world


def load(root: Path) -> World:
    """The world that is in a directory."""
    return msgspec.msgpack.decode((root / "world").read_bytes(), type=World)


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    blobs: int
    index_bytes: int
    dead_blobs: Truth
    waiting_blobs: Truth
    dead_indexes: Truth


def _session(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=10).hexdigest()


def _build_job(root: Path, blobs: int, now_ms: int, job: int) -> _Job:
    """One job's records, indexes and rows."""
    store = LoopThread()
    local = LocalStore(root / "store")
    scope = Scope(f"job-{job:02d}")
    each = int(blobs * (1 - EXPIRED_SHARE - WAITING_SHARE)) // SNAPSHOTS
    sessions: list[tuple[str, int, int]] = []
    references: list[list[StoreReference]] = [[] for _ in range(COMMITS)]
    dead_blobs, waiting_blobs, dead_indexes, index_bytes = Truth(), Truth(), Truth(), 0
    for number_of_store in range(STORES):
        before: list[FileIndex] = []
        for commit in range(COMMITS):
            session = _session(job, number_of_store, commit)
            keys = [upload_key(BLOBS, scope, session, counter) for counter in range(1, each + 1)]
            files = [_file(key, commit * each + number) for number, key in enumerate(keys)]
            sessions.append((session, each, now_ms - AGE_MS))
            if commit < DEAD_COMMITS:
                dead_blobs += Truth.of([key.encode() for key in keys], BLOB_BYTES)
            data = encode_index(_index(job, number_of_store, commit, session, (*before, *files)))
            before = files
            key = upload_key(INDEXES, scope, session, 0)
            store.run(local.put(key, BytesBody(data)))
            index_bytes += len(data)
            if commit <= DEAD_COMMITS:
                dead_indexes += Truth.of([key.encode()], len(data))
            references[commit].append(_reference(number_of_store, commit, key, data, each))
    for commit, stores in enumerate(references):
        store.run(local.put(commit_key(scope, commit + 1), BytesBody(encode_record(_record(scope, commit, stores)))))
    for name, share, created_at_ms in (("expired", EXPIRED_SHARE, now_ms - AGE_MS), ("waiting", WAITING_SHARE, now_ms)):
        session, count = _session(job, name), int(blobs * share) // JOBS
        sessions.append((session, count, created_at_ms))
        found = Truth.of(
            [upload_key(BLOBS, scope, session, counter).encode() for counter in range(1, count + 1)], BLOB_BYTES
        )
        if name == "expired":
            dead_blobs += found
        else:
            waiting_blobs += found
    store.run(local.close())
    store.stop()
    _write_rows(root, scope, sessions)
    return _Job(
        blobs=sum(count for _, count, _ in sessions),
        index_bytes=index_bytes,
        dead_blobs=dead_blobs,
        waiting_blobs=waiting_blobs,
        dead_indexes=dead_indexes,
    )


def _write_rows(root: Path, scope: Scope, sessions: list[tuple[str, int, int]]) -> None:
    """What a list reports of the blobs of a job, by shards."""
    prefixes = [f"{prefix}{scope}/" for prefix in shard_prefixes(BLOBS)]
    by_shard: list[list[tuple[bytes, int, int]]] = [[] for _ in prefixes]
    for session, count, created_at_ms in sorted(sessions):
        for counter in range(1, count + 1):
            tail = f"{session}-{counter:06x}"
            shard = zlib.crc32(tail.encode()) & 0xFF
            row = ((prefixes[shard] + tail).encode(), BLOB_BYTES, created_at_ms)
            by_shard[shard].append(row)
    for shard, rows in enumerate(by_shard):
        directory = root / "parts" / f"{shard:02x}"
        directory.mkdir(parents=True, exist_ok=True)
        np.array(rows, dtype=ROW).tofile(directory / str(scope))


def _join_rows(root: Path, shard: int) -> None:
    directory = root / "parts" / f"{shard:02x}"
    (root / "rows").mkdir(exist_ok=True)
    with (root / "rows" / f"{shard:02x}").open("wb") as joined:
        for part in sorted(directory.iterdir()):
            joined.write(part.read_bytes())
            part.unlink()


def _file(key: BlobKey, number: int) -> FileIndex:
    digest = hashlib.blake2b(key.encode(), digest_size=32).digest()
    return FileIndex(
        f"{number:06d}.sst",
        FileMetadata(BLOB_BYTES, 0o644, 1_700_000_000_000_000_000 + number * 1_234_567),
        digest,
        int.from_bytes(digest[:4], "little"),
        (FileBlob(key, 0, 0, BLOB_BYTES),),
    )


def _index(job: int, store: int, commit: int, session: str, files: Sequence[FileIndex]) -> SnapshotIndex:
    return SnapshotIndex(
        metadata=SnapshotMetadata(
            job=f"job-{job:02d}", task=str(store), store="state", version=commit + 1, unique_id=_unique_id(session)
        ),
        session=session,
        dir=DirIndex("", tuple(files)),
    )


def _reference(store: int, commit: int, key: BlobKey, data: bytes, each: int) -> StoreReference:
    files = each * min(2, commit + 1)
    return StoreReference(
        task=str(store),
        store="state",
        version=commit + 1,
        unique_id=_unique_id(key.rpartition("/")[2]),
        index=IndexReference(key=key, sha256=hashlib.sha256(data).digest(), size_bytes=len(data)),
        number=commit + 1,
        files_count=files,
        size_bytes=files * BLOB_BYTES,
    )


def _record(scope: Scope, commit: int, stores: Sequence[StoreReference]) -> CommitRecord:
    write_id = WriteId(hashlib.blake2b(f"{scope} {commit}".encode(), digest_size=16).hexdigest())
    before = WriteId(hashlib.blake2b(f"{scope} {commit - 1}".encode(), digest_size=16).hexdigest())
    return CommitRecord(
        scope=scope,
        number=commit + 1,
        write_id=write_id,
        predecessor=CommitPointer(commit, before) if commit else None,
        version=commit + 1,
        stores=tuple(sorted(stores, key=lambda s: (s.task, s.store))),
        valid_until_ms=NEVER_MS,
    )


def _unique_id(session: str) -> UniqueId:
    d = hashlib.blake2b(session.encode(), digest_size=16).hexdigest()
    return UniqueId(f"{d[:8]}-{d[8:12]}-{d[12:16]}-{d[16:20]}-{d[20:]}")
