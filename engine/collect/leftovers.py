"""What earlier collections have left: runs that nobody takes up, and old audit records (design 0006, R6 and A1)."""

from itertools import groupby
from typing import Final

from blobstore.base import BlobStore, list_blobs
from engine.collect.backend import DeleteTally
from engine.collect.in_process import delete_keys
from index.errors import UnsafeNameError
from index.plan.collect import DeleteReason, PlannedDelete
from index.plan.plan_format import RUN_ENDED, RUN_HEADER
from index.snapshot.keys import AUDIT, RUNS, RunId, parse_audit_key, parse_run_key, run_began_at_ms

AUDITS_KEPT_MAX: Final = 1000
# After everything else, and in this order. Without its header nobody would know that the others belong to a run, and a
# header without the mark that the run has ended would be taken up.
_LAST: Final = (RUN_HEADER, RUN_ENDED)


async def plan_leftovers(store: BlobStore, now_ms: int, ttl_ms: int) -> tuple[PlannedDelete, ...]:
    """What may go, in the order in which it may; a key that tidemark never wrote is left alone.

    Args:
        now_ms: When this run began, by the store's clock. A run that it could have taken up is never among them.
        ttl_ms: The repository's TTL.
    """
    runs: list[tuple[RunId, str, int]] = []
    ended: set[RunId] = set()
    audits: list[tuple[str, int]] = []
    async for blob in list_blobs(store, RUNS):
        try:
            run, name = parse_run_key(blob.key)
        except UnsafeNameError:
            continue
        runs.append((run, blob.key, blob.size_bytes))
        if name == RUN_ENDED or run_began_at_ms(run) + ttl_ms <= now_ms:
            ended.add(run)
    async for blob in list_blobs(store, AUDIT):
        try:
            parse_audit_key(blob.key)
        except UnsafeNameError:
            continue
        audits.append((blob.key, blob.size_bytes))
    # One more is written at the end of this run; its id is the newest.
    old = audits[: max(0, len(audits) - (AUDITS_KEPT_MAX - 1))]
    leftovers = [PlannedDelete(key, DeleteReason.LEFT_RUN, size) for run, key, size in runs if run in ended]
    leftovers += [PlannedDelete(key, DeleteReason.OLD_AUDIT, size) for key, size in old]
    return tuple(sorted(leftovers, key=lambda planned: (_stage(planned), planned.key)))


async def delete_leftovers(store: BlobStore, leftovers: tuple[PlannedDelete, ...], tally: DeleteTally) -> None:
    """Delete what `plan_leftovers` has planned; once something of a run stays, no later stage is begun.

    A request deletes its keys in any order, and some of them may fail: so each stage has requests of its own.

    Raises:
        StoreError: As the store says: nothing was deleted after it.
    """
    for _, stage in groupby(leftovers, key=_stage):
        left = await delete_keys(store, list(stage), tally=tally)
        if any(key.startswith(RUNS) for key in left):
            return


def _stage(planned: PlannedDelete) -> int:
    """What has a greater one may go only when everything of a smaller one is gone."""
    name = planned.key.rpartition("/")[2]
    return _LAST.index(name) + 1 if planned.reason is DeleteReason.LEFT_RUN and name in _LAST else 0
