"""Carry out a restore plan: every file fetched or reused, verified and written, in parallel within the limits."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from blobstore.base import BlobStore, RequestMetadata
from blobstore.concurrency import run_all, run_blocking
from blobstore.errors import BlobCorruptError, InvalidRequestError
from engine.errors import DamagedError
from engine.local.transfer import ByteBudget, fetch_right
from engine.progress import NO_PROGRESS, Progress
from engine.restore.packs import PackWriter
from engine.restore.staging import target_errors
from engine.restore.write import (
    FilePlace,
    OwnerPolicy,
    WrittenFile,
    copy_file,
    copy_small_files,
    create_file,
    link_file,
    seal_file,
    write_files,
)
from engine.settings import TransferSettings
from index.plan.restore import FetchedRun, RestoredFile, RestorePlan, ReusedFile
from index.snapshot.model import FileBlob, SnapshotMetadata

# Small files that go to a thread together.
FILES_PER_HOP: Final = 256
# Local files up to this size are copied through memory, and the bytes of one call.
SMALL_BYTES_MAX: Final = 256 * 1024
HOP_BYTES_MAX: Final = 4 * 1024 * 1024

_Item = TypeVar("_Item")


class Downloaded(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a plan."""

    files: tuple[WrittenFile, ...]
    # Those among them that are second names of files of the old directory.
    links: tuple[WrittenFile, ...]
    files_fetched: int
    # As asked of the store: dead bytes of packs and second fetches count.
    bytes_fetched: int
    requests: int
    files_reused: int
    bytes_reused: int


class _Stream:
    """A file that is written as its blobs come, in any order."""

    def __init__(self, file: RestoredFile) -> None:
        self.file = file
        self.descriptor = -1
        self.blobs_left = len(file.entry.blobs)
        self.creating = asyncio.Lock()


class _Whole(msgspec.Struct, frozen=True):
    """Files that the index itself has."""

    files: Sequence[RestoredFile]


class _Links(msgspec.Struct, frozen=True):
    files: Sequence[ReusedFile]


class _SmallCopies(msgspec.Struct, frozen=True):
    files: Sequence[ReusedFile]


class _Blob(msgspec.Struct, frozen=True):
    stream: _Stream
    blob: FileBlob


_Job = _Whole | _Links | _SmallCopies | ReusedFile | FetchedRun | _Blob


class DownloadPlace(msgspec.Struct, frozen=True):
    """The directory that is being built, and the one whose files are reused."""

    # Where the directory will be, for errors.
    target: Path
    # Descriptor of the directory that is being built; its sub-directories are made.
    root: int
    # Descriptor of the directory whose files are reused; -1 if there is none.
    source: int = -1
    owners: OwnerPolicy = OwnerPolicy.IGNORE


class Downloader:
    """One download into one directory that is being built.

    Args:
        store: Where from.
        snapshot: Whose bytes they are, for the store's traces.
        place: Where to.
        settings: Limits of memory and parallelism.
        progress: Receives files and bytes.
        budget: What it shares with other downloads at the same time; one of its own if not given.
    """

    def __init__(
        self,
        store: BlobStore,
        snapshot: SnapshotMetadata,
        place: DownloadPlace,
        *,
        settings: TransferSettings,
        progress: Progress = NO_PROGRESS,
        budget: ByteBudget | None = None,
    ) -> None:
        self._store = store
        self._snapshot = snapshot
        self._target = place.target
        self._root = place.root
        self._source = place.source
        self._owners = place.owners
        self._settings = settings
        self._progress = progress
        self._budget = budget or ByteBudget(settings.memory_bytes_max)
        self._streams: set[_Stream] = set()
        self._written: list[WrittenFile] = []
        self._linked: list[WrittenFile] = []
        self._files_fetched = self._bytes_fetched = self._requests = 0
        self._files_reused = self._bytes_reused = 0

    async def download(self, plan: RestorePlan) -> Downloaded:
        """Write every file of a plan, synced, with its metadata.

        Requests: `plan.fetch_requests` GETs, and one more for each file that could not be reused after all or whose
        bytes were wrong at first.

        Raises:
            DamagedError: A blob is missing, or does not have the bytes that it should, twice.
            TargetError: The target cannot be written.
            StoreError: As the store says.
        """
        try:
            await run_all(self._carry_out, _jobs(plan), in_flight_max=self._settings.in_flight_max)
        finally:
            # Every task has ended and so has every thread that it had started.
            for stream in self._streams:
                os.close(stream.descriptor)
        return Downloaded(
            files=tuple(self._written),
            links=tuple(self._linked),
            files_fetched=self._files_fetched,
            bytes_fetched=self._bytes_fetched,
            requests=self._requests,
            files_reused=self._files_reused,
            bytes_reused=self._bytes_reused,
        )

    async def _carry_out(self, job: _Job) -> None:
        match job:
            case _Whole(files=files):
                await self._write_whole(files)
            case _Links(files=files):
                await self._link(files)
            case _SmallCopies(files=files):
                await self._copy_small(files)
            case ReusedFile():
                await self._copy(job)
            case FetchedRun():
                await self._fetch_run(job)
            case _Blob(stream=stream, blob=blob):
                await self._fetch_blob(stream, blob)

    async def _write_whole(self, files: Sequence[RestoredFile]) -> None:
        pieces = [(file, file.entry.inline or b"") for file in files]
        with target_errors(self._target):
            written = await run_blocking(write_files, self._root, pieces, self._owners)
        self._written.extend(written)
        self._progress.add(files=len(files), bytes_=sum(file.size_bytes for file in files))

    async def _link(self, files: Sequence[ReusedFile]) -> None:
        linked = await run_blocking(lambda: [link_file(self._root, self._source, file) for file in files])
        for reused, written in zip(files, linked, strict=True):
            if written is None:
                await self._copy(reused)
            else:
                self._linked.append(written)
                self._reused(written)

    async def _copy(self, reused: ReusedFile) -> None:
        with target_errors(self._target):
            written = await run_blocking(copy_file, self._root, self._source, reused, self._owners)
        if written is not None:
            self._reused(written)
        else:
            await self._fetch_after_all(reused)

    async def _copy_small(self, files: Sequence[ReusedFile]) -> None:
        async with self._budget.hold(sum(file.target.size_bytes for file in files)):
            with target_errors(self._target):
                copied, broken = await run_blocking(copy_small_files, self._root, self._source, files, self._owners)
        for written in copied:
            self._reused(written)
        for reused in broken:
            await self._fetch_after_all(reused)

    async def _fetch_after_all(self, reused: ReusedFile) -> None:
        stream = _Stream(reused.target)
        for blob in reused.target.entry.blobs:
            await self._fetch_blob(stream, blob)

    async def _fetch_run(self, run: FetchedRun) -> None:
        """Fetch a range of a pack, and write its files as they come; only what is right stays."""
        wrong: Sequence[RestoredFile] = run.files

        async def fetch(*, fresh: bool) -> bool:
            nonlocal wrong
            self._count_request(run.size_bytes)
            writer = PackWriter(self._root, run, wrong, self._owners)
            try:
                await self._read_run(run, writer, fresh=fresh)
            except (BlobCorruptError, InvalidRequestError):
                # Where all files had come right before it broke off, nothing is damaged.
                if writer.wrong:
                    raise
            finally:
                # What has come right stays, also where the rest broke off.
                wrong = writer.wrong
                writer.close()
                self._add_written(writer.written)
            return not wrong

        await fetch_right(fetch, lambda reason: self._damaged(wrong[0], run.key, reason))

    async def _read_run(self, run: FetchedRun, writer: PackWriter, *, fresh: bool) -> None:
        """Give a range to its writer, and sync what is right even if it broke off."""
        async with self._budget.hold(2 * self._settings.chunk_bytes):
            with target_errors(self._target):
                try:
                    await self._tagged(run.files[0], run.size_bytes).read_into(
                        run.key,
                        writer,
                        start=run.start,
                        size_bytes=run.size_bytes,
                        fresh=fresh,
                    )
                except (BlobCorruptError, InvalidRequestError):
                    await run_blocking(writer.end)
                    raise
                await run_blocking(writer.end)

    def _add_written(self, files: Sequence[WrittenFile]) -> None:
        self._written.extend(files)
        self._files_fetched += len(files)
        self._progress.add(files=len(files), bytes_=sum(written.file.size_bytes for written in files))

    async def _fetch_blob(self, stream: _Stream, blob: FileBlob) -> None:
        """Fetch one blob of a file straight into its place; the last one to come seals the file."""
        file = stream.file
        async with stream.creating:
            if stream.descriptor < 0:
                with target_errors(self._target):
                    await run_blocking(self._open, stream)
        async with self._budget.hold(2 * self._settings.chunk_bytes):
            await self._stream_verified(stream, blob)
        self._progress.add(bytes_=blob.size_bytes)
        stream.blobs_left -= 1
        if stream.blobs_left == 0:
            with target_errors(self._target):
                self._written.append(await run_blocking(seal_file, stream.descriptor, file, self._owners))
            self._streams.remove(stream)
            os.close(stream.descriptor)
            self._files_fetched += 1
            self._progress.add(files=1)

    def _open(self, stream: _Stream) -> None:
        """Make the file. In the thread itself it is noted as open: a cancelled caller would never hear of it."""
        stream.descriptor = create_file(self._root, stream.file)
        self._streams.add(stream)

    async def _stream_verified(self, stream: _Stream, blob: FileBlob) -> None:
        # The hash of a file's only blob is the file's.
        expected = blob.blake3 or stream.file.entry.blake3

        async def fetch(*, fresh: bool) -> bool:
            self._count_request(blob.size_bytes)
            return await self._stream(stream, blob, fresh=fresh) == expected

        await fetch_right(fetch, lambda reason: self._damaged(stream.file, blob.key, reason))

    async def _stream(self, stream: _Stream, blob: FileBlob, *, fresh: bool) -> bytes:
        """Write a blob's bytes as they come; their hash."""
        place = FilePlace(stream.descriptor, blob.file_offset_bytes, size_bytes_max=blob.size_bytes)
        with target_errors(self._target):
            await self._tagged(stream.file, blob.size_bytes).read_into(
                blob.key,
                place,
                start=blob.blob_offset_bytes,
                size_bytes=blob.size_bytes,
                fresh=fresh,
            )
        return place.blake3

    def _reused(self, written: WrittenFile) -> None:
        self._written.append(written)
        self._files_reused += 1
        self._bytes_reused += written.file.size_bytes
        self._progress.add(files=1, bytes_=written.file.size_bytes)

    def _count_request(self, size_bytes: int) -> None:
        self._requests += 1
        self._bytes_fetched += size_bytes

    def _tagged(self, file: RestoredFile, size_bytes: int) -> BlobStore:
        snapshot, path = self._snapshot, "/".join(file.path)
        return self._store.tagged(
            RequestMetadata(
                job=snapshot.job, task=snapshot.task, store=snapshot.store, payload_path=path, size_bytes=size_bytes
            )
        )

    def _damaged(self, file: RestoredFile, key: str, reason: str) -> DamagedError:
        version = f"{self._snapshot.version}_{self._snapshot.unique_id}"
        return DamagedError(
            f"file {'/'.join(file.path)} of version {version}: {reason}", operation="restore", subject=key
        )


def _jobs(plan: RestorePlan) -> Iterator[_Job]:
    """Yield the jobs, what is fetched first: it takes longest."""
    yield from plan.runs
    for file in plan.streams:
        stream = _Stream(file)
        for blob in file.entry.blobs:
            yield _Blob(stream, blob)
    for links in _groups(plan.links):
        yield _Links(links)
    yield from _copies(plan.copies)
    for files in _groups((*plan.empty, *plan.inline)):
        yield _Whole(files)


def _copies(copies: Sequence[ReusedFile]) -> Iterator[_SmallCopies | ReusedFile]:
    """Group small files, as many as a thread takes at a time; each large one is by itself."""
    group: list[ReusedFile] = []
    group_bytes = 0
    for item in copies:
        size_bytes = item.target.size_bytes
        if size_bytes > SMALL_BYTES_MAX:
            yield item
            continue
        if len(group) == FILES_PER_HOP or group_bytes + size_bytes > HOP_BYTES_MAX:
            yield _SmallCopies(tuple(group))
            group.clear()
            group_bytes = 0
        group.append(item)
        group_bytes += size_bytes
    if group:
        yield _SmallCopies(tuple(group))


def _groups(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), FILES_PER_HOP):
        yield items[start : start + FILES_PER_HOP]
