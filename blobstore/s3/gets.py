"""Requests by the SDK's client, and GETs of objects as it has sent the first one: for those it works nothing out again.

For each request the SDK checks parameters, resolves an endpoint, calls two dozen handlers and reads an answer by its
description of S3, which takes more CPU than to send and to sign it (design 0008, B8). From one GET to the next only the
key and the range differ. So what it has made of the first one is kept as long as its client: the URL before the key,
the User-Agent, and what it signs with. Signer, HTTP client and parser of refusals are the SDK's.
"""

from contextvars import ContextVar
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Final

import botocore.exceptions
import msgspec
from aiobotocore.parsers import AioResponseParserFactory
from botocore.awsrequest import AWSRequest
from botocore.utils import percent_encode

from blobstore.s3.errors import ELSEWHERE, Answer

_OPERATION: Final = "GetObject"
# As the SDK writes a key into a URL.
_SAFE: Final = "-._~/"
_AGENT: Final = "User-Agent"
# What the SDK sends beside the range before it signs: a request with more than that is not learned from.
_PLAIN: Final = frozenset({"range", _AGENT.lower(), "amz-sdk-invocation-id", "amz-sdk-request"})
_ARGUMENTS: Final = frozenset({"Bucket", "Key", "Range"})


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the GETs of a bucket have in common."""

    root: str
    agent: str
    context: dict[str, Any]
    signer: Any


class _First(msgspec.Struct):
    """A GET that the SDK makes now, and what was learned when it was signed."""

    key: str
    known: _Known | None = None


_FIRST: Final = ContextVar[_First | None]("_FIRST", default=None)


class SdkClient:
    """A client of the SDK, whose further GETs of an object are made here.

    It sends by the HTTP client `session`, and learns from a request that has this kind of signature.
    """

    def __init__(self, client: Any, session: Any, signature: str) -> None:
        self._client, self._session, self._signature = client, session, signature
        # By bucket.
        self._known: dict[str, _Known] = {}
        self._parser = AioResponseParserFactory().create_parser(client.meta.service_model.resolved_protocol)
        self._shape = client.meta.service_model.operation_model(_OPERATION).output_shape
        client.meta.events.register_last(f"before-sign.s3.{_OPERATION}", self._learn)

    async def call(self, method: str, arguments: dict[str, Any]) -> Answer:
        """Make a request; raise what the SDK does. Of a GET the answer has Body, ContentLength and ContentRange."""
        if method != "get_object":
            return await self._ask(method, arguments)
        if not arguments.keys() <= _ARGUMENTS:
            return _reduced(await self._ask(method, arguments))
        bucket, key = arguments["Bucket"], arguments["Key"]
        known = self._known.get(bucket)
        if known is not None:
            return await self._get(known, bucket, key, arguments.get("Range"))
        first = _First(key)
        token = _FIRST.set(first)
        try:
            answer = await self._ask(method, arguments)
        finally:
            _FIRST.reset(token)
        if first.known is not None:
            self._known[bucket] = first.known
        return _reduced(answer)

    async def _ask(self, method: str, arguments: dict[str, Any]) -> Answer:
        answer: Answer = await getattr(self._client, method)(**arguments)
        return answer

    def _learn(self, request: AWSRequest, signature_version: Any, request_signer: Any, **_: Any) -> None:
        """Keep of a GET that is about to be signed what the next one shares with it, if that is all there is."""
        first = _FIRST.get()
        if first is None:
            return
        key = percent_encode(first.key, safe=_SAFE)
        is_plain = request.url.endswith(f"/{key}") and not request.params and not request.data
        if is_plain and signature_version == self._signature and {n.lower() for n in request.headers} <= _PLAIN:
            root, agent, context = request.url.removesuffix(key), request.headers[_AGENT], dict(request.context)
            first.known = _Known(root=root, agent=agent, context=context, signer=request_signer)

    async def _get(self, known: _Known, bucket: str, key: str, bytes_range: str | None) -> Answer:
        sent = {_AGENT: known.agent} | ({} if bytes_range is None else {"Range": bytes_range})
        request = AWSRequest("GET", known.root + percent_encode(key, safe=_SAFE), sent, stream_output=True)
        request.context = dict(known.context)
        await known.signer.sign(_OPERATION, request)
        answer = await self._session.send(request.prepare())
        status, headers = answer.status_code, answer.headers
        if status < HTTPStatus.MULTIPLE_CHOICES:
            # Strings: `read_promised_bytes` checks them.
            length, covered = headers.get("content-length"), headers.get("content-range", "")
            # The SDK's name for the body that comes.
            body = SimpleNamespace(raw_stream=answer.raw)
            return {"Body": body, "ContentLength": length, "ContentRange": covered}
        refused = {"headers": headers, "status_code": status, "body": await answer.content, "context": {}}
        read = await self._parser.parse(refused, self._shape)
        if status < HTTPStatus.BAD_REQUEST or str(read.get("Error", {}).get("Code")) in ELSEWHERE:
            # Where the bucket is now the SDK finds out.
            self._known.pop(bucket, None)
        raise botocore.exceptions.ClientError(read, _OPERATION)


def _reduced(answer: Answer) -> Answer:
    """Leave of the SDK's answer to a GET what every GET has."""
    return {name: answer.get(name) for name in ("Body", "ContentLength", "ContentRange")}
