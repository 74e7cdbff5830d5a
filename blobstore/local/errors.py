"""What errors of a file system mean to the callers of a directory store."""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from blobstore.errors import (
    AccessDeniedError,
    BlobCorruptError,
    CapabilityMissingError,
    InvalidRequestError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)

TOO_MANY_OPEN: Final = frozenset({errno.EMFILE, errno.ENFILE})
TOO_MANY_OPEN_HINT: Final = (
    "allow this process more open files (`ulimit -n`), or let it do less at once (`--in-flight-max`)"
)


@contextmanager
def noting_failures(failures: dict[str, str], keys: Sequence[str]) -> Iterator[None]:
    """Delete within: a failure is noted with its reason, and raises nothing."""
    try:
        yield
    except OSError as error:
        failures.update({key: str(store_error(error, "delete", key)) for key in keys})


@contextmanager
def store_errors(operation: str, key: str) -> Iterator[None]:
    """Translate errors of the file system that are raised within.

    Raises:
        StoreError: See `store_error`.
    """
    try:
        yield
    except OSError as error:
        raise store_error(error, operation, key) from error


def store_error(error: OSError, operation: str, key: str) -> StoreError:
    """Return what an error of the file system means to the caller: the only place that decides it."""
    # EIO, ESTALE, ETIMEDOUT, ...; ENOENT on a write: the store was moved or cleaned under it.
    kind, hint = _MEANINGS.get(error.errno or 0, (StoreUnavailableError, ""))
    # A name alone is one of a directory that was open.
    path = error.filename if str(error.filename).startswith("/") else key
    return kind(error.strerror or str(error), operation=operation, key=key, hint=hint.format(path=path))


_DENIED: Final = (AccessDeniedError, "give this user access to {path}")
_FULL: Final = (StoreFullError, "")
_CLASH: Final = (
    InvalidRequestError,
    "one key cannot be a directory of another, nor longer than the file system allows",
)
_INCAPABLE: Final = (
    CapabilityMissingError,
    "a directory store needs hard links, and all of the directory on one file system",
)
_MEANINGS: Final[dict[int, tuple[type[StoreError], str]]] = {
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: (AccessDeniedError, "the file system of {path} is mounted read-only"),
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,
    errno.EISDIR: _CLASH,
    errno.ENOTDIR: _CLASH,
    errno.EEXIST: _CLASH,
    errno.ENAMETOOLONG: _CLASH,
    errno.ELOOP: (
        BlobCorruptError,
        "there is a symbolic link at {path}: a directory store follows none below its root; put what it leads to there",
    ),
    errno.EINVAL: (BlobCorruptError, "there is something else than a regular file at {path}"),
    errno.EOPNOTSUPP: _INCAPABLE,
    errno.ENOTSUP: _INCAPABLE,  # the same number on Linux, another one on macOS
    errno.ENOSYS: _INCAPABLE,
    errno.EXDEV: _INCAPABLE,
    errno.EMLINK: _INCAPABLE,
    **dict.fromkeys(TOO_MANY_OPEN, (StoreUnavailableError, TOO_MANY_OPEN_HINT)),
}


def shortened(key: str) -> BlobCorruptError:
    """Return the error for a file that became shorter while it was read."""
    return BlobCorruptError("the file became shorter while it was read", operation="get", key=key)
