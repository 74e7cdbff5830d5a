"""Write a collection's plan to a place outside the repository (design 0006, P1 and P2)."""

from collections.abc import Iterable
from typing import Final

from blobstore.base import DELETE_BATCH_MAX, BlobStore, BytesBody
from blobstore.concurrency import run_blocking
from engine.errors import TargetError
from index.plan.collect import PlannedUpload
from index.plan.plan_format import (
    LINES_SUFFIX,
    PLAN_HEADER_NAME,
    PLAN_SUMMARY_NAME,
    PlanHeader,
    PlanSummary,
    encode_line,
    encode_plan_header,
)

# About 20 MB.
LINES_PER_FILE: Final = 100_000


async def check_place(store: BlobStore, repository: BlobStore) -> None:
    """Refuse a place for a plan that is in the repository (P2), or that holds anything: two plans would mix.

    Raises:
        TargetError: It is one of these.
    """
    ours, theirs = await run_blocking(store.place), await run_blocking(repository.place)
    shared = min(len(ours), len(theirs))
    if shared and ours[:shared] == theirs[:shared]:
        raise TargetError(
            "overlaps the repository", operation="collect", subject="the plan's directory", hint="name one outside it"
        )
    page = await store.list_page("", limit=1)
    if page.blobs:
        raise TargetError(
            "is not empty", operation="collect", subject="the plan's directory", hint="name one that is absent or empty"
        )


async def write_header(store: BlobStore, header: PlanHeader) -> None:
    """Write `plan.json`, before any line."""
    await store.put(PLAN_HEADER_NAME, BytesBody(encode_plan_header(header)))


async def write_lines(store: BlobStore, name: str, planned: Iterable[PlannedUpload]) -> None:
    """Write one file of lines; `name` is without its suffix."""
    await store.put(f"{name}{LINES_SUFFIX}", BytesBody(b"".join(encode_line(p) for p in planned)))


async def write_summary(store: BlobStore, summary: PlanSummary) -> None:
    """Write `summary.json`, after the last line."""
    await store.put(PLAN_SUMMARY_NAME, BytesBody(encode_plan_header(summary)))


class PlanLinesWriter:
    """Writes all lines of a plan, and writes them again when a collection has planned again."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._names: tuple[str, ...] = ()

    async def write_all(self, planned: tuple[PlannedUpload, ...]) -> None:
        """Replace the lines that were written before."""
        starts = range(0, len(planned), LINES_PER_FILE)
        names = tuple(f"uploads-{number:06d}" for number in range(len(starts)))
        for name, start in zip(names, starts, strict=True):
            await write_lines(self._store, name, planned[start : start + LINES_PER_FILE])
        stale = [f"{name}{LINES_SUFFIX}" for name in self._names[len(names) :]]
        for start in range(0, len(stale), DELETE_BATCH_MAX):
            await self._store.delete(stale[start : start + DELETE_BATCH_MAX])
        self._names = names
