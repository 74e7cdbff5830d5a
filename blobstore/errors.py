"""What a store can answer instead of doing it, sorted by what the caller does next.

```
StoreError
├── StoreUnavailableError      try again: the one kind that the retrying wrapper retries
├── BlobNotFoundError          plan again: the key is not there
│   └── BlobDeletedError       the store knows that it was there and was deleted
├── AccessDeniedError          ask for the permission
├── StoreFullError             free space
├── StoreMissingError          make the bucket, or correct its name
├── BlobCorruptError           the bytes are not what was put: fetch again or heal
├── CapabilityMissingError     this store cannot do it: choose another store or setting
├── InvalidRequestError        a fault of the caller: a bad key, range or body
├── CheckpointFileExistsError  there is another's file of this name: load again and redo
└── CheckpointUnknownError     the file may be there, or may yet come: read it before anything is built on it
```
The last two are raised by `checkpoint_files` alone: in the contract itself a race is a return value.
"""

from typing import Final

from tidemark.errors import TidemarkError


class StoreError(TidemarkError):
    """Base of all errors of a blob store; `operation` is its method that failed, such as "put_if_absent".

    Attributes:
        key: The key or prefix that it was called with: its subject.
        attempts: How often it was tried.
    """

    def __init__(self, message: str, *, operation: str, key: str = "", hint: str = "") -> None:
        super().__init__(message, operation=operation, subject=key, hint=hint)
        self.key = key
        self.attempts = 1


class StoreUnavailableError(StoreError):
    """The blob store did not answer, or asked to come back later.

    Attributes:
        retry_after_s: How long the blob store asked to wait; None if it did not say.
        asks_for_less: The blob store said that it gets too many requests, or is too slow for as many as there are.
    """

    default_hint = "the blob store is unreachable or busy; try again"

    def __init__(
        self,
        message: str,
        *,
        operation: str,
        key: str = "",
        hint: str = "",
        retry_after_s: float | None = None,
        asks_for_less: bool = False,
    ) -> None:
        super().__init__(message, operation=operation, key=key, hint=hint)
        self.retry_after_s = retry_after_s
        self.asks_for_less = asks_for_less


class BlobNotFoundError(StoreError):
    """No blob of this key is there."""

    default_hint = "the key does not exist; run `tidemark verify` if a commit refers to it"


class BlobDeletedError(BlobNotFoundError):
    """The blob was there and was deleted; `read_into(..., deleted=True)` may still serve it."""

    default_hint = "the blob was deleted; while the blob store retains it, it can be read with deleted=True"


class AccessDeniedError(StoreError):
    """The credentials in use may not do this."""

    default_hint = "grant the permission that the operation needs"


class StoreFullError(StoreError):
    """No space or quota is left."""

    default_hint = "free space or raise the quota; nothing half written is visible"


class StoreMissingError(StoreError):
    """There is no such bucket."""

    default_hint = "make the bucket, or correct its name in the URL"


class BlobCorruptError(StoreError):
    """Bytes came back that are not the ones put."""

    default_hint = "run `tidemark verify`; an older snapshot may be whole"


class CapabilityMissingError(StoreError):
    """The blob store lacks what the call needs, see `Capabilities`."""

    default_hint = "this blob store does not support the operation"


class InvalidRequestError(StoreError):
    """The call itself is wrong; trying again cannot help."""

    default_hint = "this is a bug in the caller"


class CheckpointFileExistsError(StoreError):
    """A file that must not be overwritten is there already: a race was lost, or never had to be run."""

    default_hint = "another writer uses this directory, or an earlier attempt of this one did: compare the content"


class CheckpointUnknownError(StoreError):
    """The blob store never said whether it wrote the file."""

    default_hint = "read the file: it is there whole or not at all; while it is absent it may still arrive"


# Answers with which a store says for certain that it has not written anything.
REFUSALS: Final = (AccessDeniedError, StoreFullError, StoreMissingError, InvalidRequestError, CapabilityMissingError)
