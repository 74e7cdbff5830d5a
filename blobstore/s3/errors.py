"""What an S3 server's answers mean in the words of the contract.

A refusal, or no answer, is an error of the contract; this module alone decides which (design 0003, E1). The values of
an answer are read once it is known to answer what was asked (design 0003, E4).
"""

import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from typing_extensions import override

from blobstore.base import Created, range_size_bytes
from blobstore.errors import (
    AccessDeniedError,
    BlobDeletedError,
    BlobNotFoundError,
    CapabilityMissingError,
    InvalidRequestError,
    StoreError,
    StoreFullError,
    StoreMissingError,
    StoreUnavailableError,
)

# What the SDK makes of an answer.
Answer = dict[str, Any]


# Words of a refusal. New credentials of the standard chain may do what these could not.
STALE_CREDENTIALS: Final = re.compile(
    "ExpiredToken(Exception)?|Invalid(AccessKeyId|Token)|RequestExpired|SignatureDoesNotMatch|TokenRefreshRequired"
)
_TOO_MANY: Final = (
    "(Bandwidth|Request)LimitExceeded|SlowDown(Read|Write)?|(RequestThrottled|Throttling|TooManyRequests)(Exception)?"
)
# The body was altered on the way, or did not come whole; what is sent again is read again.
_DAMAGED: Final = "BadDigest|IncompleteBody|InvalidDigest|RequestTimeout|XAmzContent(Checksum|SHA256)Mismatch"
_AGAIN: Final = "ConditionalRequestConflict|InternalError|OperationAborted|ServiceUnavailable"
# What a server says of a bucket that another region or place has.
ELSEWHERE: Final = (
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
)
_ELSEWHERE_HINT: Final = "the bucket is in another region or place: set region or endpoint_url"

# What a refusal means, by its word or its status, and the hint: the first row that fits counts.
_MEANINGS: Final[tuple[tuple[str, Container[int], type[StoreError], str], ...]] = (
    ("InsufficientCapacity|(Service)?QuotaExceeded|(XMinio)?StorageFull", {507}, StoreFullError, ""),
    (
        "MethodNotAllowed|MissingContentLength|NotImplemented|UnsupportedArgument",
        {405, 411, 501},
        CapabilityMissingError,
        "run `tidemark doctor` to learn what this blob store can do",
    ),
    ("RequestTimeTooSkewed", (), StoreUnavailableError, "set this machine's clock: it is too far from the server's"),
    (f"{_TOO_MANY}|{_DAMAGED}|{_AGAIN}", {409, 429, *range(500, 1000)}, StoreUnavailableError, ""),
    ("NoSuchBucket", (), StoreMissingError, ""),
    ("|".join(ELSEWHERE), {301, 302, 303, 307, 308}, InvalidRequestError, _ELSEWHERE_HINT),
    (
        STALE_CREDENTIALS.pattern,
        (),
        AccessDeniedError,
        "the credentials that the standard chain gives on this machine are unknown here, wrong or expired",
    ),
    ("(?s:KMS.*)", (), AccessDeniedError, "the credentials may not use the KMS key, or it is disabled"),
    (
        "",
        {401, 403},
        AccessDeniedError,
        "`tidemark doctor --policy ROLE` prints what writer, restorer and collector need",
    ),
    ("", {404}, BlobNotFoundError, ""),
)

_HOST: Final = re.compile(r"[A-Za-z0-9.:_\[\]-]{1,260}")
_MESSAGE_LENGTH_MAX: Final = 200
_WORD_LENGTH_MAX: Final = 100
# What is said of a signature quotes what was signed.
_QUOTED: Final = re.compile(r"authorization|security-token|signature|canonical", re.IGNORECASE)

WRITE_ID: Final = "tidemark-write-id"
TTL_MS: Final = "tidemark-ttl-ms"

_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_TTL: Final = re.compile(r"[0-9]{1,18}")


def showable(message: object) -> str:
    """Return what of a server's message may be shown: cut short, and nothing that quotes the request.

    A word as long as a session token may be one.
    """
    words = str(message or "").split()
    text = " ".join(word if len(word) <= _WORD_LENGTH_MAX else "***" for word in words)
    return "" if _QUOTED.search(text) else text[:_MESSAGE_LENGTH_MAX]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is not the one hoped for.

    Only what may be shown: the rest of such an answer can quote the headers of the request, a session token among them.
    """

    status: int
    # The store's word for it; only the status where it says none, as after a HEAD.
    code: str
    message: str = ""
    request_id: str = ""
    retry_after_s: float | None = None
    # The store's clock, None if it did not say.
    date_ms: int | None = None
    # The host and port that a redirect names.
    location: str = ""
    # What was asked for is a delete marker of a bucket with versions.
    is_deleted: bool = False

    @override
    def __str__(self) -> str:
        code = f"{self.code} ({self.status})" if self.code != str(self.status) else self.code
        message = f": {self.message}" if self.message else ""
        return f"{code}{message}" + (f" [request {self.request_id}]" if self.request_id else "")


def read_refusal(response: Mapping[str, Any]) -> Refusal:
    """Read what the SDK made of a refusal."""
    error = response.get("Error", {})
    answer = response.get("ResponseMetadata", {})
    headers = answer.get("HTTPHeaders", {})
    status = int(answer.get("HTTPStatusCode") or 0)
    code, message = str(error.get("Code") or status)[:_WORD_LENGTH_MAX], str(error.get("Message") or "")
    date_ms = read_date_ms(headers.get("date"))
    return Refusal(
        status=status,
        code=code,
        message="" if STALE_CREDENTIALS.fullmatch(code) else showable(message),
        request_id=str(answer.get("RequestId") or headers.get("x-amz-request-id") or "")[:_WORD_LENGTH_MAX],
        retry_after_s=_retry_after_s(headers.get("retry-after"), date_ms),
        date_ms=date_ms,
        location=_host(str(error.get("Endpoint") or headers.get("location") or "")),
        is_deleted=error.get("ResourceType") == "DeleteMarker" or headers.get("x-amz-delete-marker") == "true",
    )


def _host(location: str) -> str:
    """Return the host and port that a redirect names; nothing of its path, which may quote the request."""
    try:
        host = urlsplit(location if "//" in location else f"//{location}").netloc
    except ValueError:
        return ""
    return host if _HOST.fullmatch(host) else ""


def read_date_ms(date: str | None) -> int | None:
    """Read a date of a header; None if it is none."""
    with suppress(TypeError, ValueError, OverflowError):
        return int(parsedate_to_datetime(date).timestamp()) * 1000 if date else None
    return None


def _retry_after_s(text: str | None, date_ms: int | None) -> float | None:
    """Read a number of seconds, or a time by the server's clock."""
    if text is not None and text.isascii() and text.isdigit():
        return float(text)
    until_ms = read_date_ms(text)
    return None if until_ms is None or date_ms is None else max(0.0, (until_ms - date_ms) / 1000)


class RefusedError(Exception):
    """The store answered with a refusal; the caller knows what that means."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(str(refusal))


class BrokenError(Exception):
    """No answer came, or only a part of one. Where it is `sent`, the store may yet carry the request out."""

    def __init__(self, reason: str, *, sent: bool = True) -> None:
        self.sent = sent
        super().__init__(reason)


def classify(refusal: Refusal, *, operation: str, key: str) -> StoreError:
    """Return the error that a refusal is to the caller of an operation."""
    code, status = refusal.code, refusal.status
    if refusal.is_deleted and status in {404, 405}:
        return BlobDeletedError(str(refusal), operation=operation, key=key)
    fits = (row[2:] for row in _MEANINGS if status in row[1] or (row[0] and re.fullmatch(row[0], code)))
    kind, hint = next(fits, (InvalidRequestError, "the blob store does not understand the request"))
    if hint == _ELSEWHERE_HINT:
        operation = "connect"  # as for all that a wrong setting leads to: exit code 2
        if refusal.location:
            hint = f"redirects are not followed: set endpoint_url to {refusal.location} if you trust it, or set region"
    error = kind(str(refusal), operation=operation, key=key, hint=hint)
    if isinstance(error, StoreUnavailableError):
        error.retry_after_s = refusal.retry_after_s
        error.asks_for_less = status in {429, 503} or re.fullmatch(_TOO_MANY, code) is not None
    return error


def date_ms(answer: Answer) -> int | None:
    """Return the store's clock by the date of an answer, in whole seconds."""
    return read_date_ms(answer["ResponseMetadata"].get("HTTPHeaders", {}).get("date"))


def read_created(answer: Answer, operation: str, key: str) -> Created:
    """Return when a PUT was answered: at most a second before the time that the object has (design 0003, C1)."""
    created_at_ms = date_ms(answer)
    if created_at_ms is None:
        # It was created; without a time nothing can be built on it, and asking again shows the time.
        raise StoreUnavailableError("the answer has no date", operation=operation, key=key)
    return Created(created_at_ms=created_at_ms)


def whole_seconds_ms(moment: datetime) -> int:
    """Cut a time to the precision of all answers: some have milliseconds, all have seconds (design 0003, C1)."""
    return int(moment.timestamp()) * 1000


def read_ttl_ms(answer: Answer) -> int | None:
    """Return the TTL that an object was created with."""
    text = str(answer.get("Metadata", {}).get(TTL_MS, ""))
    return int(text) if _TTL.fullmatch(text) else None


def read_promised_bytes(answer: Answer, start: int, size_bytes: int | None, *, key: str) -> int:
    """Check that an answer is about the range that was asked for; return how many bytes follow (design 0003, E4)."""
    length = int(answer["ContentLength"])
    if start == 0 and size_bytes is None:
        return length
    found = _CONTENT_RANGE.fullmatch(str(answer.get("ContentRange", "")))
    if found is None:
        raise StoreUnavailableError("the answer does not say which range it is", operation="get", key=key)
    first, last, total = map(int, found.groups())
    end = total if size_bytes is None else min(start + size_bytes, total)
    if first != start or last != end - 1 or length != end - start:
        raise StoreUnavailableError(f"the answer is another range: {found[0]}", operation="get", key=key)
    return range_size_bytes(start, size_bytes, blob_size_bytes=total, key=key)


@contextmanager
def answers(operation: str, key: str) -> Iterator[None]:
    """Read answers within: one that lacks what it must have counts as no answer (design 0003, E4)."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        message = f"the answer lacks something, or says it in a strange way: {error!r}"
        raise StoreUnavailableError(message, operation=operation, key=key) from error


def store_error(error: RefusedError | BrokenError, operation: str, key: str) -> StoreError:
    """Return the error of the contract that the end of a request is."""
    if isinstance(error, RefusedError):
        return classify(error.refusal, operation=operation, key=key)
    return StoreUnavailableError(str(error), operation=operation, key=key)
