"""What a `FaultProxy` does to which request: the requests as S3 sees them, the faults, and the rules that join both."""

import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from random import Random
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import msgspec

Headers = Sequence[tuple[str, str]]
# The operations of S3 by method and the query key that distinguishes them; the first that fits counts.
_OF_AN_OBJECT = (
    ("PUT", "partNumber", "UploadPart"),
    ("PUT", "tagging", "PutObjectTagging"),
    ("PUT", "", "PutObject"),
    ("GET", "tagging", "GetObjectTagging"),
    ("GET", "uploadId", "ListParts"),
    ("GET", "", "GetObject"),
    ("HEAD", "", "HeadObject"),
    ("POST", "uploads", "CreateMultipartUpload"),
    ("POST", "uploadId", "CompleteMultipartUpload"),
    ("DELETE", "tagging", "DeleteObjectTagging"),
    ("DELETE", "uploadId", "AbortMultipartUpload"),
    ("DELETE", "", "DeleteObject"),
)
_OF_A_BUCKET = (
    ("GET", "list-type", "ListObjectsV2"),
    ("GET", "uploads", "ListMultipartUploads"),
    ("GET", "lifecycle", "GetBucketLifecycleConfiguration"),
    ("PUT", "lifecycle", "PutBucketLifecycleConfiguration"),
    ("DELETE", "lifecycle", "DeleteBucketLifecycle"),
    ("POST", "delete", "DeleteObjects"),
    ("GET", "", "ListObjects"),
    ("HEAD", "", "HeadBucket"),
    ("PUT", "", "CreateBucket"),
    ("DELETE", "", "DeleteBucket"),
)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a request."""

    method: str
    # As it was sent: percent-encoded path and query.
    target: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def operation(self) -> str:
        """The S3 operation of a request that has the bucket in its path; "" if it is none that is known."""
        parts = urlsplit(self.target)
        query = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
        table = _OF_AN_OBJECT if parts.path.strip("/").count("/") else _OF_A_BUCKET
        return next((name for method, key, name in table if method == self.method and (not key or key in query)), "")

    @property
    def plain_target(self) -> str:
        """The target without percent-encoding."""
        return unquote(self.target)

    def header(self, name: str) -> str:
        """The value of a header; "" if it is not there."""
        return header_of(self.headers, name)


def header_of(headers: Headers, name: str) -> str:
    """The value of a header; "" if it is not there."""
    return next((value for key, value in headers if key.lower() == name.lower()), "")


Predicate = Callable[[Request], bool]


def every(request: Request) -> bool:
    """Match all requests."""
    return True


def on(*operations: str, key: str = "") -> Predicate:
    """Match S3 operations (all if none is named), with a substring in the path or query."""

    def match(request: Request) -> bool:
        return (not operations or request.operation in operations) and key in request.plain_target

    return match


def on_method(*methods: str, containing: str = "") -> Predicate:
    """Match HTTP methods, with a substring in the path or query."""
    return lambda request: request.method in methods and containing in request.plain_target


class Stage(enum.Enum):
    """Where in an exchange something happens."""

    # The head of the request has come, and nothing was sent on.
    REQUEST = "request"
    # A part of the request's body was sent on.
    UPLOAD = "upload"
    # The server has carried out the request and answered in full, and nothing of it was passed on.
    ANSWER = "answer"
    # The head and a part of the answer's body were passed on.
    BODY = "body"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer with its whole body."""

    status: int
    reason: str = "Injected"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    def header(self, name: str) -> str:
        """The value of a header; "" if it is not there."""
        return header_of(self.headers, name)

    def with_headers(self, **changed: str | None) -> "Answer":
        """The same with some headers set, or with None removed; `_` stands for `-`."""
        changes = {name.replace("_", "-").lower(): value for name, value in changed.items()}
        kept = [(name, value) for name, value in self.headers if name.lower() not in changes]
        kept += [(name, value) for name, value in changes.items() if value is not None]
        return msgspec.structs.replace(self, headers=tuple(kept))


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """Break the connection: with a reset, or politely, with a FIN after the bytes that were sent.

    Where there is no body to break it happens before the head: a request is not sent on, an answer is lost.
    """

    at: Stage
    # Of the body, for UPLOAD and BODY; half of it if not given.
    after_bytes: int | None = None
    polite: bool = False


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer in the server's place: without asking it, or after it has carried out the request."""

    answer: Answer
    after_upstream: bool = False


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """Change the server's answer, held in memory for that. Content-Length follows the new body."""

    change: Callable[[Answer], Answer]
    name: str = "rewrite"


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """Stop and say nothing: for a while, until something has happened, or until the client goes away."""

    at: Stage
    seconds: float | None = None
    until: asyncio.Event | None = None


class Drip(msgspec.Struct, frozen=True, kw_only=True):
    """Pass the body of the answer on at this rate."""

    bytes_per_s: int


class FlipUpload(msgspec.Struct, frozen=True, kw_only=True):
    """Flip the lowest bit of one byte of the request's body."""

    at_byte: int = 0


Fault = Break | Reply | Rewrite | Hang | Drip | FlipUpload


def name_of(fault: Fault | None) -> str:
    """What the log calls a fault."""
    match fault:
        case None:
            return ""
        case Break(at=at, polite=polite):
            return f"{'close' if polite else 'reset'} {at.value}"
        case Reply(answer=answer):
            return f"reply {answer.status}"
        case Rewrite(name=name):
            return name
        case Hang(at=at):
            return f"hang {at.value}"
        case other:
            return "drip" if isinstance(other, Drip) else "flip upload"


def lose_answer(*, polite: bool = False) -> Fault:
    """The server does what it is asked, and nobody hears of it."""
    return Break(at=Stage.ANSWER, polite=polite)


def s3_error(
    status: int,
    code: str,
    message: str = "injected",
    *,
    headers: Mapping[str, str] | None = None,
    after_upstream: bool = False,
) -> Fault:
    """An error in the form of S3; a status of 200 makes it the error that comes late."""
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
        "<RequestId>injected-request</RequestId><HostId>injected-host</HostId></Error>"
    )
    with_type = (("Content-Type", "application/xml"), ("x-amz-request-id", "injected-request"))
    answer = Answer(status=status, headers=(*with_type, *(headers or {}).items()), body=body.encode())
    return Reply(answer=answer, after_upstream=after_upstream)


def slow_down(retry_after_s: int | None = None) -> Fault:
    """503 SlowDown; the server never sees the request."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return s3_error(503, "SlowDown", "Please reduce your request rate.", headers=headers)


def conditional_conflict() -> Fault:
    """409: another conditional request is at work on the key."""
    return s3_error(409, "ConditionalRequestConflict", "A conflicting conditional operation is under way.")


def expired_token() -> Fault:
    """400: the session token is too old."""
    return s3_error(400, "ExpiredToken", "The provided token has expired.")


def truncated(size_bytes: int) -> Fault:
    """A body cut short whose Content-Length says just that: it looks whole."""
    return Rewrite(
        name="truncate", change=lambda answer: msgspec.structs.replace(answer, body=answer.body[:size_bytes])
    )


def flipped(at_byte: int = 0) -> Fault:
    """One bit of the answer's body is another; a body that ends before stays as it is."""

    def flip(answer: Answer) -> Answer:
        return msgspec.structs.replace(answer, body=flip_bit(answer.body, at_byte))

    return Rewrite(name="flip", change=flip)


def substituted(body: bytes) -> Fault:
    """Other bytes under the same head: a wrong object, a stale version, bytes of another range."""
    return Rewrite(name="substitute", change=lambda answer: msgspec.structs.replace(answer, body=body))


def shifted_range(by_bytes: int = 1) -> Fault:
    """The answer says itself that it has another range than the one asked for."""

    def shift(answer: Answer) -> Answer:
        span, _, whole = answer.header("Content-Range").removeprefix("bytes ").partition("/")
        first, _, last = span.partition("-")
        if not last:
            return answer
        return answer.with_headers(content_range=f"bytes {int(first) + by_bytes}-{int(last) + by_bytes}/{whole}")

    return Rewrite(name="shift range", change=shift)


def flip_bit(data: bytes, at_byte: int) -> bytes:
    """The data with the lowest bit of one byte turned over."""
    if not 0 <= at_byte < len(data):
        return data
    return data[:at_byte] + bytes((data[at_byte] ^ 1,)) + data[at_byte + 1 :]


class Rule(msgspec.Struct, kw_only=True):
    """A fault, and when it strikes."""

    fault: Fault
    when: Predicate = every
    # How often it strikes in all; None: always.
    times: int | None = 1
    # Of the requests that match, this share is struck.
    probability: float = 1.0
    # This many requests that match go by first.
    after: int = 0
    # How many requests have matched, and how many of them were struck.
    matched: int = 0
    struck: int = 0

    def strikes(self, request: Request, rng: Random) -> bool:
        """Whether this request is struck; counts it."""
        if (self.times is not None and self.struck >= self.times) or not self.when(request):
            return False
        self.matched += 1
        if self.matched <= self.after or (self.probability < 1 and rng.random() >= self.probability):
            return False
        self.struck += 1
        return True


def soak_rules(lose: float, reset: float) -> tuple[Rule, ...]:
    """Rules for long runs.

    Args:
        lose: Share of requests whose answer is lost after the server has carried them out.
        reset: Share of requests whose connection breaks: half of them before the server sees them, half in mid upload
            or in the mid of the answer's body; all of those that have neither before the server sees them.
    """
    # A rule is asked only about what those before it have let go by.
    first, second = _share(reset / 2, of=1 - lose), _share(reset / 2, of=1 - lose - reset / 2)
    with_body = ("GET", "PUT", "POST")
    return (
        Rule(fault=lose_answer(), times=None, probability=lose),
        Rule(fault=Break(at=Stage.UPLOAD), when=on_method("PUT", "POST"), times=None, probability=first),
        Rule(fault=Break(at=Stage.BODY), when=on_method("GET"), times=None, probability=first),
        Rule(fault=Break(at=Stage.REQUEST), when=on_method(*with_body), times=None, probability=second),
        Rule(
            fault=Break(at=Stage.REQUEST),
            when=lambda request: request.method not in with_body,
            times=None,
            probability=_share(reset, of=1 - lose),
        ),
    )


def _share(part: float, *, of: float) -> float:
    return min(1.0, part / of) if of > 0 else 0.0
