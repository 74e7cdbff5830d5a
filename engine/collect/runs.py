"""The run of a collection whose inventory stands in the store: begun, taken up, ended (design 0006, R2, R3, R6)."""

import msgspec

from blobstore.base import DELETE_BATCH_MAX, BlobStore, BytesBody, RequestMetadata, Unknown, list_blobs, read_blob
from blobstore.errors import BlobNotFoundError
from engine.errors import UnsafeStoreError
from index.errors import FormatError, UnsafeNameError
from index.plan.plan_format import (
    RUN_ENDED,
    RUN_HEADER,
    RUN_HEADER_BYTES_MAX,
    RunHeader,
    decode_run_header,
    encode_run_header,
)
from index.snapshot.keys import RUNS, RunId, parse_run_key, run_began_at_ms, run_key, run_prefix
from index.snapshot.records import RepositoryRecord

COLLECT = RequestMetadata(payload_path="collect")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a collection works on."""

    id: RunId
    # Names of its objects, as they were when the run was taken up; of a new one there are none.
    names: frozenset[str]

    @property
    def began_at_ms(self) -> int:
        """By the store's clock; nothing that it lists was listed before."""
        return run_began_at_ms(self.id)


async def take_up_run(store: BlobStore, repository: RepositoryRecord, run: RunId, now_ms: int, release: str) -> Run:
    """The newest run that is not finished and was begun less than a TTL ago, or a new one (R3).

    One that has come to its end is finished, though its objects may still be there (R6).
    A run whose header cannot be read, because it is damaged or a newer release wrote it, is left alone until it is old.

    Requests: 1 LIST for each 1,000 objects of runs + 1 GET for each run looked at, or 1 PUT.

    Args:
        store: The repository's store.
        repository: Its record.
        run: What a new one is called.
        now_ms: The store's clock.
        release: This version of tidemark.

    Raises:
        UnsafeStoreError: The store did not say whether it has the header.
        StoreError: As the store says.
    """
    names: dict[RunId, set[str]] = {}
    async for blob in list_blobs(store, RUNS):
        try:
            found, name = parse_run_key(blob.key)
        except UnsafeNameError:
            # Somebody else's: no concern of a collection.
            continue
        names.setdefault(found, set()).add(name)
    for found in sorted(names, reverse=True):
        is_current = now_ms - repository.ttl_ms < run_began_at_ms(found) <= now_ms
        if (
            is_current
            and RUN_HEADER in names[found]
            and RUN_ENDED not in names[found]
            and await _is_ours(store, repository, found)
        ):
            return Run(id=found, names=frozenset(names[found]))
    header = RunHeader(run=run, repository_id=repository.id, release=release)
    outcome = await store.tagged(COLLECT).put_if_absent(run_key(run, RUN_HEADER), BytesBody(encode_run_header(header)))
    if isinstance(outcome, Unknown):
        raise UnsafeStoreError(
            f"no answer for the run's header: {outcome.reason}", operation="collect", subject=run_key(run, RUN_HEADER)
        )
    return Run(id=run, names=frozenset())


async def end_run(store: BlobStore, run: RunId) -> None:
    """Remove everything that a run has written down, its header last, so that nobody takes up a part of it (R6).

    First it is marked as ended: what a later collection did of it would be counted twice. What the store will not
    delete goes with a later collection (`engine.collect.collect`).

    Raises:
        StoreError: As the store says.
    """
    header = run_key(run, RUN_HEADER)
    ended = run_key(run, RUN_ENDED)
    store = store.tagged(COLLECT)
    await store.put(ended, BytesBody(b""))
    keys = [blob.key async for blob in list_blobs(store, run_prefix(run)) if blob.key not in {header, ended}]
    for start in range(0, len(keys), DELETE_BATCH_MAX):
        if await store.delete(keys[start : start + DELETE_BATCH_MAX]):
            return
    # One after the other: a header without the mark would be taken up.
    if not await store.delete([header]):
        await store.delete([ended])


async def _is_ours(store: BlobStore, repository: RepositoryRecord, run: RunId) -> bool:
    key = run_key(run, RUN_HEADER)
    try:
        data = await read_blob(store.tagged(COLLECT), key, size_bytes_max=RUN_HEADER_BYTES_MAX)
        header = decode_run_header(data, subject=key)
    except (BlobNotFoundError, FormatError):
        return False
    return header.run == run and header.repository_id == repository.id
