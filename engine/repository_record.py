"""The repository record: read when a repository is opened, written once and twice over when it is made."""

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from blobstore.base import BlobStore, BytesBody, Created, Lost, Unknown
from blobstore.errors import BlobNotFoundError, StoreUnavailableError
from blobstore.opening import open_store
from engine.errors import NotFoundError, UnsafeStoreError, UsageError
from engine.log_io import read_record
from index.codec import decode_repository
from index.keys import REPOSITORY
from index.model import RepositoryRecord

# What stands in the place of the repository record where `init` found that the store lets a create replace what is
# there: nobody opens it, and whoever looks at the object can read why.
REFUSED_STORE: Final = (
    b"tidemark init refused this store: a create-if-absent replaced what was there already, so two writers could both\n"
    b"win. Run `tidemark doctor`. Once the store is right, delete this object and run `tidemark init` again.\n"
)


@contextlib.asynccontextmanager
async def opened_store(store: str | BlobStore) -> AsyncIterator[BlobStore]:
    """The store of a repository that is about to be opened; one that was opened here is closed if that fails."""
    if not isinstance(store, str):
        yield store
        return
    opened = open_store(store)
    try:
        yield opened
    except BaseException:
        await opened.close()
        raise


async def read_repository_record(store: BlobStore, operation: str) -> RepositoryRecord:
    """The record of a repository: one GET.

    Raises:
        NotFoundError: The store is no repository.
        UnknownFormatError: It was made by a newer tidemark.
        UnsafeStoreError: `init` has refused this store.
        StoreError: As the store says.
    """

    def decode(data: bytes, *, subject: str) -> RepositoryRecord:
        if data == REFUSED_STORE:
            raise UnsafeStoreError(
                "`tidemark init` has refused this store: it lets a create replace what is there",
                operation=operation,
                subject=subject,
                hint="run `tidemark doctor`; once the store is right, delete this object and run `tidemark init` again",
            )
        return decode_repository(data, subject=subject)

    try:
        return await read_record(store, REPOSITORY, decode)
    except BlobNotFoundError as error:
        raise NotFoundError(
            "this store is no repository",
            operation=operation,
            hint="make it one with `tidemark init`, or check the URL",
        ) from error


async def check_no_repository(store: BlobStore) -> None:
    """Look before the record is written: a store that creates twice would let it replace another one."""
    with contextlib.suppress(NotFoundError):
        await read_repository_record(store, "init")
        raise is_repository_error()


def is_repository_error() -> UsageError:
    """What to say where a repository is to be made and there is one."""
    return UsageError("is a repository already", operation="init", hint="open it instead of initialising it")


async def check_refuses_a_second(store: BlobStore) -> None:
    """Create the record a second time, with bytes that nobody opens: they stand there only if the store lets them.

    Raises:
        UnsafeStoreError: It does.
        StoreUnavailableError: It did not answer.
    """
    match await store.put_if_absent(REPOSITORY, BytesBody(REFUSED_STORE)):
        case Created():
            raise UnsafeStoreError(
                "the store said Created to a second create of one key: two writers could both win",
                operation="init",
                subject=REPOSITORY,
                hint="run `tidemark doctor`. Nothing opens this store now: an object that says why stands at this key; "
                "once the store is right, delete it and run `tidemark init` again",
            )
        case Unknown(reason=reason):
            raise StoreUnavailableError(
                f"the repository is made, but whether the store refuses a second create is not known: {reason}",
                operation="init",
                key=REPOSITORY,
                hint="run `tidemark doctor` before you use it",
            )
        case Lost():
            pass
