"""A collection's work in this process: lists, marks, the plan, and deletes."""

from collections.abc import Iterable, Sequence

from typing_extensions import override

from blobstore.base import DELETE_BATCH_MAX, BlobInfo, BlobStore, RequestMetadata
from engine.collect.backend import KEYS_TOLD_MAX, CollectBackend, Deleted, DeleteTally, Listing, Swept
from engine.collect.plan_writer import PlanLinesWriter
from engine.progress import NO_PROGRESS, Progress
from engine.records.roots import References, list_prefix, reachable_keys
from index.plan.collect import (
    PlannedDelete,
    PlannedUpload,
    Upload,
    choose_uploads,
    is_upload_key,
    sum_deletes,
    waiting_until_ms,
)
from index.snapshot.keys import BLOBS, INDEXES, RunId


class InProcessBackend(CollectBackend):
    """All of it in this process, and nothing written down but a plan, where it is wanted."""

    def __init__(self, store: BlobStore, progress: Progress = NO_PROGRESS, plan_to: BlobStore | None = None) -> None:
        self._store = store
        self._progress = progress
        self._lines = None if plan_to is None else PlanLinesWriter(plan_to)
        self._uploads: tuple[Upload, ...] = ()
        self._unreachable: tuple[Upload, ...] = ()
        self._ttl_ms = 0
        self._planned: tuple[PlannedUpload, ...] = ()
        # The room that is being deleted.
        self._doomed: tuple[PlannedUpload, ...] = ()
        self._tally = DeleteTally()

    @override
    async def list_uploads(self, run: RunId, now_ms: int) -> Listing:
        self._uploads, foreign = await list_uploads(self._store, (BLOBS, INDEXES))
        return Listing(
            listed_at_ms=now_ms,
            count=len(self._uploads),
            size_bytes=sum(u.size_bytes for u in self._uploads),
            newest_created_at_ms=max((u.created_at_ms for u in self._uploads), default=0),
            foreign_count=len(foreign),
            foreign=foreign[:KEYS_TOLD_MAX],
        )

    @override
    async def sweep(self, references: References, now_ms: int, ttl_ms: int) -> Swept:
        keys = await reachable_keys(self._store, references.everything, optional=references.optional)
        self._unreachable = tuple(u for u in self._uploads if u.key not in keys)
        self._ttl_ms = ttl_ms
        self._planned = tuple(
            sorted(choose_uploads(self._unreachable, now_ms, ttl_ms, references.protected), key=lambda p: p.key)
        )
        if self._lines is not None:
            await self._lines.write_all(self._planned)
        return self._swept(())

    @override
    async def spare(self, keys: frozenset[str]) -> Swept:
        spared = tuple(p for p in self._planned if p.key in keys)
        self._planned = tuple(p for p in self._planned if p.key not in keys)
        return self._swept(spared)

    @override
    async def delete(self, room: str) -> Deleted:
        self._doomed = tuple(p for p in self._planned if p.key.startswith(room))
        self._tally = DeleteTally()
        await delete_keys(self._store, self._doomed, self._progress, tally=self._tally)
        return self._deleted()

    @override
    def planned_count(self, room: str) -> int:
        return sum(p.key.startswith(room) for p in self._planned)

    @override
    def so_far(self) -> Deleted | None:
        return self._deleted()

    def _deleted(self) -> Deleted:
        tally = self._tally
        here = frozenset(tally.left)
        # Nobody has asked for the rest: it is still there.
        failed = sorted([*tally.left, *(p.key for p in self._doomed[tally.asked :])])
        return Deleted(
            totals=sum_deletes(p for p in self._doomed[: tally.answered] if p.key not in here),
            failed_count=len(failed),
            failed=tuple(failed[:KEYS_TOLD_MAX]),
            unknown_count=tally.asked - tally.answered,
        )

    @override
    async def end(self) -> None:
        """Nothing was written down."""

    def _swept(self, spared: Sequence[PlannedUpload]) -> Swept:
        chosen = frozenset(p.key for p in (*self._planned, *spared))
        waiting = [u for u in self._unreachable if u.key not in chosen]
        gone = sum(p.size_bytes for p in self._planned) + sum(u.size_bytes for u in waiting)
        return Swept(
            totals=sum_deletes(self._planned),
            waiting_count=len(waiting),
            waiting_bytes=sum(u.size_bytes for u in waiting),
            waiting_until_ms=waiting_until_ms(waiting, self._ttl_ms),
            live_count=len(self._uploads) - len(self._planned) - len(waiting),
            live_bytes=sum(u.size_bytes for u in self._uploads) - gone,
            spared_count=len(spared),
            spared_bytes=sum(p.size_bytes for p in spared),
            told=self._planned[:KEYS_TOLD_MAX],
        )


async def list_uploads(store: BlobStore, prefixes: Iterable[str]) -> tuple[tuple[Upload, ...], tuple[str, ...]]:
    """Blobs and indexes below some prefixes, and keys there that tidemark never wrote. Comes before the roots (D2)."""

    def take(blob: BlobInfo) -> Upload | str:
        if not is_upload_key(blob.key):
            return blob.key
        return Upload(blob.key, blob.size_bytes, blob.created_at_ms)

    found = [one for prefix in prefixes for one in await list_prefix(store, prefix, take)]
    return tuple(u for u in found if isinstance(u, Upload)), tuple(key for key in found if isinstance(key, str))


async def delete_keys(
    store: BlobStore,
    deletes: Sequence[PlannedDelete],
    progress: Progress = NO_PROGRESS,
    *,
    tally: DeleteTally | None = None,
) -> tuple[str, ...]:
    """Delete keys of one room, a batch at a time; returns those that the store would not delete.

    Args:
        tally: Is filled as it goes on, for whoever has to know how far it came when an error ends it.
    """
    tally = DeleteTally() if tally is None else tally
    collecting = store.tagged(RequestMetadata(payload_path="collect"))
    for start in range(0, len(deletes), DELETE_BATCH_MAX):
        batch = deletes[start : start + DELETE_BATCH_MAX]
        tally.asked += len(batch)
        failures = await collecting.delete([d.key for d in batch])
        failed = {failure.key for failure in failures}
        tally.answered += len(batch)
        tally.left += sorted(failed)
        progress.add(files=len(batch) - len(failed), bytes_=sum(d.size_bytes for d in batch if d.key not in failed))
    return tuple(tally.left)
