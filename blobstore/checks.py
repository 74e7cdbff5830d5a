"""What a store checks before it does anything: the arguments of a call, against the contract in `base.py`."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from blobstore.base import DELETE_BATCH_MAX, KEY_BYTES_MAX, LIST_PAGE_MAX, Body, check_key
from blobstore.errors import InvalidRequestError


def check_put(key: str, ttl_ms: int | None, operation: str) -> None:
    """Refuse a key that is not valid, and a TTL that is not at least a millisecond."""
    check_key(key, operation)
    if ttl_ms is not None and ttl_ms < 1:
        raise InvalidRequestError(f"invalid TTL: {ttl_ms} ms", operation=operation, key=key)


def check_not_within(others: Sequence[str], operation: str) -> None:
    """Refuse a place within other stores, if there are any."""
    if others:
        raise InvalidRequestError(
            f"lies within {others[0]!r}, which is in use",
            operation=operation,
            key=others[0],
            hint="choose a place beside it: what is below it would be taken for its own",
        )


def check_list(prefix: str, limit: int) -> None:
    """Refuse a prefix that no key can have, and a limit outside 1 to 1,000."""
    operation = "list_page"
    if not 1 <= limit <= LIST_PAGE_MAX:
        raise InvalidRequestError(f"{limit} is not within 1 and {LIST_PAGE_MAX}", operation=operation, key=prefix)
    if len(prefix) > KEY_BYTES_MAX:
        raise InvalidRequestError("is longer than a key", operation=operation, key=repr(prefix))
    if prefix:
        # The beginning of a component follows the grammar of a whole one, so that only the last `/` is special.
        check_key(prefix.removesuffix("/"), operation)


def check_delete(keys: Sequence[str]) -> None:
    """Raise `InvalidRequestError` for too many keys at once or one that is not valid."""
    if len(keys) > DELETE_BATCH_MAX:
        raise InvalidRequestError(f"{len(keys)} keys are more than {DELETE_BATCH_MAX}", operation="delete")
    for key in keys:
        check_key(key, "delete")


def check_read(key: str, start: int, size_bytes: int | None) -> None:
    """Refuse a key that is not valid, and a range that no blob has, before the blob is looked for."""
    check_key(key, "get")
    if start < 0 or (size_bytes is not None and size_bytes < 0):
        raise InvalidRequestError(f"the range of {size_bytes} bytes from {start} is negative", operation="get", key=key)


def range_size_bytes(start: int, size_bytes: int | None, *, blob_size_bytes: int, key: str) -> int:
    """Return the number of bytes of a range.

    Raises:
        InvalidRequestError: It is not within the blob; an empty range at the very end is.
    """
    wanted = blob_size_bytes - start if size_bytes is None else size_bytes
    if wanted < 0 or start + wanted > blob_size_bytes:
        raise InvalidRequestError(
            f"the range of {size_bytes} bytes from {start} is not within {blob_size_bytes} bytes",
            operation="get",
            key=key,
        )
    return wanted


async def checked_chunks(body: Body, *, operation: str, key: str) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of a body, and check that it has as many bytes as it claims.

    Raises:
        InvalidRequestError: Instead of the chunk that is too much, or at the end for bytes that are missing.
    """
    seen = 0
    async with aclosing(body.read_chunks()) as chunks:
        async for chunk in chunks:
            seen += len(chunk)
            if seen > body.size_bytes:
                break
            yield chunk
    if seen != body.size_bytes:
        raise InvalidRequestError(
            f"the body yields {'more' if seen > body.size_bytes else seen} instead of {body.size_bytes} bytes",
            operation=operation,
            key=key,
            hint="what is read changed meanwhile, or its size was given wrong; nothing was written",
        )
