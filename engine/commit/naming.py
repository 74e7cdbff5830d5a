"""Give a commit a name, and give the name up (design 0002, D5)."""

from blobstore.base import BlobStore, BytesBody, Created, Lost, Unknown
from blobstore.errors import REFUSALS, StoreUnavailableError
from engine.clock import Runtime
from engine.errors import LeaseExpiredError, UsageError
from engine.records.names import find_name, read_namings, release_naming
from engine.records.pins import PinLease, hold_pin
from engine.records.settle import settle_record
from index.plan.commits import Commit, choose_naming
from index.snapshot.codec import encode_record
from index.snapshot.keys import name_key
from index.snapshot.model import Scope
from index.snapshot.records import NameRecord, RepositoryRecord


async def give_name(
    store: BlobStore, repository: RepositoryRecord, runtime: Runtime, commit: Commit, name: str
) -> NameRecord:
    """Keep a commit under a name until the name is released (design 0002, D5).

    A name that refers to this commit already is left as it is: a call that got no answer can be repeated.

    Requests: one LIST of the name; those of `pinned` and of settling the commit; one PUT; the LIST again, with a
    GET for each record there.

    Raises:
        UsageError: The name is taken in this scope, or was given to another commit at the same moment.
        NotFoundError: The commit was collected meanwhile.
        LeaseExpiredError: The naming came too late to protect anything.
        UnsafeStoreError: A name would not be safe in this store; nothing was written.
        StoreUnavailableError: The outcome is unknown: the name may be there now or later.
    """
    standing = choose_naming(await read_namings(store, commit.scope, name))
    if standing is not None:
        if standing.record.source != commit.pointer:
            raise _name_is_taken(name)
        return standing.record
    async with hold_pin(store, runtime, commit, purpose="name", margin_ms=repository.margin_ms, required=True) as lease:
        await settle_record(store, commit.record)
        record = NameRecord(
            scope=commit.scope,
            name=name,
            source=commit.pointer,
            version=commit.record.version,
            committed_at_ms=commit.committed_at_ms,
            stores=commit.record.stores,
            valid_until_ms=lease.valid_until_ms,
            offsets=commit.record.offsets,
            layout=commit.record.layout,
        )
        key = name_key(commit.scope, name, runtime.session())
        await _put_naming(store, lease, key, record)
        return await _judge_naming(store, key, record)


async def _put_naming(store: BlobStore, lease: PinLease, key: str, record: NameRecord) -> None:
    # Until the outcome is known the naming may land late, and has to find its blobs when it does.
    data = encode_record(record)
    lease.keep()
    try:
        outcome = await store.put_if_absent(key, BytesBody(data))
    except REFUSALS:
        lease.let_go()
        raise
    match outcome:
        case Unknown(reason=reason):
            raise StoreUnavailableError(reason, operation="name", key=key)
        case Created(created_at_ms=created_at_ms) if created_at_ms > record.valid_until_ms:
            pass  # judged by the listing, as for every reader
        case Created() | Lost():  # nobody else has this key: an earlier copy of the request was there first
            lease.let_go()


async def _judge_naming(store: BlobStore, key: str, record: NameRecord) -> NameRecord:
    """Let one of two writers of a name give way: each writes, then reads, so at least one sees the other."""
    namings = await read_namings(store, record.scope, record.name)
    mine = next((n for n in namings if n.key == key), None)
    if mine is None or mine.created_at_ms > record.valid_until_ms:
        # One that was in time holds until its pin is over, even if it is released.
        raise LeaseExpiredError("the name came after its pin had ended", operation="name", subject=record.name)
    if any(n.is_live and n.record.source != record.source for n in namings):
        await release_naming(store, mine)
        raise _name_is_taken(record.name)
    return record


async def release_name(store: BlobStore, scope: Scope, name: str) -> None:
    """Give up a name; the next collection frees what only it kept.

    What is released is what has the name now; a naming that comes later is not touched.

    Raises:
        NotFoundError: There is none, it was released, or it came too late to protect anything.
    """
    namings = await read_namings(store, scope, name)
    chosen = find_name(namings, scope, name)
    # The one that the name refers to comes last: should this end in between, the name still means the same.
    for naming in (*(n for n in namings if n.is_live and n is not chosen), chosen):
        await release_naming(store, naming)


def _name_is_taken(name: str) -> UsageError:
    return UsageError("the name is taken", operation="name", subject=name, hint="choose another name, or release it")
