"""The objects of runs in the store: those of one that is begun, resumed or ended, and what earlier runs have left.

Design 0006, R2, R3 and R6.
"""

import contextlib
from collections import defaultdict
from itertools import groupby
from typing import Final

import msgspec

from blobstore.base import DELETE_BATCH_MAX, BlobStore, BytesBody, Unknown, list_blobs, read_blob
from blobstore.errors import BlobNotFoundError
from engine.collect.backend import COLLECT, DeleteTally, delete_keys
from engine.errors import UnsafeStoreError
from index.errors import FormatError, UnsafeNameError
from index.plan import plan_format
from index.plan.collect import DeleteReason, PlannedDelete
from index.snapshot.keys import AUDIT, RUNS, RunId, parse_audit_key, parse_run_key, run_began_at_ms, run_key, run_prefix
from index.snapshot.model import RepositoryRecord

AUDITS_KEPT_MAX: Final = 1000
# After everything else, and in this order. Without its header nobody would know that the others belong to a run, and a
# header without the mark that the run has ended would be resumed.
_LAST: Final = (plan_format.RUN_HEADER, plan_format.RUN_ENDED)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a collection works on."""

    id: RunId
    # Names of its objects, as they were when the run was resumed; of a new one there are none.
    names: frozenset[str]

    @property
    def began_at_ms(self) -> int:
        """By the store's clock; nothing that it lists was listed before."""
        return run_began_at_ms(self.id)


async def resume_run(store: BlobStore, repository: RepositoryRecord, run: RunId, now_ms: int, release: str) -> Run:
    """Resume the newest run that has not come to its end (R6) and was begun less than a TTL ago, or begin `run` (R3).

    A run whose header cannot be read, because it is damaged or a newer release wrote it, is left alone until it is old.

    Requests: 1 LIST for each 1,000 objects of runs + 1 GET for each run looked at, or 1 PUT.

    Raises:
        UnsafeStoreError: The store did not say whether it has the header.
    """
    names: defaultdict[RunId, set[str]] = defaultdict(set)
    async for blob in list_blobs(store, RUNS):
        # What is none is a key of another program.
        with contextlib.suppress(UnsafeNameError):
            found, name = parse_run_key(blob.key)
            names[found].add(name)
    for found in sorted(names, reverse=True):
        is_current = now_ms - repository.ttl_ms < run_began_at_ms(found) <= now_ms
        is_unfinished = plan_format.RUN_HEADER in names[found] and plan_format.RUN_ENDED not in names[found]
        if is_current and is_unfinished and await _is_ours(store, repository, found):
            return Run(id=found, names=frozenset(names[found]))
    key = run_key(run, plan_format.RUN_HEADER)
    header = plan_format.encode_run_header(plan_format.RunHeader(run=run, repository_id=repository.id, release=release))
    outcome = await store.tagged(COLLECT).put_if_absent(key, BytesBody(header))
    if isinstance(outcome, Unknown):
        message = f"no answer for the run's header: {outcome.reason}"
        raise UnsafeStoreError(message, operation="collect", subject=key)
    return Run(id=run, names=frozenset())


async def end_run(store: BlobStore, run: RunId) -> None:
    """Remove everything that a run has written down, its header last, so that nobody resumes a part of it (R6).

    First it is marked as ended: what a later collection did of it would be counted twice. What the store will not
    delete goes with a later collection (`plan_leftovers`).
    """
    header, ended = run_key(run, plan_format.RUN_HEADER), run_key(run, plan_format.RUN_ENDED)
    store = store.tagged(COLLECT)
    await store.put(ended, BytesBody(b""))
    keys = [blob.key async for blob in list_blobs(store, run_prefix(run)) if blob.key not in {header, ended}]
    for start in range(0, len(keys), DELETE_BATCH_MAX):
        if await store.delete(keys[start : start + DELETE_BATCH_MAX]):
            return
    # One after the other: a header without the mark would be resumed.
    if not await store.delete([header]):
        await store.delete([ended])


async def _is_ours(store: BlobStore, repository: RepositoryRecord, run: RunId) -> bool:
    key = run_key(run, plan_format.RUN_HEADER)
    try:
        data = await read_blob(store.tagged(COLLECT), key, size_bytes_max=plan_format.RUN_HEADER_BYTES_MAX)
        header = plan_format.decode_run_header(data, subject=key)
    except (BlobNotFoundError, FormatError):
        return False
    return header.run == run and header.repository_id == repository.id


async def plan_leftovers(store: BlobStore, now_ms: int, ttl_ms: int) -> tuple[PlannedDelete, ...]:
    """Plan what may go, in the order in which it may; a key that tidemark never wrote is left alone.

    A run that the one which began at `now_ms` could have resumed is never among them.
    """
    runs: list[tuple[RunId, PlannedDelete]] = []
    ended: set[RunId] = set()
    audits: list[PlannedDelete] = []
    async for blob in list_blobs(store, RUNS):
        with contextlib.suppress(UnsafeNameError):
            run, name = parse_run_key(blob.key)
            runs.append((run, PlannedDelete(blob.key, DeleteReason.LEFT_RUN, blob.size_bytes)))
            if name == plan_format.RUN_ENDED or run_began_at_ms(run) + ttl_ms <= now_ms:
                ended.add(run)
    async for blob in list_blobs(store, AUDIT):
        with contextlib.suppress(UnsafeNameError):
            parse_audit_key(blob.key)
            audits.append(PlannedDelete(blob.key, DeleteReason.OLD_AUDIT, blob.size_bytes))
    # One more is written at the end of this run; its id is the newest.
    old = audits[: max(0, len(audits) - (AUDITS_KEPT_MAX - 1))]
    leftovers = [*(planned for run, planned in runs if run in ended), *old]
    return tuple(sorted(leftovers, key=lambda planned: (_stage(planned), planned.key)))


async def delete_leftovers(store: BlobStore, leftovers: DeleteTally) -> None:
    """Delete what `plan_leftovers` has planned; once something of a run stays, begin no later stage.

    A request deletes its keys in any order, and some of them may fail: so each stage has requests of its own.
    """
    for _, stage in groupby(leftovers.planned, key=_stage):
        left = await delete_keys(store, list(stage), tally=leftovers)
        if any(key.startswith(RUNS) for key in left):
            return


def _stage(planned: PlannedDelete) -> int:
    """Return the stage of a delete: a greater one is begun only when everything of a smaller one is gone."""
    name = planned.key.rpartition("/")[2]
    return _LAST.index(name) + 1 if planned.reason is DeleteReason.LEFT_RUN and name in _LAST else 0
