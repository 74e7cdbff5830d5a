"""GETs of objects as the SDK has sent the first one: for those that follow it works nothing out again.

For each request the SDK checks parameters, resolves an endpoint, calls two dozen handlers and reads an answer by its
description of S3, which takes more CPU than to send and to sign it (design 0008, B8). From one GET to the next only the
key and the range differ. So what it has made of the first one is kept as long as its client: the URL before the key,
the name that it gives itself, and what it signs with. Signer, HTTP client and parser of refusals are the SDK's.
"""

from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Final

import botocore.exceptions
import msgspec
from aiobotocore.parsers import AioResponseParserFactory
from botocore.awsrequest import AWSRequest
from botocore.utils import percent_encode

from blobstore.s3.errors import Answer

_OPERATION: Final = "GetObject"
# As the SDK writes a key into a URL.
_SAFE: Final = "-._~/"
# What the SDK sends of its own accord, beside the range: a request with more than that is not learned from.
_AGENT: Final = "User-Agent"
_PLAIN: Final = frozenset({"range", _AGENT.lower(), "amz-sdk-invocation-id", "amz-sdk-request", "x-amzn-trace-id"})
_ARGUMENTS: Final = frozenset({"Bucket", "Key", "Range"})


class _First(msgspec.Struct):
    """A GET that the SDK makes now, and what of it was seen when it was signed."""

    key: str
    known: "_Known | None" = None


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    root: str
    agent: str
    context: dict[str, Any]
    signer: Any


_FIRST: Final = ContextVar[_First | None]("_FIRST", default=None)


class _Body(msgspec.Struct):
    """The body of an answer, as the SDK gives it, with what reads it."""

    raw_stream: Any


class ObjectGets:
    """Makes the requests of one client of the SDK for one bucket.

    Args:
        client: The SDK's.
        session: The HTTP client that it sends by.
        signature: The kind of signature of a request that may be learned from.
    """

    def __init__(self, client: Any, session: Any, signature: str) -> None:
        self._client, self._session, self._signature = client, session, signature
        self._known: dict[str, _Known] = {}
        self._parser = AioResponseParserFactory().create_parser(client.meta.service_model.resolved_protocol)
        self._shape = client.meta.service_model.operation_model(_OPERATION).output_shape
        client.meta.events.register_last(f"before-sign.s3.{_OPERATION}", self._note)

    async def call(self, method: str, arguments: dict[str, Any]) -> Answer:
        """Make a request, and raise what the SDK does; of a GET that was not made by it the answer is what is read."""
        if method != "get_object" or not arguments.keys() <= _ARGUMENTS:
            return await self._ask(method, arguments)
        known = self._known.get(arguments["Bucket"])
        if known is not None:
            return await self._get(known, arguments["Key"], arguments.get("Range"))
        first = _First(arguments["Key"])
        token = _FIRST.set(first)
        try:
            answer = await self._ask(method, arguments)
        finally:
            _FIRST.reset(token)
        if first.known is not None:
            self._known[arguments["Bucket"]] = first.known
        return answer

    async def _ask(self, method: str, arguments: dict[str, Any]) -> Answer:
        answer: Answer = await getattr(self._client, method)(**arguments)
        return answer

    def _note(self, request: AWSRequest, signature_version: Any, request_signer: Any, **_: Any) -> None:
        """Keep of a GET that is about to be signed what the next one shares with it, if that is all there is."""
        first = _FIRST.get()
        if first is None:
            return
        key = percent_encode(first.key, safe=_SAFE)
        is_plain = request.url.endswith(f"/{key}") and not request.params and not request.data
        if is_plain and signature_version == self._signature and {n.lower() for n in request.headers} <= _PLAIN:
            first.known = _Known(
                root=request.url.removesuffix(key),
                agent=request.headers[_AGENT],
                context=dict(request.context),
                signer=request_signer,
            )

    async def _get(self, known: _Known, key: str, bytes_range: str | None) -> Answer:
        headers = {_AGENT: known.agent} | ({} if bytes_range is None else {"Range": bytes_range})
        request = AWSRequest("GET", known.root + percent_encode(key, safe=_SAFE), headers, stream_output=True)
        request.context = dict(known.context)
        await known.signer.sign(_OPERATION, request)
        answer = await self._session.send(request.prepare())
        status, told = answer.status_code, answer.headers
        if status < HTTPStatus.MULTIPLE_CHOICES:
            # Read by whoever believes them, as they are.
            lengths = {"ContentLength": told.get("content-length"), "ContentRange": told.get("content-range", "")}
            return {"Body": _Body(answer.raw), **lengths}
        refused = {"headers": told, "status_code": status, "body": await answer.content, "context": {}}
        raise botocore.exceptions.ClientError(await self._parser.parse(refused, self._shape), _OPERATION)
