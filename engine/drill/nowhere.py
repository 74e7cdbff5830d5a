"""A restore that writes nothing: everything is fetched as a restore fetches it, and hashed (design 0009, R4)."""

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

_METADATA: Final = RequestMetadata(payload_path="restore drill")


class Fetched(msgspec.Struct, kw_only=True):
    """Count what was fetched of one store."""

    # GETs of the index and of blobs.
    requests: int
    bytes_fetched: int = 0


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
    tagged = store.tagged(_METADATA)
    budget = ByteBudget(settings.memory_bytes_max)
    fetched = Fetched(requests=index_requests)

    async def fetch(job: FetchedRun | tuple[RestoredFile, FileBlob]) -> None:
        ranged = job if isinstance(job, FetchedRun) else job[1]

        async def is_right(*, fresh: bool) -> bool:
            fetched.requests += 1
            fetched.bytes_fetched += ranged.size_bytes
            return await _is_right(tagged, job, fresh=fresh)

        async with budget.hold(2 * settings.chunk_bytes):
            await fetch_right(
                is_right, lambda reason: DamagedError(reason, operation="bench restore", subject=ranged.key)
            )
        if isinstance(job, FetchedRun):
            progress.add(files=len(job.files), bytes_=sum(file.size_bytes for file in job.files))
        else:
            progress.add(bytes_=ranged.size_bytes)

    await run_all(fetch, _jobs(plan), in_flight_max=settings.in_flight_max)
    in_index = (*plan.empty, *plan.inline)
    progress.add(files=len(in_index) + len(plan.streams), bytes_=sum(file.size_bytes for file in in_index))
    return fetched


def _jobs(plan: RestorePlan) -> Iterator[FetchedRun | tuple[RestoredFile, FileBlob]]:
    yield from plan.runs
    for file in plan.streams:
        for blob in file.entry.blobs:
            yield file, blob


async def _is_right(store: BlobStore, job: FetchedRun | tuple[RestoredFile, FileBlob], *, fresh: bool) -> bool:
    if isinstance(job, FetchedRun):
        files = PackReader(job, job.files)
        await store.read_into(job.key, files, start=job.start, size_bytes=job.size_bytes, fresh=fresh)
        return not files.wrong
    file, blob = job
    hasher = ContentHasher()
    sink, start = HashingSink(hasher), blob.blob_offset_bytes
    await store.read_into(blob.key, sink, start=start, size_bytes=blob.size_bytes, fresh=fresh)
    # The hash of a file's only blob is the file's.
    return hasher.blake3 == (blob.blake3 or file.entry.blake3)
