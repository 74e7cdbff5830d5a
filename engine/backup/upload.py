"""Carrying out a backup plan: every planned file read, hashed and put, in parallel within the limits.

`FileRunBody` is a run of bytes of a file that was scanned, on its way into a store: hashed whenever it is read.
"""

import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from blobstore.base import BlobStore, Body, Created, RequestMetadata
from blobstore.concurrency import run_all, run_blocking
from blobstore.local.files import LocalFile as OpenFile
from blobstore.local.files import open_to_read
from engine.errors import UnsafeSourceError
from engine.local.cache import DigestCache
from engine.local.hashing import ContentHasher, Digest, FileHasher, hash_bytes
from engine.local.identify import parse_sst
from engine.local.scan import READ_FLAGS, changed_error, check_unchanged, is_still, refusing, unreadable_error
from engine.local.transfer import ByteBudget, PartsBody, SourceDir, put_new
from engine.progress import Progress
from engine.settings import TransferSettings
from index.plan.backup import BackupPlan, PlannedBlobs, PlannedFile, PlannedPack
from index.snapshot.dir_diff import LocalFile
from index.snapshot.keys import BLOBS, upload_key
from index.snapshot.model import BlobKey, FileBlob, FileIndex, FilePath, Pack, Scope, SstIdentity


class UploadSession(msgspec.Struct, frozen=True, kw_only=True):
    """Whose uploads these are: every key carries scope and session, every blob the TTL (design 0002, K2 and C5)."""

    scope: Scope
    task: str
    store_name: str
    session: str
    ttl_ms: int
    # Limits of memory and parallelism.
    settings: TransferSettings

    def key(self, counter: int) -> BlobKey:
        """Return the key of one of its blobs."""
        return upload_key(BLOBS, self.scope, self.session, counter)

    def metadata(self, payload: str, size_bytes: int) -> RequestMetadata:
        """Describe one of its requests for the store."""
        return RequestMetadata(
            job=self.scope.job, task=self.task, store=self.store_name, payload_path=payload, size_bytes=size_bytes
        )


class Uploaded(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a plan."""

    # The new entry of every planned file.
    files: dict[FilePath, FileIndex]
    packs: tuple[Pack, ...]
    # Every new blob, in the order of the plan.
    keys: tuple[BlobKey, ...]
    # When the store created the first of them; None if there are none.
    oldest_birth_ms: int | None


class FileRunBody:
    """A `Body`: a run of bytes of a file that was scanned, hashed while it is read.

    Attributes:
        digest: The hashes of the run, once it has been read to its end. The CRC32 is that of a whole file: of any other
            run nobody asks it, and it is 0.
    """

    def __init__(
        self,
        source: SourceDir,
        path: FilePath,
        file: LocalFile,
        *,
        start: int,
        size_bytes: int,
        chunk_bytes: int,
    ) -> None:
        self._path = source.path.joinpath(*path)
        self._name = "/".join(path)
        self._source = source
        self._file = file
        self._start = start
        self._size_bytes = size_bytes
        self._chunk_bytes = chunk_bytes
        self.digest: Digest | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the run."""
        return self._size_bytes

    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the run.

        Raises:
            UnsafeSourceError: The file is no longer what was scanned, at the start or at the end (design 0002, I3); or
                what was read before had other bytes.
        """
        is_whole = self._size_bytes == self._file.metadata.size_bytes
        # A CRC32 takes longer than BLAKE3, and adds nothing for bytes that were read before.
        hasher = FileHasher() if is_whole and self.digest is None else ContentHasher()
        with refusing(self._path):
            async with open_to_read(self._name, dir_fd=self._source.descriptor) as source:
                check_unchanged(self._path, self._file, await source.stat())
                while hasher.size_bytes < self._size_bytes:
                    left = self._size_bytes - hasher.size_bytes
                    at = self._start + hasher.size_bytes
                    chunk = await run_blocking(_read_hashed, source, at, min(left, self._chunk_bytes), hasher)
                    if not chunk:
                        raise changed_error(self._path)
                    if hasher.size_bytes == self._size_bytes:
                        # Before the last chunk is handed out: a store that has all it asked for comes for no more.
                        check_unchanged(self._path, self._file, await source.stat())
                        self._note(hasher)
                    yield chunk

    async def read_digest(self) -> Digest:
        """Return the hashes of the run; read it now if no store has read it to its end.

        Raises:
            UnsafeSourceError: As `read_chunks`.
        """
        if self.digest is None:
            async with aclosing(self.read_chunks()) as chunks:
                async for _ in chunks:
                    pass
        if self.digest is None:
            raise changed_error(self._path)
        return self.digest

    def _note(self, hasher: ContentHasher) -> None:
        """Keep the hashes of the first reading; refuse another one that had other bytes."""
        if self.digest is None:
            self.digest = Digest(hasher.blake3, hasher.digest.crc32 if isinstance(hasher, FileHasher) else 0)
        elif hasher.blake3 != self.digest.blake3:
            raise read_twice_error(str(self._path))


def read_twice_error(path: str) -> UnsafeSourceError:
    """Make the error for a file of which two readings do not agree."""
    return UnsafeSourceError(
        "was read twice and did not have the same bytes, though its stat says that it has not changed",
        operation="backup",
        subject=path,
        hint="see that the disk, the memory and the file system are well",
    )


def _read_hashed(source: OpenFile, at: int, size_bytes: int, hasher: ContentHasher) -> bytes:
    chunk = os.pread(source.descriptor, size_bytes, at)
    hasher.update(chunk)
    return chunk


class _Run(msgspec.Struct, frozen=True):
    """One blob of a file."""

    item: PlannedBlobs
    position: int
    start: int
    size_bytes: int


class _WholeFile(msgspec.Struct, frozen=True):
    """A file of several blobs, to be hashed as a whole while they are sent: BLAKE3 of parts cannot be joined."""

    item: PlannedBlobs


class _Inline(msgspec.Struct, frozen=True):
    """All files that go into the index."""

    items: tuple[PlannedFile, ...]


_Job = _Run | _WholeFile | _Inline | PlannedPack


class Uploader:
    """One upload of one plan."""

    def __init__(
        self,
        store: BlobStore,
        session: UploadSession,
        source: SourceDir,
        *,
        ssts: Mapping[FilePath, SstIdentity],
        cache: DigestCache,
        looked_at_ns: int,
        progress: Progress,
    ) -> None:
        """Prepare an upload.

        Args:
            store: Where to.
            session: Whose keys, and the limits.
            source: Where from, entered.
            ssts: The identities of those files in blobs of their own that have one; small files are asked here.
            cache: Records the hashes that were taken.
            looked_at_ns: As `engine.local.scan.file_system_now_ns` said, after the scan.
            progress: Receives files and bytes.
        """
        self._store = store
        self._session = session
        self._source = source
        self._settings = session.settings
        self._ssts = ssts
        self._cache = cache
        self._looked_at_ns = looked_at_ns
        self._progress = progress
        self._budget = ByteBudget(session.settings.memory_bytes_max)
        self._files: dict[FilePath, FileIndex] = {}
        self._created_ms: list[int] = []
        # The hashes of files in blobs of their own by their first number, and of each run of those that were cut.
        self._whole: dict[int, Digest] = {}
        self._run_hashes: dict[BlobKey, bytes] = {}
        # The hashes of the runs of those files as the reading of the whole file had them, by its first number.
        self._runs_read_again: dict[int, list[bytes]] = {}

    async def upload(self, plan: BackupPlan) -> Uploaded:
        """Send everything.

        Requests: one PUT per pack and blob of the plan, and nothing else unless an answer was lost.

        Raises:
            UnsafeSourceError: A file is not what was scanned, or not what the previous snapshot says (I3).
            StoreError: As the store says; the others are cancelled.
            DamagedError: A key that is ours alone was taken.
        """
        self._progress.total(files=plan.files_count, bytes_=plan.upload_bytes + plan.inline_bytes)
        nothing = hash_bytes(b"")
        for empty in plan.empty:
            self._enter(empty, nothing, None)
        self._progress.add(files=len(plan.empty))
        await run_all(self._carry_out, _jobs(plan), in_flight_max=self._settings.in_flight_max)
        for planned in plan.blobs:
            self._check_runs(planned)
            sst = self._ssts.get(planned.file.path)
            self._enter(planned.file, self._whole[planned.counter], sst, blobs=tuple(self._blobs_of(planned)))
        return Uploaded(
            files=self._files,
            packs=tuple(Pack(self._session.key(pack.counter), pack.size_bytes) for pack in plan.packs),
            keys=tuple(self._session.key(counter) for counter in range(plan.uploads_count)),
            oldest_birth_ms=min(self._created_ms, default=None),
        )

    async def _carry_out(self, job: _Job) -> None:
        match job:
            case PlannedPack():
                await self._put_pack(job)
            case _Run():
                await self._put_run(job)
            case _WholeFile(item=planned):
                await self._hash_whole(planned)
            case _Inline(items=items):
                read = await run_blocking(_read_files, self._source, items)
                for item, one in zip(items, read, strict=True):
                    self._enter(item, one.digest, one.sst, inline=one.data)
                self._progress.add(files=len(items), bytes_=sum(item.size_bytes for item in items))

    async def _put_pack(self, pack: PlannedPack) -> None:
        key = self._session.key(pack.counter)
        async with self._budget.hold(pack.size_bytes):
            read = await run_blocking(_read_files, self._source, pack.files)
            body = PartsBody([one.data for one in read], self._settings.chunk_bytes)
            await self._put(key, body, f"pack of {len(read)} files")
        offset = 0
        for item, one in zip(pack.files, read, strict=True):
            self._enter(item, one.digest, one.sst, blobs=(FileBlob(key, 0, offset, item.size_bytes),))
            offset += item.size_bytes
        self._progress.add(files=len(pack.files), bytes_=pack.size_bytes)

    async def _put_run(self, run: _Run) -> None:
        key = self._session.key(run.item.counter + run.position)
        body = self._body(run.item.file, run.start, run.size_bytes)
        async with self._budget.hold(2 * self._settings.chunk_bytes):
            await self._put(key, body, "/".join(run.item.file.path))
            digest = await body.read_digest()
        if run.size_bytes == run.item.file.size_bytes:
            self._whole[run.item.counter] = digest
        else:
            self._run_hashes[key] = digest.blake3
        self._progress.add(files=1 if run.position == 0 else 0, bytes_=run.size_bytes)

    async def _hash_whole(self, planned: PlannedBlobs) -> None:
        """Hash a file of several blobs as a whole, and its runs once more: what is sent is another reading."""
        body = self._body(planned.file, 0, planned.file.size_bytes)
        runs = _RunHasher([size_bytes for _, size_bytes in planned.runs])
        async with self._budget.hold(2 * self._settings.chunk_bytes), aclosing(body.read_chunks()) as chunks:
            async for chunk in chunks:
                await run_blocking(runs.update, chunk)
            self._whole[planned.counter] = await body.read_digest()
        self._runs_read_again[planned.counter] = runs.hashes

    def _check_runs(self, planned: PlannedBlobs) -> None:
        """Refuse a file of several blobs of which the whole hash is not of the bytes that were sent."""
        runs_count = len(planned.runs)
        if runs_count == 1:
            return
        sent = [self._run_hashes[self._session.key(planned.counter + i)] for i in range(runs_count)]
        if self._runs_read_again.get(planned.counter) != sent:
            raise read_twice_error(str(self._source.path.joinpath(*planned.file.path)))

    async def _put(self, key: BlobKey, body: Body, payload: str) -> None:
        store = self._store.tagged(self._session.metadata(payload, body.size_bytes))
        created: Created = await put_new(store, key, body, ttl_ms=self._session.ttl_ms)
        self._created_ms.append(created.created_at_ms)

    def _body(self, item: PlannedFile, start: int, size_bytes: int) -> FileRunBody:
        chunk_bytes = self._settings.chunk_bytes
        return FileRunBody(
            self._source, item.path, item.file, start=start, size_bytes=size_bytes, chunk_bytes=chunk_bytes
        )

    def _blobs_of(self, planned: PlannedBlobs) -> Iterator[FileBlob]:
        for position, (start, size_bytes) in enumerate(planned.runs):
            key = self._session.key(planned.counter + position)
            # The hash of a file's only blob is the file's.
            yield FileBlob(key, start, 0, size_bytes, self._run_hashes.get(key, b""))

    def _enter(
        self,
        item: PlannedFile,
        digest: Digest,
        sst: SstIdentity | None,
        *,
        blobs: tuple[FileBlob, ...] = (),
        inline: bytes | None = None,
    ) -> None:
        """Make the entry of a file, once its bytes are known to be the ones that were meant."""
        if item.expected is not None and item.expected.blake3 != digest.blake3:
            raise UnsafeSourceError(
                "does not have the bytes that the previous snapshot holds of it, though it claims to be that file",
                operation="backup",
                subject=str(self._source.path.joinpath(*item.path)),
                hint="the file is damaged or was exchanged: bring back the last commit (`tidemark restore --replace`, "
                "without --trust-stat), or back up without a base",
            )
        file = msgspec.structs.replace(item.file, blake3=digest.blake3, crc32=digest.crc32, sst=sst or item.file.sst)
        self._cache.record(file, looked_at_ns=self._looked_at_ns, sst_read=sst is not None)
        if item.expected is not None:
            sst = item.expected.sst
        self._files[item.path] = FileIndex(file.name, file.metadata, digest.blake3, digest.crc32, blobs, inline, sst)


class _RunHasher:
    """The hash of each run of a file whose bytes stream by from its start."""

    def __init__(self, sizes_bytes: Sequence[int]) -> None:
        self._sizes_bytes = sizes_bytes
        self._hasher = ContentHasher()
        self.hashes: list[bytes] = []

    def update(self, data: bytes) -> None:
        """Add the next bytes; blocks."""
        left = memoryview(data)
        while left:
            missing_bytes = self._sizes_bytes[len(self.hashes)] - self._hasher.size_bytes
            self._hasher.update(left[:missing_bytes])
            if len(left) >= missing_bytes:
                self.hashes.append(self._hasher.blake3)
                self._hasher = ContentHasher()
            left = left[missing_bytes:]


def _jobs(plan: BackupPlan) -> Iterator[_Job]:
    if plan.inline:
        yield _Inline(plan.inline)
    yield from plan.packs
    for item in plan.blobs:
        runs = item.runs
        for position, (start, size_bytes) in enumerate(runs):
            yield _Run(item, position, start, size_bytes)
        if len(runs) > 1:
            yield _WholeFile(item)


class _Read(NamedTuple):
    """A small file, read at once."""

    data: bytes
    digest: Digest
    sst: SstIdentity | None


def _read_files(source: SourceDir, items: tuple[PlannedFile, ...]) -> list[_Read]:
    """Read small files, each checked to be the one that was scanned (I3); in a thread, all at once."""
    return [_read_file(source, item) for item in items]


def _read_file(source: SourceDir, item: PlannedFile) -> _Read:
    file, size_bytes = item.file, item.file.metadata.size_bytes
    try:
        descriptor = os.open("/".join(item.path), READ_FLAGS, dir_fd=source.descriptor)
        try:
            # One byte more than there should be, so that a file that grows is noticed.
            data = os.read(descriptor, size_bytes + 1)
            # A stat after the only reading covers all that came before it, and costs half of two.
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unreadable_error(source.path.joinpath(*item.path), error) from error
    if len(data) != size_bytes or not is_still(file, status):
        raise changed_error(source.path.joinpath(*item.path))
    return _Read(data, hash_bytes(data), parse_sst(file.name, data))
