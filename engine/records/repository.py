"""What an open repository is, and its record: read at each opening, created twice: to try the store (0002, K4)."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Final

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore, BytesBody, Created, Lost, Unknown
from blobstore.errors import BlobNotFoundError, InvalidRequestError, StoreUnavailableError
from blobstore.opening import open_store
from engine.errors import NotFoundError, UnsafeStoreError, UsageError, bare_message
from engine.local.digests import DigestCaches
from engine.records.find import MissingBlobs
from engine.records.indexes import IndexCache
from engine.records.journal import UploadJournals
from engine.records.log import check_commits, read_record
from engine.runtime import Pace, Runtime
from engine.settings import TransferSettings
from engine.text import without_credentials
from index.display import human_duration
from index.snapshot.codec import decode_repository, encode_record
from index.snapshot.keys import PREFIXES, REPOSITORY
from index.snapshot.model import RepositoryRecord, Scope

# Empty keys that consoles make of a prefix, as `log/`.
MARKERS_MAX: Final = 8
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
# What is in the place of the repository record where `init` found that the store lets a create replace what is
# there: nobody opens it, and a reader of the object learns why.
REFUSED_STORE: Final = (
    b"tidemark init refused this store: a create-if-absent replaced what was there already, so two writers could both\n"
    b"win. Run `tidemark doctor`. Once the store is right, delete this object and run `tidemark init` again.\n"
)


class OpenRepository(msgspec.Struct, frozen=True, kw_only=True):
    """What an open repository is. Every use case takes it as one argument."""

    store: BlobStore
    # What everybody who uses the repository agrees on.
    record: RepositoryRecord
    # How bytes are moved.
    settings: TransferSettings = TransferSettings()
    runtime: Runtime = msgspec.field(default_factory=Runtime)
    # The hashes of local files that are known, by directory (design 0002, I1 and I2).
    digests: DigestCaches = msgspec.field(default_factory=DigestCaches)
    # The indexes that were read or written last.
    indexes: IndexCache = msgspec.field(default_factory=IndexCache)
    # What was found missing: the next backup uploads it again (design 0006, M1).
    missing_blobs: MissingBlobs = msgspec.field(default_factory=MissingBlobs)
    # What was uploaded and is not committed yet: the next backup goes on with it (design 0002, U1).
    journals: UploadJournals = msgspec.field(default_factory=UploadJournals)
    # What restores have shown of the store's speed.
    pace: Pace = msgspec.field(default_factory=Pace)

    def without_digests(self, settings: TransferSettings | None = None) -> "OpenRepository":
        """Return the repository for work on directories that are soon gone: their hashes are not kept."""
        return msgspec.structs.replace(self, settings=settings or self.settings, digests=DigestCaches())


class StoreAddress(msgspec.Struct, frozen=True):
    """One store of one task, committed by a job or a task."""

    scope: Scope
    task: str = "0"
    store: str = "default"

    @override
    def __str__(self) -> str:
        return f"{self.scope} {self.task}/{self.store}"


@contextlib.asynccontextmanager
async def opened_store(store: str | BlobStore) -> AsyncIterator[BlobStore]:
    """Open the store of a repository; one that was opened here is closed if the block fails, and the error names it."""
    if not isinstance(store, str):
        yield store
        return
    opened = open_store(store)
    try:
        with noting_repository(without_credentials(store)):
            yield opened
    except BaseException:
        await opened.close()
        raise


@contextlib.contextmanager
def noting_repository(url: str) -> Iterator[None]:
    """Let what a block raises say in a note, once, of which repository it is; of none if the URL is empty."""
    try:
        yield
    except Exception as error:
        note = f"repository: {url}"
        if url and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


async def read_repository_record(store: BlobStore, operation: str) -> RepositoryRecord:
    """Read the record of a repository: one GET.

    Raises:
        NotFoundError: The store is not a repository.
        UnknownFormatError: It was made by a newer tidemark.
        UnsafeStoreError: `init` has refused this store.
    """

    def decode(data: bytes, *, subject: str) -> RepositoryRecord:
        if data == REFUSED_STORE:
            message = "`tidemark init` has refused this blob store: it lets a create replace what is there"
            hint = "run `tidemark doctor`; once the blob store is right, delete this object, then `tidemark init` again"
            raise UnsafeStoreError(message, operation=operation, subject=subject, hint=hint)
        return decode_repository(data, subject=subject)

    try:
        return await read_record(store, REPOSITORY, decode)
    except BlobNotFoundError as error:
        hint = "make it one with `tidemark init`, or check the URL"
        raise NotFoundError("this blob store is not a repository", operation=operation, hint=hint) from error


def check_times(record: RepositoryRecord) -> None:
    """Raise `UsageError` for times that do not fit together, whatever the store."""
    ttl_ms, margin_ms, period_ms = record.ttl_ms, record.margin_ms, record.collection_period_ms
    if not 0 < margin_ms * 2 < ttl_ms or period_ms <= 0:
        ttl, margin, period = map(human_duration, (ttl_ms, margin_ms, period_ms))
        message = f"a TTL of {ttl}, a margin of {margin} and a collection period of {period} do not fit"
        hint = "all are positive, and the margin is less than half of the TTL"
        raise UsageError(message, operation="init", hint=hint)


async def write_repository_record(store: BlobStore, record: RepositoryRecord) -> None:
    """Make a store a repository (design 0002, K1), and find out whether the store would do it twice (0003, P2).

    Raises:
        UsageError: It is one already, keys of one are there, or its times do not fit the store.
        UnsafeStoreError: What would be committed to this store is not safe there.
    """
    is_one = UsageError("is a repository already", operation="init", hint="open it instead of initialising it")
    # Before the record is written: a store that creates twice would let it replace another one.
    with contextlib.suppress(NotFoundError):
        await read_repository_record(store, "init")
        raise is_one
    await check_unused(store, "init")
    # Where a repository was, another TTL would apply to uploads that were made with the old one.
    for prefix in PREFIXES:
        page = await store.list_page(prefix, limit=MARKERS_MAX)
        if key := next((blob.key for blob in page.blobs if not blob.key.endswith("/")), ""):
            message = "the object `repository` is missing, and others of a repository are there"
            hint = "put `repository` back from a copy or an older version, or choose another place"
            raise UsageError(message, operation="init", subject=key, hint=hint)
    check_commits(store, "init")
    if record.margin_ms <= store.capabilities.created_late_ms:
        message = f"a margin of {record.margin_ms} ms is within the error of the blob store's times"
        hint = f"use more than {store.capabilities.created_late_ms} ms (design 0003, C3)"
        raise UsageError(message, operation="init", hint=hint)
    match await store.put_if_absent(REPOSITORY, BytesBody(encode_record(record))):
        case Created():
            await _check_refuses_a_second(store)
        case Unknown(reason=reason):
            raise StoreUnavailableError(reason, operation="init", key=REPOSITORY)
        case Lost():
            if (await read_repository_record(store, "init")).id != record.id:
                raise is_one


async def _check_refuses_a_second(store: BlobStore) -> None:
    """Create the record a second time, with bytes that nobody opens: they are there only if the store lets them."""
    outcome = await store.put_if_absent(REPOSITORY, BytesBody(REFUSED_STORE))
    if isinstance(outcome, Created):
        message = "the blob store said Created to a second create of one key: two writers could both win"
        hint = "run `tidemark doctor`. Nothing opens this blob store now: an object that says why is at this key; "
        hint += "once the blob store is right, delete it and run `tidemark init` again"
        raise UnsafeStoreError(message, operation="init", subject=REPOSITORY, hint=hint)
    if isinstance(outcome, Unknown):
        message = "the repository is made, but whether the blob store refuses a second create is unknown"
        hint = "run `tidemark doctor` before you use it"
        raise StoreUnavailableError(f"{message}: {outcome.reason}", operation="init", key=REPOSITORY, hint=hint)


async def check_unused(store: BlobStore, operation: str) -> None:
    """Raise `UnsafeStoreError` for a place that holds what no store has put there, or lies within a repository.

    Sooner or later one of the two would be taken for the other.
    """
    try:
        await store.check_unused(operation, marker=REPOSITORY, prefixes=PREFIXES)
    except InvalidRequestError as error:
        raise UnsafeStoreError(bare_message(error), operation=operation, subject=error.key, hint=error.hint) from error
