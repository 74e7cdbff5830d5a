"""A restore that writes nothing: everything is fetched as a restore fetches it, and hashed."""

from collections.abc import Iterator
from typing import Final

import msgspec

from blobstore.base import BlobStore, RequestMetadata
from blobstore.concurrency import run_all
from engine.errors import DamagedError
from engine.local.hashing import ContentHasher
from engine.local.transfer import ByteBudget, HashingSink, fetch_right
from engine.progress import Progress
from engine.restore.packs import PackReader
from engine.restore.restore import read_index_of
from engine.settings import TransferSettings
from index.plan.restore import FetchedRun, RestoredFile, RestorePlan, plan_restore
from index.snapshot.model import FileBlob
from index.snapshot.records import StoreReference

_REHEARSAL: Final = RequestMetadata(payload_path="rehearsal")


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """What was fetched of one store."""

    # GETs of the index and of blobs.
    requests: int
    bytes_fetched: int


async def restore_to_nowhere(
    store: BlobStore, reference: StoreReference, *, settings: TransferSettings, progress: Progress
) -> Fetched:
    """Read and hash all that a restore to an empty directory would fetch, by the same plan.

    Raises:
        DamagedError: The index or a blob is missing or altered.
        StoreError: As the store says.
    """
    index, index_requests = await read_index_of(store, reference)
    plan = plan_restore(index, {}, range_bytes=settings.range_bytes, owners_count=False)
    reader = _Reader(store, settings, progress)
    await run_all(reader.read, _jobs(plan), in_flight_max=settings.in_flight_max)
    in_index = (*plan.empty, *plan.inline)
    progress.add(files=len(in_index) + len(plan.streams), bytes_=sum(file.size_bytes for file in in_index))
    return Fetched(requests=index_requests + reader.requests, bytes_fetched=reader.bytes_fetched)


def _jobs(plan: RestorePlan) -> Iterator[FetchedRun | tuple[RestoredFile, FileBlob]]:
    yield from plan.runs
    for file in plan.streams:
        for blob in file.entry.blobs:
            yield file, blob


class _Reader:
    def __init__(self, store: BlobStore, settings: TransferSettings, progress: Progress) -> None:
        self._store = store.tagged(_REHEARSAL)
        self._settings = settings
        self._budget = ByteBudget(settings.memory_bytes_max)
        self._progress = progress
        self.requests = 0
        self.bytes_fetched = 0

    async def read(self, job: FetchedRun | tuple[RestoredFile, FileBlob]) -> None:
        """Fetch and hash a range of a pack, or a blob of a file."""
        if isinstance(job, FetchedRun):
            key, size_bytes = job.key, job.size_bytes
        else:
            key, size_bytes = job[1].key, job[1].size_bytes
        async with self._budget.hold(2 * self._settings.chunk_bytes):
            await self._read_right(job, key, size_bytes)
        if isinstance(job, FetchedRun):
            self._progress.add(files=len(job.files), bytes_=sum(file.size_bytes for file in job.files))
        else:
            self._progress.add(bytes_=size_bytes)

    async def _read_right(self, job: FetchedRun | tuple[RestoredFile, FileBlob], key: str, size_bytes: int) -> None:
        async def fetch(*, fresh: bool) -> bool:
            self.requests += 1
            self.bytes_fetched += size_bytes
            if isinstance(job, FetchedRun):
                return await self._run_is_right(job, fresh=fresh)
            return await self._blob_is_right(*job, fresh=fresh)

        await fetch_right(fetch, lambda reason: DamagedError(reason, operation="rehearse", subject=key))

    async def _run_is_right(self, run: FetchedRun, *, fresh: bool) -> bool:
        files = PackReader(run, run.files)
        await self._store.pour(run.key, files, start=run.start, size_bytes=run.size_bytes, fresh=fresh)
        return not files.wrong

    async def _blob_is_right(self, file: RestoredFile, blob: FileBlob, *, fresh: bool) -> bool:
        hasher = ContentHasher()
        await self._store.pour(
            blob.key,
            HashingSink(hasher),
            start=blob.blob_offset_bytes,
            size_bytes=blob.size_bytes,
            fresh=fresh,
        )
        # The hash of a file's only blob is the file's.
        return hasher.blake3 == (blob.blake3 or file.entry.blake3)
