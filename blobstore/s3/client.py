"""Talking to an S3 server: with `gets` and `threads` the only importer of aiobotocore, botocore, aiohttp and urllib3.

One client for one event loop, and the bucket that it is asked about. The client signs, sends, and separates refusals
from broken connections. It does not try again, but for the HTTP client, which may repeat a request without a body
once. And it lets nothing out that could hold a secret: credentials are the standard chain's affair, and the exceptions
of the libraries, which carry whole requests, end here (design 0003, E5).
"""

import asyncio
import contextlib
import functools
import ipaddress
import os
import socket
import ssl
import traceback
from collections.abc import AsyncGenerator, Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import aiohttp
import botocore.auth
import botocore.loaders
import botocore.parsers
import botocore.utils
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from botocore import exceptions as sdk
from typing_extensions import override

from blobstore import installed_release
from blobstore.base import Buffer
from blobstore.errors import AccessDeniedError, InvalidRequestError
from blobstore.s3.errors import STALE_CREDENTIALS, Answer, BrokenError, Refusal, RefusedError, read_refusal, store_error
from blobstore.s3.gets import SdkClient
from blobstore.s3.settings import S3Settings, may_hold_credentials
from blobstore.s3.threads import IN_THREAD, ThreadedSession
from blobstore.wrappers.forwarding import Bandwidth

# Reads a body from its start: called once for each request that sends it.
ReadBody = Callable[[], AsyncGenerator[Buffer, None]]

_SIGNATURE: Final = "s3v4-known-hash"
_FIRST_REGION: Final = "us-east-1"
# What of a body has to be taken within the read timeout.
_PIECE_BYTES: Final = 256 * 1024
# Clients whose credentials have ended and whose calls may still be under way.
_RETIRED_MAX: Final = 4
# So long a server that was never reached may take to start, before it counts as one that is not there.
_STARTING_S: Final = 0.5
# Reads the SDK's description of S3 once a process: four fifths of what a further client costs.
_loader: Final = functools.cache(botocore.loaders.create_loader)
_NO_SUCH_HOST: Final = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"})
_NO_CREDENTIALS: Final = (
    sdk.NoCredentialsError,
    sdk.PartialCredentialsError,
    sdk.CredentialRetrievalError,
    sdk.TokenRetrievalError,
    sdk.UnauthorizedSSOTokenError,
)
_NO_CONNECTION: Final = (sdk.EndpointConnectionError, sdk.ConnectTimeoutError, sdk.SSLError)
_LOOPBACK_NAMES: Final = frozenset({"localhost", "localhost.localdomain"})


class SentBody(Payload):
    """A body that is read while it is sent, and sent once (design 0003, W3, W4).

    Attributes:
        error: What reading it raised; the HTTP client would hide that.
    """

    def __init__(
        self, read: ReadBody, *, size_bytes: int, sha256: str, stall_s: float, bandwidth: Bandwidth | None = None
    ) -> None:
        super().__init__(None)
        self._size = size_bytes
        self._read = read
        self._stall_s = stall_s
        self._bandwidth = bandwidth
        self._is_used = False
        self.sha256 = sha256
        self.error: Exception | None = None

    @property
    @override
    def consumed(self) -> bool:
        # True once the first byte may have left: then the client does not send it a second time by itself.
        return self._is_used

    @override
    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    @override
    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._is_used = True
        try:
            async with contextlib.aclosing(self._read()) as chunks:
                async for chunk in chunks:
                    whole = memoryview(chunk)
                    for at in range(0, len(whole), _PIECE_BYTES):
                        await self._write_piece(writer, whole[at : at + _PIECE_BYTES])
        except aiohttp.ClientError:
            raise
        except Exception as error:
            if not isinstance(error, ConnectionError):
                self.error = error
            raise

    async def _write_piece(self, writer: AbstractStreamWriter, piece: memoryview) -> None:
        if self._bandwidth is not None:
            await self._bandwidth.pass_through(len(piece))
        # The HTTP client's own timeout begins when all of the body is gone.
        try:
            async with asyncio.timeout(self._stall_s):
                await writer.write(piece)
        except TimeoutError:
            raise ConnectionResetError(f"the server takes nothing for {self._stall_s:g} s") from None

    @override
    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a body that is sent has no text")

    def read(self) -> bytes:
        """Refuse: botocore takes for a body what has this method, and never calls it."""
        raise TypeError("a body that is sent is read by the HTTP client alone")


class _KnownHashAuth(botocore.auth.S3SigV4Auth):  # type: ignore[misc]  # the SDK has no types
    """Signs the hash that a `SentBody` knows, where botocore's own would read the body, blocking, to find it."""

    def payload(self, request: Any) -> str:
        body = request.data
        return body.sha256 if isinstance(body, SentBody) else str(super().payload(request))


botocore.auth.AUTH_TYPE_MAPS[_SIGNATURE] = _KnownHashAuth


class S3Client:
    """A connection pool to one endpoint, opened by the first call and bound to its event loop."""

    def __init__(self, settings: S3Settings, bandwidth: Bandwidth | None = None) -> None:
        self._settings = settings
        self._bandwidth = bandwidth
        self._opening = asyncio.Lock()
        self._client: SdkClient | None = None
        # Whether the credentials of this client have ever been accepted.
        self._is_proven = False
        # Whether a request has ever come to a server, and since when nothing else was met than what a wrong endpoint
        # leads to; None: it was not met.
        self._was_reached = False
        self._misled_since_s: float | None = None
        self._exits = contextlib.AsyncExitStack()
        self._retired: list[contextlib.AsyncExitStack] = []

    def _misled(self, why: str) -> Exception:
        """Return what a failure is that never goes away if the endpoint is wrong; a server may be starting, too."""
        now_s = asyncio.get_running_loop().time()
        self._misled_since_s = self._misled_since_s or now_s
        if now_s - self._misled_since_s < _STARTING_S:
            return BrokenError(f"no connection: {why}", sent=False)
        message = f"no connection: {why}"
        hint = "check scheme, host and port of endpoint_url (or region), and whether the server runs"
        return InvalidRequestError(message, operation="connect", hint=hint)

    async def close(self) -> None:
        self._client = None
        for exits in (*self._retired, self._exits):
            await exits.aclose()

    async def call(self, method: str, **arguments: Any) -> Answer:
        """Call a method of the SDK's client; arguments that are None are left out.

        Raises:
            RefusedError: The store said no.
            BrokenError: It did not say anything, or not whole.
            AccessDeniedError: There are no credentials.
            InvalidRequestError: The settings do not lead to a server that may be talked to.
            Exception: Whatever reading the body raised.
        """
        client = await self._open()
        outcome: Refusal | Exception
        why = ""
        try:
            answer = await client.call(method, {k: v for k, v in arguments.items() if v is not None})
        except sdk.ClientError as error:
            outcome = read_refusal(error.response)
        except Exception as error:  # noqa: BLE001  (translated, and what is not the libraries' goes on as it is)
            body = arguments.get("Body")
            outcome = (body.error if isinstance(body, SentBody) else None) or _failure(error)
            if isinstance(outcome, BrokenError) and not self._was_reached:
                why = _why_no_server(error)
        else:
            self._is_proven = self._was_reached = True
            return answer
        if why:
            raise self._misled(why)
        # From now on a server is there: what was sent to it may be carried out, whatever becomes of it later.
        self._was_reached |= not isinstance(outcome, BrokenError) or outcome.sent
        self._misled_since_s = None
        # Out here: the library's error, which holds the request with its signature and token, must not become context.
        if isinstance(outcome, Exception):
            raise outcome
        is_stale = bool(STALE_CREDENTIALS.fullmatch(outcome.code))
        # That the credentials have ended AWS says by a 400, and to a HEAD it says no more than that.
        is_stale |= method.startswith("head_") and outcome.code == "400"
        if outcome.status not in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN} and not is_stale:
            self._is_proven = True
        if is_stale and await self._renew(client):
            raise BrokenError(f"{outcome}; the credentials are looked up again", sent=False)
        raise RefusedError(outcome)

    def send(self, read: ReadBody, *, size_bytes: int, sha256: str) -> SentBody:
        """Return a body for `call`, which fails where the server takes none of it for as long as the read timeout."""
        stall_s = self._settings.read_timeout_s
        return SentBody(read, size_bytes=size_bytes, sha256=sha256, stall_s=stall_s, bandwidth=self._bandwidth)

    async def read(self, answer: Answer) -> AsyncGenerator[bytes, None]:
        """Yield the body of an answer in non-empty chunks; the connection is closed if it is not read to its end."""
        stream = answer["Body"].raw_stream.content
        is_whole = False
        try:
            while chunk := await _read_some(stream):
                yield chunk
            is_whole = True
        finally:
            if not is_whole:
                abandon(answer)

    async def _renew(self, client: SdkClient) -> bool:
        """Drop a client whose credentials have ended; return whether new ones may be there."""
        if client is not self._client:
            return True  # another call has renewed it
        if not self._is_proven:
            return False
        self._client = None
        # Calls that are under way go on with the old one for a while.
        self._retired.append(self._exits)
        self._exits = contextlib.AsyncExitStack()
        if len(self._retired) > _RETIRED_MAX:
            await self._retired.pop(0).aclose()
        return True

    async def _open(self) -> SdkClient:
        if self._client is not None:
            return self._client
        async with self._opening:
            if self._client is None:
                self._is_proven = False
                self._client = await self._create()
        return self._client

    async def _create(self) -> SdkClient:
        settings = self._settings
        senders: list[ThreadedSession] = []

        def make_sender(**arguments: Any) -> ThreadedSession:
            senders.append(ThreadedSession(**arguments))
            return senders[-1]

        session = get_session()
        # The SDK's own ways to name itself and to read a time cost an eighth of a small request (design 0008, R12).
        session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=read_time)
        style = "path" if settings.path_style else "virtual"
        addressing = None if settings.path_style is None else {"addressing_style": style}
        config = AioConfig(
            signature_version=_SIGNATURE,
            user_agent=f"tidemark/{installed_release()} {session.user_agent()}",
            # `wrappers.retry` alone tries again. The hash of a body is signed: no second checksum is needed.
            retries={"total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=settings.connect_timeout_s,
            read_timeout=settings.read_timeout_s,
            max_pool_connections=settings.connections_max,
            http_session_cls=make_sender,
            s3=addressing,
        )
        verified_by = _verified_by(settings)
        try:
            session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
            # AWS_REGION is what all other SDKs read, and this one does not.
            region = settings.region or os.environ.get("AWS_REGION") or session.get_config_variable("region")
            await _check_ca_bundle(settings.ca_bundle or session.get_config_variable("ca_bundle"))
            where = {"region_name": region or _FIRST_REGION, "endpoint_url": settings.endpoint_url or None}
            made = session.create_client("s3", **where, verify=verified_by, config=config)
            client = await self._exits.enter_async_context(made)
        except (sdk.BotoCoreError, ValueError, OSError) as error:
            message = f"no client can be made: {type(error).__name__}"
            hint = "check endpoint_url, region, ca_bundle and the profile in the environment or ~/.aws/config"
            raise InvalidRequestError(message, operation="open", hint=hint) from None
        endpoint = client.meta.endpoint_url
        check_endpoint(endpoint, allow_http=settings.allow_http)
        if verified_by is False and not endpoint.startswith("http:"):
            raise InvalidRequestError("TLS would not be verified", operation="open")
        if endpoint.startswith("http:") and not settings.allow_http and botocore.utils.get_environ_proxies(endpoint):
            message = "the way to this machine leads through a proxy, in the open"
            hint = f"put {urlsplit(endpoint).hostname} into NO_PROXY"
            raise InvalidRequestError(message, operation="open", hint=hint)
        # Some servers never answer it, and the client would wait for ever.
        client.meta.events.register_last("before-call.s3", _drop_expect)
        client.meta.events.register_last("before-call.s3.HeadBucket", _ask_no_region)
        (sender,) = senders
        return SdkClient(client, sender, _SIGNATURE)


class S3Bucket:
    """A bucket and the client that asks it."""

    def __init__(self, name: str, settings: S3Settings, bandwidth: Bandwidth | None = None) -> None:
        self.name = name
        self.client = S3Client(settings, bandwidth)

    async def call(self, method: str, **arguments: object) -> Answer:
        """Make a request whose refusal means something to the caller; errors as `S3Client.call`."""
        return await self.client.call(method, Bucket=self.name, **arguments)

    async def fetch(self, **arguments: object) -> Answer:
        """Call `get_object` in a thread: the body of the answer is for `threads.read_into`."""
        way = IN_THREAD.set(True)
        try:
            return await self.call("get_object", **arguments)
        finally:
            IN_THREAD.reset(way)

    async def ask(self, method: str, operation: str, key: str, **arguments: object) -> Answer:
        """Make a request whose refusal is the caller's error."""
        try:
            return await self.call(method, **arguments)
        except (RefusedError, BrokenError) as error:
            raise store_error(error, operation, key) from None


def check_endpoint(url: str, *, allow_http: bool) -> None:
    """Refuse an endpoint that is plain HTTP to another machine, is not a URL, or holds a secret itself."""
    if may_hold_credentials(url):
        hint = "take them out of endpoint_url: URLs get logged"
        raise InvalidRequestError("the endpoint holds credentials", operation="open", hint=hint)
    parts = urlsplit(url)
    if parts.scheme == "https" or (parts.scheme == "http" and (allow_http or _is_loopback(parts.hostname or ""))):
        return
    hint = "use https://, or allow_http = true if the network is yours"
    raise InvalidRequestError("the endpoint is not https", operation="open", hint=hint)


def read_time(text: str) -> datetime:
    """Read a time of an answer: that of a header, of a list or, left to the SDK, any other; `ValueError` if none."""
    with contextlib.suppress(ValueError, TypeError, LookupError, OverflowError):
        # A header begins with a day of the week, a list with a year.
        moment = parsedate_to_datetime(text) if text[:1].isalpha() else datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return moment
    try:
        other: datetime = botocore.utils.parse_timestamp(text)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        # What the SDK's parser of any form that there is comes to, where the text is of none.
        raise ValueError("is not a time of the calendar") from error
    return other


def abandon(answer: Answer) -> None:
    """Drop an answer whose body will not be read, and its connection with it."""
    answer["Body"].raw_stream.close()


async def _read_some(stream: aiohttp.StreamReader) -> bytes:
    try:
        return await stream.readany()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        broken = BrokenError(f"the body broke off: {type(error).__name__}")
    raise broken  # out here, as in `S3Client.call`


def _verified_by(settings: S3Settings) -> str | Literal[False] | None:
    """Return the certificates to trust; None: the SDK's. Where there is no TLS it is not made to read them all."""
    url = settings.endpoint_url
    if url.startswith("http://") and not botocore.utils.get_environ_proxies(url):
        return False
    return settings.ca_bundle or None


async def _check_ca_bundle(path: str | None) -> None:
    """Refuse a bundle that cannot be loaded, of which the SDK would say no more than that there is no connection."""
    if not path:
        return
    try:
        await asyncio.to_thread(ssl.create_default_context, cafile=path)
    except OSError as error:
        message = f"the certificates cannot be loaded: {error.strerror or type(error).__name__}"
        hint = "set ca_bundle (or AWS_CA_BUNDLE) to a PEM file with the certificate authority of the server"
        raise InvalidRequestError(message, operation="open", key=path, hint=hint) from error


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host in _LOOPBACK_NAMES


def _drop_expect(params: Any, **_: Any) -> None:
    params["headers"].pop("Expect", None)


def _ask_no_region(context: Any, **_: Any) -> None:
    """Keep the SDK from asking, on a redirect of this request, for the bucket's region by this request, without end."""
    context["s3_redirect"]["redirected"] = True


def _failure(error: Exception) -> Exception:
    """Return what an exception of the libraries is to the callers of this module; as it is if it is none of theirs."""
    name = type(error).__name__
    if any(f.f_globals.get("__name__") == botocore.parsers.__name__ for f, _ in traceback.walk_tb(error.__traceback__)):
        # No XML, a number or a time that is none, an element twice: the SDK raises whatever Python raises for it, and
        # quotes the answer.
        return BrokenError(f"the answer cannot be read: {name}")
    if isinstance(error, _NO_CREDENTIALS):
        hint = "the standard chain found none: set AWS_PROFILE, AWS_ACCESS_KEY_ID or a role of this machine"
        return AccessDeniedError(f"no credentials: {name}", operation="sign", hint=hint)
    if isinstance(error, sdk.SSLError) and _is_untrusted(error):
        hint = "set ca_bundle (or AWS_CA_BUNDLE) to the certificate authority of the server"
        return InvalidRequestError("the server's certificate is not trusted", operation="connect", hint=hint)
    if isinstance(error, _NO_CONNECTION) and not _was_connected(error):
        return BrokenError(f"no connection: {name}", sent=False)
    if isinstance(error, sdk.ParamValidationError | sdk.EndpointProviderError):
        return InvalidRequestError(f"the SDK refuses the request: {name}", operation="sign")
    is_theirs = isinstance(error, sdk.HTTPClientError | sdk.BotoCoreError | aiohttp.ClientError | OSError)
    return BrokenError(name) if is_theirs else error


def _was_connected(error: sdk.EndpointConnectionError) -> bool:
    """Return whether there was a connection before the failure: the SDK says "cannot connect" of a reset, too."""
    cause = error.kwargs.get("error")
    return isinstance(cause, aiohttp.ClientConnectionError) and not isinstance(cause, aiohttp.ClientConnectorError)


def _why_no_server(error: BaseException) -> str:
    """Return why there can be no server at the endpoint; empty where another attempt may succeed."""
    causes = [error]
    for cause in causes:
        if isinstance(cause, socket.gaierror) and cause.errno in _NO_SUCH_HOST:
            return "no such host"
        if isinstance(cause, ConnectionRefusedError):
            return "nothing listens there"
        if isinstance(cause, ssl.SSLError) and getattr(cause, "reason", None) in _NO_TLS:
            return "what listens there speaks no TLS"
        # The libraries keep what the system said in one of these.
        found = (getattr(cause, "kwargs", {}).get("error"), getattr(cause, "os_error", None), cause.__cause__)
        causes += [it for it in (*found, cause.__context__) if isinstance(it, BaseException) and it not in causes]
    return ""


def _is_untrusted(error: sdk.SSLError) -> bool:
    """Return whether it is the certificate, and not a connection that broke in the handshake."""
    cause = error.kwargs.get("error")
    # urllib3 has what the system said in its own error's arguments.
    reasons = (cause, *getattr(cause, "args", ()))
    return any(isinstance(it, aiohttp.ClientConnectorCertificateError | ssl.SSLCertVerificationError) for it in reasons)
