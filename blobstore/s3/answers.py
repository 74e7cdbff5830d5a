"""What an S3 server's answers say in the words of the contract, once they are known to answer what was asked."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Final

from blobstore.base import Created
from blobstore.checks import range_size_bytes
from blobstore.errors import AccessDeniedError, StoreError, StoreUnavailableError
from blobstore.s3.client import Answer, date_ms
from blobstore.s3.errors import BrokenError, RefusedError, classify

WRITE_ID: Final = "tidemark-write-id"
TTL_MS: Final = "tidemark-ttl-ms"

_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_TTL: Final = re.compile(r"[0-9]{1,18}")


def read_created(answer: Answer, operation: str, key: str) -> Created:
    """When a PUT was answered: at or after the creation time that the object has."""
    created_at_ms = date_ms(answer)
    if created_at_ms is None:
        # It was created; without a time nothing can be built on it, and asking again tells the time.
        raise StoreUnavailableError("the answer has no date", operation=operation, key=key)
    return Created(created_at_ms=created_at_ms)


def read_created_at_ms(answer: Answer) -> int:
    """When an object was created, as HEAD tells it."""
    return whole_seconds_ms(answer["LastModified"])


def whole_seconds_ms(moment: datetime) -> int:
    """A time as every answer of the store can tell it: some do in milliseconds, all in seconds (design 0003, C1)."""
    return int(moment.timestamp()) * 1000


def read_ttl_ms(answer: Answer) -> int | None:
    """The TTL that an object was born with."""
    text = str(answer.get("Metadata", {}).get(TTL_MS, ""))
    return int(text) if _TTL.fullmatch(text) else None


def read_promised_bytes(answer: Answer, start: int, size_bytes: int | None, *, key: str) -> int:
    """How many bytes follow an answer to `get`, once it is known to be about the range that was asked for (0003, E4).

    Raises:
        InvalidRequestError: The blob is too short for the range.
        StoreUnavailableError: The answer is about another range.
    """
    length = int(answer["ContentLength"])
    if start == 0 and size_bytes is None:
        return length
    told = _CONTENT_RANGE.fullmatch(str(answer.get("ContentRange", "")))
    if told is None:
        raise StoreUnavailableError("the answer does not say which range it is", operation="get", key=key)
    first, last, total = map(int, told.groups())
    end = total if size_bytes is None else min(start + size_bytes, total)
    if first != start or last != end - 1 or length != end - start:
        raise StoreUnavailableError(f"the answer is another range: {told[0]}", operation="get", key=key)
    return range_size_bytes(start, size_bytes, blob_size_bytes=total, key=key)


@contextmanager
def answers(operation: str, key: str) -> Iterator[None]:
    """Read answers within: one that lacks what it must have is none (design 0003, E4)."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise StoreUnavailableError(
            f"the answer lacks something, or says it in a strange way: {error!r}", operation=operation, key=key
        ) from error


def store_error(error: RefusedError | BrokenError, operation: str, key: str) -> StoreError:
    """The error of the contract that a request's end is."""
    if isinstance(error, RefusedError):
        return classify(error.refusal, operation=operation, key=key)
    return StoreUnavailableError(str(error), operation=operation, key=key)


def as_unavailable(error: StoreError, operation: str, key: str) -> StoreError:
    """The error of a create that did not happen, and may when it is tried again: a 412 is no fault of the caller."""
    if isinstance(error, StoreUnavailableError | AccessDeniedError):
        return error
    return StoreUnavailableError(str(error), operation=operation, key=key)
