"""Carry out a restore plan: every file fetched or reused, verified and written, in parallel within the limits."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from blobstore.base import BlobStore, RequestMetadata
from blobstore.concurrency import ByteBudget, acquired, run_all, run_blocking
from blobstore.errors import BlobCorruptError, BlobNotFoundError, InvalidRequestError, StoreError
from engine.errors import DamagedError
from engine.local.scan import DIR_FLAGS
from engine.restore import write
from engine.restore.staging import target_errors
from engine.runtime import NO_PROGRESS, Progress
from engine.settings import TransferSettings
from index.plan.backup import group_by_size
from index.plan.restore import FetchedRun, RestoredFile, RestorePlan, ReusedFile, plan_restore
from index.snapshot.model import FileBlob, SnapshotIndex, SnapshotMetadata

# Files that go to a thread together, and bytes of those that are copied.
FILES_PER_HOP: Final = 256
HOP_BYTES_MAX: Final = 4 * 1024 * 1024

_Item = TypeVar("_Item")


class Fetch(Protocol):
    """Fetches once; whether the bytes were right. `fresh`: by a connection of its own."""

    def __call__(self, *, fresh: bool) -> Awaitable[bool]: ...


async def fetch_right(fetch: Fetch, damaged: Callable[[str], DamagedError]) -> None:
    """Fetch what has to have certain bytes; once more if they are wrong: a fault on the way is not yet one of the blob.

    Raises what `damaged` makes of a reason if the blob is missing, or was wrong both times.
    """
    cause: StoreError | None = None
    for fresh in (False, True):
        cause = None
        try:
            if await fetch(fresh=fresh):
                return
        except BlobNotFoundError as error:
            raise damaged("its blob is missing") from error
        except (BlobCorruptError, InvalidRequestError) as error:
            cause = error
    raise damaged("its bytes are not the ones that were backed up") from cause


class _Stream:
    """A file that is written as its blobs come, in any order."""

    def __init__(self, file: RestoredFile) -> None:
        self.file = file
        self.descriptor = -1
        self.blobs_left = len(file.entry.blobs)
        self.creating = asyncio.Lock()


class Downloader(msgspec.Struct, kw_only=True):
    """One download into one directory that is being built."""

    store: BlobStore
    # Whose bytes they are, for the store's traces and for errors.
    snapshot: SnapshotMetadata
    # Where the directory will be, for errors.
    target: Path
    # Descriptor of the directory that is being built; its sub-directories are made.
    root: int
    # Descriptor of the directory whose files are reused; -1 if there is none.
    source: int = -1
    owners: write.OwnerPolicy = write.OwnerPolicy.IGNORE
    settings: TransferSettings
    progress: Progress = NO_PROGRESS
    # May be shared with other downloads at the same time.
    budget: ByteBudget

    # What became of it: all files, and those that are second names of files of the old directory.
    written: list[write.WrittenFile] = msgspec.field(default_factory=list)
    linked: list[write.WrittenFile] = msgspec.field(default_factory=list)
    files_fetched: int = 0
    # As asked of the store: dead bytes of packs and second fetches count.
    bytes_fetched: int = 0
    requests: int = 0
    files_reused: int = 0
    bytes_reused: int = 0
    # Files that are open.
    streams: set[_Stream] = msgspec.field(default_factory=set)

    async def download(self, plan: RestorePlan) -> None:
        """Write every file of a plan, synced, with its metadata.

        Requests: `plan.fetch_requests` GETs, and one more for each file that could not be reused after all or whose
        bytes were wrong at first.

        Raises:
            DamagedError: A blob is missing, or does not have the bytes that it should, twice.
            TargetError: The target cannot be written.
            StoreError: As the store says.
        """
        try:
            await run_all(lambda job: job(), self._jobs(plan), in_flight_max=self.settings.in_flight_max)
        finally:
            # Every task has ended and so has every thread that it had started.
            for stream in self.streams:
                os.close(stream.descriptor)

    def _jobs(self, plan: RestorePlan) -> Iterator[Callable[[], Awaitable[None]]]:
        """Yield the jobs, what is fetched first: it takes longest."""
        for run in plan.runs:
            yield partial(self._fetch_run, run)
        for file in plan.streams:
            stream = _Stream(file)
            for blob in file.entry.blobs:
                yield partial(self._fetch_blob, stream, blob)
        for links in _groups(plan.links):
            yield partial(self._link, links)
        size_of: Callable[[ReusedFile], int] = attrgetter("target.size_bytes")
        for copies in group_by_size(plan.copies, size_of, bytes_max=HOP_BYTES_MAX, count_max=FILES_PER_HOP):
            yield partial(self._copy, copies)
        for files in _groups((*plan.empty, *plan.inline)):
            yield partial(self._write_whole, files)

    async def _write_whole(self, files: Sequence[RestoredFile]) -> None:
        with target_errors(self.target):
            written = await run_blocking(write.write_files, self.root, files, self.owners, write.write_inline)
        self.written.extend(written)
        self.progress.add(files=len(files), bytes_=sum(file.size_bytes for file in files))

    async def _link(self, files: Sequence[ReusedFile]) -> None:
        linked = await run_blocking(lambda: [write.link_file(self.root, self.source, file) for file in files])
        for reused, written in zip(files, linked, strict=True):
            if written is None:
                await self._copy([reused])
            else:
                self.linked.append(written)
                self._reused(written)

    async def _copy(self, reused: Sequence[ReusedFile]) -> None:
        """Copy files; fetch those that are gone, or do not have the right bytes after all."""
        files, fill = [item.target for item in reused], partial(write.copy_into, self.source)
        with target_errors(self.target):
            copied = await run_blocking(write.write_files, self.root, files, self.owners, fill)
        for written in copied:
            self._reused(written)
        there = {written.file.path for written in copied}
        for stream in [_Stream(file) for file in files if file.path not in there]:
            for blob in stream.file.entry.blobs:
                await self._fetch_blob(stream, blob)

    async def _fetch_run(self, run: FetchedRun) -> None:
        """Fetch a range of a pack, and write its files as they come; only what is right stays."""
        wrong: Sequence[RestoredFile] = run.files

        async def fetch(*, fresh: bool) -> bool:
            nonlocal wrong
            store = self._counted(run.files[0], run.size_bytes)
            writer = write.PackWriter(self.root, run, wrong, self.owners)
            try:
                await self._read_run(store, run, writer, fresh=fresh)
            except (BlobCorruptError, InvalidRequestError):
                # Where all files had come right before it broke off, nothing is damaged.
                if writer.wrong:
                    raise
            finally:
                # What has come right stays, also where the rest broke off.
                wrong = writer.wrong
                writer.close()
                self.written.extend(writer.written)
                files = len(writer.written)
                self.files_fetched += files
                self.progress.add(files=files, bytes_=sum(written.file.size_bytes for written in writer.written))
            return not wrong

        await fetch_right(fetch, lambda reason: self._damaged(wrong[0], run.key, reason))

    async def _read_run(self, store: BlobStore, run: FetchedRun, writer: write.PackWriter, *, fresh: bool) -> None:
        """Give a range to its writer, and sync what is right even if it broke off."""
        async with self.budget.hold(2 * self.settings.chunk_bytes):
            with target_errors(self.target):
                try:
                    await store.read_into(run.key, writer, start=run.start, size_bytes=run.size_bytes, fresh=fresh)
                except (BlobCorruptError, InvalidRequestError):
                    await run_blocking(writer.end)
                    raise
                await run_blocking(writer.end)

    async def _fetch_blob(self, stream: _Stream, blob: FileBlob) -> None:
        """Fetch one blob of a file straight into its place; the last one to come seals the file."""
        file = stream.file
        async with stream.creating:
            if stream.descriptor < 0:
                with target_errors(self.target):
                    await run_blocking(self._open, stream)
        async with self.budget.hold(2 * self.settings.chunk_bytes):
            await fetch_right(partial(self._stream, stream, blob), lambda reason: self._damaged(file, blob.key, reason))
        self.progress.add(bytes_=blob.size_bytes)
        stream.blobs_left -= 1
        if stream.blobs_left == 0:
            with target_errors(self.target):
                self.written.append(await run_blocking(write.seal_file, stream.descriptor, file, self.owners))
            self.streams.remove(stream)
            os.close(stream.descriptor)
            self.files_fetched += 1
            self.progress.add(files=1)

    def _open(self, stream: _Stream) -> None:
        """Make the file. In the thread itself it is noted as open: a cancelled caller would never hear of it."""
        stream.descriptor = write.create_file(self.root, stream.file)
        self.streams.add(stream)

    async def _stream(self, stream: _Stream, blob: FileBlob, *, fresh: bool) -> bool:
        """Write a blob's bytes as they come; return whether they were right."""
        place = write.FilePlace(stream.descriptor, blob.file_offset_bytes, size_bytes_max=blob.size_bytes)
        store = self._counted(stream.file, blob.size_bytes)
        with target_errors(self.target):
            await store.read_into(
                blob.key, place, start=blob.blob_offset_bytes, size_bytes=blob.size_bytes, fresh=fresh
            )
        # The hash of a file's only blob is the file's.
        return place.hasher.blake3 == (blob.blake3 or stream.file.entry.blake3)

    def _reused(self, written: write.WrittenFile) -> None:
        self.written.append(written)
        self.files_reused += 1
        self.bytes_reused += written.file.size_bytes
        self.progress.add(files=1, bytes_=written.file.size_bytes)

    def _counted(self, file: RestoredFile, size_bytes: int) -> BlobStore:
        """Count one request that begins with the bytes of a file, and return the store for it."""
        self.requests += 1
        self.bytes_fetched += size_bytes
        snapshot, path = self.snapshot, "/".join(file.path)
        metadata = RequestMetadata(
            job=snapshot.job, task=snapshot.task, store=snapshot.store, payload_path=path, size_bytes=size_bytes
        )
        return self.store.tagged(metadata)

    def _damaged(self, file: RestoredFile, key: str, reason: str) -> DamagedError:
        version = f"{self.snapshot.version}_{self.snapshot.unique_id}"
        message = f"file {'/'.join(file.path)} of version {version}: {reason}"
        return DamagedError(message, operation="restore", subject=key)


async def download_index(
    store: BlobStore,
    index: SnapshotIndex,
    directory: Path,
    settings: TransferSettings,
    *,
    target: Path | None = None,
    budget: ByteBudget | None = None,
) -> Downloader:
    """Download all that an index names into a directory that is there and empty; errors name `target` instead."""
    target = target or directory
    plan = plan_restore(index, {}, range_bytes=settings.range_bytes, owners_count=False)

    def make_root() -> int:
        with target_errors(target):
            for path in plan.dirs:
                directory.joinpath(*path).mkdir()
            return os.open(directory, DIR_FLAGS)

    async with acquired(make_root, os.close) as root:
        downloader = Downloader(
            store=store,
            snapshot=index.metadata,
            target=target,
            root=root,
            settings=settings,
            budget=budget or ByteBudget(settings.memory_bytes_max),
        )
        await downloader.download(plan)
        return downloader


def _groups(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), FILES_PER_HOP):
        yield items[start : start + FILES_PER_HOP]
