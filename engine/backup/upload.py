"""Carry out a backup plan: every planned file read, hashed and put, in parallel within the limits."""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import NamedTuple

import msgspec

from blobstore.base import BlobStore, Body, RequestMetadata
from blobstore.concurrency import ByteBudget, run_all, run_blocking
from blobstore.errors import StoreError
from blobstore.local.files import open_to_read
from engine.errors import UnsafeSourceError
from engine.local.digests import ContentHasher, Digest, DigestCache, FileHasher, hash_bytes, hash_pack, parse_sst
from engine.local.scan import SourceDir, changed_error, is_still, opened, refusing
from engine.records.indexes import put_new
from engine.records.journal import HashedBody, UploadJournal
from engine.records.repository import OpenRepository, StoreAddress
from engine.runtime import Progress
from index.plan.backup import BackupPlan, PlannedBlobs, PlannedFile, PlannedPack, group_by_size
from index.snapshot.model import BlobKey, FileBlob, FileIndex, FilePath, SstIdentity


class FileRunBody(msgspec.Struct, kw_only=True):
    """A `Body`: a run of bytes of a file that was scanned, hashed while it is read."""

    source: SourceDir
    item: PlannedFile
    start: int
    size_bytes: int
    chunk_bytes: int
    # The hashes, once the run has been read to its end. The CRC32 is that of a whole file: of any other run nobody asks
    # it, and it is 0.
    digest: Digest | None = None

    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the run.

        UnsafeSourceError: the file is no longer what was scanned, at the start or at the end (design 0002, I3), or what
        was read before had other bytes.
        """
        file, is_whole = self.item.file, self.size_bytes == self.item.size_bytes
        # A CRC32 takes longer than BLAKE3, and adds nothing for bytes that were read before.
        hasher = FileHasher() if is_whole and self.digest is None else ContentHasher()
        path = self.source.path.joinpath(*self.item.path)
        with refusing(path):
            async with open_to_read("/".join(self.item.path), dir_fd=self.source.descriptor) as source:
                if not is_still(file, await run_blocking(os.fstat, source)):
                    raise changed_error(path)
                while hasher.size_bytes < self.size_bytes:
                    left = self.size_bytes - hasher.size_bytes
                    at = self.start + hasher.size_bytes
                    chunk = await run_blocking(_read_hashed, source, at, min(left, self.chunk_bytes), hasher)
                    # Before the last chunk is handed out: a store that has all it asked for comes for no more.
                    is_last = hasher.size_bytes == self.size_bytes
                    if not chunk or (is_last and not is_still(file, await run_blocking(os.fstat, source))):
                        raise changed_error(path)
                    if is_last:
                        self._note(hasher)
                    yield chunk

    async def read_digest(self) -> Digest:
        """Return the hashes of the run; read it now, as `read_chunks`, if no store has read it to its end."""
        if self.digest is None:
            async with aclosing(self.read_chunks()) as chunks:
                async for _ in chunks:
                    pass
        if self.digest is None:
            raise changed_error(self.source.path.joinpath(*self.item.path))
        return self.digest

    def _note(self, hasher: ContentHasher) -> None:
        """Keep the hashes of the first reading; refuse another one that had other bytes."""
        if self.digest is None:
            self.digest = Digest(hasher.blake3, hasher.digest.crc32 if isinstance(hasher, FileHasher) else 0)
        elif hasher.blake3 != self.digest.blake3:
            raise _read_twice_error(self.source, self.item)


def _read_twice_error(source: SourceDir, item: PlannedFile) -> UnsafeSourceError:
    message = "was read twice and did not have the same bytes, though its stat says that it has not changed"
    subject, hint = str(source.path.joinpath(*item.path)), "see that the disk, the memory and the file system are well"
    return UnsafeSourceError(message, operation="backup", subject=subject, hint=hint)


def _read_hashed(source: int, at: int, size_bytes: int, hasher: ContentHasher) -> bytes:
    chunk = os.pread(source, size_bytes, at)
    hasher.update(chunk)
    return chunk


class PartsBody:
    """A `Body`: several byte strings as one blob, without a second copy of them all."""

    def __init__(self, parts: Sequence[bytes], chunk_bytes: int, identity: bytes = b"") -> None:
        self._parts = parts
        self._chunk_bytes = chunk_bytes
        self._identity = identity
        self.size_bytes = sum(map(len, parts))

    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the parts one after the other; small ones are joined, none is larger than a pack takes."""
        for group in group_by_size(filter(None, self._parts), len, bytes_max=self._chunk_bytes):
            yield b"".join(group)

    async def read_digest(self) -> Digest:
        """Return what identifies the parts, as its caller has hashed them; nobody asks the CRC32, which is 0."""
        return Digest(self._identity, 0)


class Uploader(msgspec.Struct, kw_only=True):
    """One upload of one plan. Every key carries scope and session, every blob the TTL (design 0002, K2 and C5).

    What an earlier attempt has uploaded is not sent again (U1 to U6).
    """

    # Where to, the TTL, and the limits of memory and parallelism.
    repository: OpenRepository
    address: StoreAddress
    journal: UploadJournal
    source: SourceDir
    # The identities of those files in blobs of their own that have one; small files are asked here.
    ssts: Mapping[FilePath, SstIdentity]
    # Records the hashes that are taken; `looked_at_ns` as `engine.local.scan.file_system_now_ns` said, after the scan.
    cache: DigestCache
    looked_at_ns: int
    progress: Progress
    budget: ByteBudget
    # The new entry of every planned file, and when the store created each blob.
    files: dict[FilePath, FileIndex] = msgspec.field(default_factory=dict)
    # Set once every planned file has its entry, though packs may still be sent from memory.
    all_read: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    files_left: int = 0
    created_ms: list[int] = msgspec.field(default_factory=list)
    # What was found missing or altered.
    missing: frozenset[str] = frozenset()
    # By the number of an upload of the plan: the blob of an earlier attempt that stands for it, and its size.
    resumed: dict[int, tuple[BlobKey, int]] = msgspec.field(default_factory=dict)
    # The hashes of files in blobs of their own by their first number, and of each run of those that were cut.
    whole: dict[int, Digest] = msgspec.field(default_factory=dict)
    run_hashes: dict[BlobKey, bytes] = msgspec.field(default_factory=dict)
    # The hashes of the runs of those files as the reading of the whole file had them, by its first number.
    runs_read_again: dict[int, list[bytes]] = msgspec.field(default_factory=dict)

    def key(self, counter: int) -> BlobKey:
        if counter in self.resumed:
            return self.resumed[counter][0]
        return self.journal.key(self.journal.counter_first + counter)

    async def upload(self, plan: BackupPlan) -> None:
        """Send everything; `all_read` is set as soon as no file is read any more.

        Requests: one PUT per pack and blob of the plan, and nothing else unless an answer was lost.

        Raises:
            UnsafeSourceError: A file is not what was scanned, or not what the previous snapshot says (I3).
            StoreError: As the store says; the others are cancelled.
            DamagedError: A key that is ours alone was taken.
        """
        self.files_left = len(plan.files)
        self.progress.total(files=self.files_left, bytes_=plan.upload_bytes + plan.inline_bytes)
        nothing = hash_bytes(b"")
        for empty in plan.empty:
            self._enter(empty, nothing, None)
        self.progress.add(files=len(plan.empty))
        await run_all(lambda job: job(), self._jobs(plan), in_flight_max=self.repository.settings.in_flight_max)
        for planned in plan.blobs:
            keys = [self.key(planned.counter + position) for position in range(len(planned.runs))]
            # The hash of a file's only blob is the file's.
            hashes = [self.run_hashes.get(key, b"") for key in keys]
            # Of several the whole hash has to be of the bytes that were sent.
            if len(keys) > 1 and self.runs_read_again.get(planned.counter) != hashes:
                raise _read_twice_error(self.source, planned.file)
            runs = zip(keys, planned.runs, hashes, strict=True)
            blobs = tuple(FileBlob(key, start, 0, size_bytes, blake3) for key, (start, size_bytes), blake3 in runs)
            sst = self.ssts.get(planned.file.path)
            self._enter(planned.file, self.whole[planned.counter], sst, blobs=blobs)
        # Also where nothing was planned.
        self.all_read.set()

    def _jobs(self, plan: BackupPlan) -> Iterator[Callable[[], Awaitable[None]]]:
        if plan.inline:
            yield partial(self._read_inline, plan.inline)
        for pack in plan.packs:
            yield partial(self._put_pack, pack)
        for item in plan.blobs:
            for position, (start, size_bytes) in enumerate(item.runs):
                yield partial(self._put_run, item, position, start, size_bytes)
            if len(item.runs) > 1:
                yield partial(self._hash_whole, item)

    async def _read_inline(self, items: tuple[PlannedFile, ...]) -> None:
        read = await run_blocking(lambda: [_read_file(self.source, item) for item in items])
        for item, one in zip(items, read, strict=True):
            self._enter(item, one.digest, one.sst, inline=one.data)
        self.progress.add(files=len(items), bytes_=sum(item.size_bytes for item in items))

    async def _put_pack(self, pack: PlannedPack) -> None:
        async with self.budget.hold(pack.size_bytes):
            read = await run_blocking(lambda: [_read_file(self.source, item) for item in pack.files])
            identity = hash_pack([one.digest.blake3 for one in read])
            body = PartsBody([one.data for one in read], self.repository.settings.chunk_bytes, identity)
            is_there = await self._resume(pack.counter, body)
            key, offset = self.key(pack.counter), 0
            for item, one in zip(pack.files, read, strict=True):
                self._enter(item, one.digest, one.sst, blobs=(FileBlob(key, 0, offset, item.size_bytes),))
                offset += item.size_bytes
            if not is_there:
                await self._put(pack.counter, body, f"pack of {len(read)} files")
        self.progress.add(files=len(pack.files), bytes_=pack.size_bytes)

    async def _put_run(self, planned: PlannedBlobs, position: int, start: int, size_bytes: int) -> None:
        counter = planned.counter + position
        body = self._body(planned.file, start, size_bytes)
        async with self.budget.hold(2 * body.chunk_bytes):
            if not await self._resume(counter, body):
                await self._put(counter, body, "/".join(planned.file.path))
            digest = await body.read_digest()
        if size_bytes == planned.file.size_bytes:
            self.whole[planned.counter] = digest
        else:
            self.run_hashes[self.key(counter)] = digest.blake3
        self.progress.add(files=1 if position == 0 else 0, bytes_=size_bytes)

    async def _hash_whole(self, planned: PlannedBlobs) -> None:
        """Hash a file of several blobs as a whole: BLAKE3 of parts cannot be joined.

        And its runs once more: what is sent is another reading.
        """
        body = self._body(planned.file, 0, planned.file.size_bytes)
        runs = _RunHasher([size_bytes for _, size_bytes in planned.runs])
        async with self.budget.hold(2 * body.chunk_bytes), aclosing(body.read_chunks()) as chunks:
            async for chunk in chunks:
                await run_blocking(runs.update, chunk)
            self.whole[planned.counter] = await body.read_digest()
        self.runs_read_again[planned.counter] = runs.hashes

    async def _resume(self, counter: int, body: HashedBody) -> bool:
        """Use a blob of an earlier attempt that has these bytes, if there is one: one STAT (U3)."""
        if not self.journal.has_size(body.size_bytes):
            return False
        key = self.journal.take(body.size_bytes, (await body.read_digest()).blake3)
        if key is None or key in self.missing:
            return False
        there = None
        with suppress(StoreError):  # the upload says whether anything is wrong
            there = await self._tagged(body, "earlier upload").stat(key)
        if there is None or there.size_bytes != body.size_bytes or there.created_at_ms < self.journal.usable_from_ms:
            return False
        self.resumed[counter] = key, body.size_bytes
        self.created_ms.append(there.created_at_ms)
        return True

    async def _put(self, counter: int, body: HashedBody, payload: str) -> None:
        store, ttl_ms = self._tagged(body, payload), self.repository.record.ttl_ms
        created = await put_new(store, self.key(counter), body, ttl_ms=ttl_ms)
        self.created_ms.append(created.created_at_ms)
        await self.journal.note(self.journal.counter_first + counter, body)

    def _tagged(self, body: Body, payload: str) -> BlobStore:
        address = self.address
        metadata = RequestMetadata(
            job=address.scope.job,
            task=address.task,
            store=address.store,
            payload_path=payload,
            size_bytes=body.size_bytes,
        )
        return self.repository.store.tagged(metadata)

    def _body(self, item: PlannedFile, start: int, size_bytes: int) -> FileRunBody:
        chunk_bytes = self.repository.settings.chunk_bytes
        return FileRunBody(source=self.source, item=item, start=start, size_bytes=size_bytes, chunk_bytes=chunk_bytes)

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
            subject = str(self.source.path.joinpath(*item.path))
            message = "does not have the bytes that the previous snapshot holds of it, though it claims to be that file"
            hint = "the file is damaged or was exchanged: bring back the last commit (`tidemark restore --replace`, "
            hint += "without --trust-stat), or back up without a base"
            raise UnsafeSourceError(message, operation="backup", subject=subject, hint=hint)
        file = msgspec.structs.replace(item.file, blake3=digest.blake3, crc32=digest.crc32, sst=sst or item.file.sst)
        self.cache.record(file, looked_at_ns=self.looked_at_ns, sst_read=sst is not None)
        if item.expected is not None:
            sst = item.expected.sst
        self.files[item.path] = FileIndex(file.name, file.metadata, digest.blake3, digest.crc32, blobs, inline, sst)
        self.files_left -= 1
        if not self.files_left:
            self.all_read.set()


class _RunHasher:
    """Hashes each run of a file whose bytes stream by from its start."""

    def __init__(self, sizes_bytes: Sequence[int]) -> None:
        self._sizes_bytes = sizes_bytes
        self._hasher = ContentHasher()
        self.hashes: list[bytes] = []

    def update(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            missing_bytes = self._sizes_bytes[len(self.hashes)] - self._hasher.size_bytes
            self._hasher.update(left[:missing_bytes])
            if len(left) >= missing_bytes:
                self.hashes.append(self._hasher.blake3)
                self._hasher = ContentHasher()
            left = left[missing_bytes:]


class _Read(NamedTuple):
    data: bytes
    digest: Digest
    sst: SstIdentity | None


def _read_file(source: SourceDir, item: PlannedFile) -> _Read:
    """Read a small file, checked to be the one that was scanned (I3). Blocks."""
    file, size_bytes = item.file, item.size_bytes
    path = source.path.joinpath(*item.path)
    with refusing(path), opened("/".join(item.path), dir_fd=source.descriptor) as descriptor:
        # One byte more than there should be, so that a file that grows is noticed.
        data = os.read(descriptor, size_bytes + 1)
        # A stat after the only reading covers all that came before it, and costs half of two.
        status = os.fstat(descriptor)
    if len(data) != size_bytes or not is_still(file, status):
        raise changed_error(path)
    return _Read(data, hash_bytes(data), parse_sst(file.name, data))
