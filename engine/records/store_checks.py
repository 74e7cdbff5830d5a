"""What a store has to be able to do before anything is built on it (design 0002; `blobstore.base.Capabilities`)."""

from blobstore.base import BlobStore
from blobstore.errors import InvalidRequestError
from engine.errors import UnsafeStoreError
from index.snapshot.keys import PREFIXES, REPOSITORY


def check_commits(store: BlobStore, operation: str) -> None:
    """Refuse a store on which what is committed, named or pinned would not be safe. Asks nothing of the store.

    Reading is not refused anywhere: what such a store still has can be restored.

    Raises:
        UnsafeStoreError: Its create-if-absent is not atomic, so that two writers could both win (K4).
    """
    if not store.capabilities.atomic_create:
        raise UnsafeStoreError(
            "of two creates of one key the store may let both win",
            operation=operation,
            hint="use a store with atomic create-if-absent; `tidemark doctor` tells, and a restore still works",
        )


async def check_unused(store: BlobStore, operation: str) -> None:
    """Refuse a place that holds what no store has put there, or lies within a repository, before it becomes one.

    Raises:
        UnsafeStoreError: It does: sooner or later one of the two would be taken for the other.
        StoreError: As the store says.
    """
    try:
        await store.check_unused(operation, marker=REPOSITORY, prefixes=PREFIXES)
    except InvalidRequestError as error:
        message = str(error).removeprefix(f"{operation} {error.key}: ")
        raise UnsafeStoreError(message, operation=operation, subject=error.key, hint=error.hint) from error


def check_collects(store: BlobStore) -> None:
    """Refuse a store on which collection cannot be safe (D4). Asks nothing of the store.

    Raises:
        UnsafeStoreError: As `check_commits`; or its lists may be stale.
    """
    check_commits(store, "collect")
    _check_lists(store, "collect", "what a commit needs could be taken for garbage")


def check_pins(store: BlobStore, operation: str) -> None:
    """Refuse a store on which the pin of a fork, rewind or name could protect nothing (D4).

    Raises:
        UnsafeStoreError: As `check_commits`; or its lists may be stale: a boundary that stands would not be seen.
    """
    check_commits(store, operation)
    _check_lists(store, operation, "a collection could be deleting what this refers to")


def _check_lists(store: BlobStore, operation: str, danger: str) -> None:
    if not store.capabilities.consistent_lists:
        raise UnsafeStoreError(
            f"the store's lists may be stale: {danger}",
            operation=operation,
            hint=f"{operation} only on a store, or a mount of it, with consistent lists; `tidemark doctor` shows which",
        )
