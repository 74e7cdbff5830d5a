"""The client below the real `S3Store` in the simulation: it answers as the SDK does."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final

from typing_extensions import override

from blobstore.base import Sink
from blobstore.s3.bucket_rules import KEPT, TTL_TAG
from blobstore.s3.client import ReadBody, SentBody
from blobstore.s3.errors import Answer, BrokenError
from blobstore.s3.settings import S3Settings
from blobstore.s3.store import S3Store
from tests.simulation.faults.request_faults import Fault, Request
from tests.simulation.model.s3 import SimObject, SimServer

BUCKET: Final = "bucket"


class _AnswerBody:
    """The body of an answer: the bytes that come, and whether these are all."""

    def __init__(self, data: bytes, is_whole: bool = True) -> None:
        self.data = data
        self.is_whole = is_whole
        self.raw_stream = self

    def close(self) -> None:
        """Give it up."""


class SimS3Client:
    """In place of a `blobstore.s3.client.S3Client`.

    Args:
        server: Who answers.
        process: The name of who asks, for the history.
        prefix: Of the repository, left out of the history.
    """

    def __init__(self, server: SimServer, process: str, prefix: str, settings: S3Settings) -> None:
        self._server = server
        self._process = process
        self._root = f"{prefix}/" if prefix else ""
        self._settings = settings
        self._calls: dict[str, Callable[..., Any]] = {
            "put_object": self._put,
            "get_object": self._get,
            "head_object": self._head,
            "get_object_tagging": self._tags,
            "put_object_tagging": self._tag,
            "list_objects_v2": self._list,
            "delete_objects": self._delete,
            "list_multipart_uploads": self._uploads,
            "create_multipart_upload": self._begin,
            "upload_part": self._part,
            "complete_multipart_upload": self._complete,
            "abort_multipart_upload": self._abort,
        }

    async def close(self) -> None:
        """Nothing is held."""

    async def call(self, method: str, **arguments: Any) -> Answer:
        """As the SDK answers; errors as `S3Client.call`."""
        arguments.pop("Bucket")
        body = arguments.pop("Body", None)
        data = b""
        if isinstance(body, SentBody):
            async with aclosing(body._read()) as chunks:
                data = b"".join([bytes(chunk) async for chunk in chunks])
        answer: Answer = await self._calls[method]({k: v for k, v in arguments.items() if v is not None}, data)
        return answer

    def send(self, read: ReadBody, *, size_bytes: int, sha256: str) -> SentBody:
        """As `S3Client.send`."""
        return SentBody(read, size_bytes=size_bytes, sha256=sha256, stall_s=self._settings.read_timeout_s)

    async def read(self, answer: Answer) -> AsyncGenerator[bytes, None]:
        """As `S3Client.read`."""
        body: _AnswerBody = answer["Body"]
        if body.data:
            yield body.data
        if not body.is_whole:
            raise BrokenError("the body broke off: simulated")

    # ---------------------------------------------------------------- calls

    async def _ask(
        self, method: str, name: str, carry_out: Callable[[int], Answer], *, mutates: bool = False, **options: Any
    ) -> Answer:
        damage = options.pop("damage", None)
        key = name.removeprefix(self._root)
        request = Request(process=self._process, method=method, key=key, mutates=mutates, **options)

        def dated(created_ms: int) -> Answer:
            answer = carry_out(created_ms)
            date = _http_date(self._server.now_ms() // 1000)
            return {"ResponseMetadata": {"HTTPHeaders": {"date": date}, "HTTPStatusCode": 200}, **answer}

        return await self._server.request(request, dated, damage=damage)

    async def _put(self, wanted: Answer, data: bytes) -> Answer:
        name, creates = wanted["Key"], "IfNoneMatch" in wanted

        def put(created_ms: int) -> Answer:
            self._server.put(name, _created(wanted, data, created_ms), if_absent=creates)
            return {}

        return await self._ask("put_object", name, put, mutates=True, creates=creates, has_body=True)

    async def _get(self, wanted: Answer, _: bytes) -> Answer:
        span = str(wanted.get("Range", ""))

        def get(_: int) -> Answer:
            whole = self._server.find(wanted["Key"]).data
            if not span:
                return {"ContentLength": len(whole), "Body": _AnswerBody(whole)}
            first, _dash, last = span.removeprefix("bytes=").partition("-")
            start, end = int(first), min(len(whole), int(last) + 1 if last else len(whole))
            if start >= len(whole):
                raise self._server.refusal(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange")
            shown = f"bytes {start}-{end - 1}/{len(whole)}"
            return {"ContentLength": end - start, "ContentRange": shown, "Body": _AnswerBody(whole[start:end])}

        return await self._ask("get_object", wanted["Key"], get, has_body=True, damage=self._damage)

    def _damage(self, answer: Answer, fault: Fault) -> Answer:
        body: _AnswerBody = answer["Body"]
        return {**answer, "Body": _AnswerBody(*self._server.damaged(body.data, fault))}

    async def _head(self, wanted: Answer, _: bytes) -> Answer:
        def head(_: int) -> Answer:
            stored = self._server.objects.get(wanted["Key"])
            if stored is None:
                raise self._server.refusal(HTTPStatus.NOT_FOUND, "404")
            modified = _moment(stored.created_ms)
            return {"ContentLength": len(stored.data), "LastModified": modified, "Metadata": dict(stored.metadata)}

        return await self._ask("head_object", wanted["Key"], head)

    async def _tags(self, wanted: Answer, _: bytes) -> Answer:
        def tags(_: int) -> Answer:
            tag = self._server.find(wanted["Key"]).tag
            return {"TagSet": [{"Key": TTL_TAG, "Value": tag}] if tag else []}

        return await self._ask("get_object_tagging", wanted["Key"], tags)

    async def _tag(self, wanted: Answer, _: bytes) -> Answer:
        assert wanted["Tagging"] == {"TagSet": [{"Key": TTL_TAG, "Value": KEPT}]}, (
            "nothing but this tag is ever set (0003, L3)"
        )

        def tag(_: int) -> Answer:
            self._server.keep(wanted["Key"])
            return {}

        return await self._ask("put_object_tagging", wanted["Key"], tag, mutates=True)

    async def _list(self, wanted: Answer, _: bytes) -> Answer:
        def page(_: int) -> Answer:
            names, truncated = self._server.list_names(
                wanted["Prefix"], wanted.get("StartAfter", ""), min(wanted["MaxKeys"], self._server.page_max)
            )
            found = self._server.objects
            contents = [
                {"Key": n, "Size": len(found[n].data), "LastModified": _moment(found[n].created_ms)} for n in names
            ]
            return {"Contents": contents, "KeyCount": len(contents), "IsTruncated": truncated}

        return await self._ask("list_objects_v2", wanted["Prefix"], page)

    async def _delete(self, wanted: Answer, _: bytes) -> Answer:
        names = [item["Key"] for item in wanted["Delete"]["Objects"]]

        def delete(_: int) -> Answer:
            failed = self._server.delete_batch(names)
            return {"Errors": [{"Key": name, "Code": "InternalError", "Message": "simulated"} for name in failed]}

        shown = " ".join(name.removeprefix(self._root) for name in names)
        return await self._ask("delete_objects", shown, delete, mutates=True)

    # ---------------------------------------------------------------- multipart

    async def _uploads(self, wanted: Answer, _: bytes) -> Answer:
        after = wanted.get("KeyMarker", ""), wanted.get("UploadIdMarker", "")

        def uploads(_: int) -> Answer:
            found = sorted(
                (name, upload, begun_ms)
                for upload, (name, begun_ms, _, _) in self._server.uploads.items()
                if name.startswith(wanted["Prefix"]) and (name, upload) > after
            )
            page = found[: self._server.page_max]
            shown = [{"Key": name, "UploadId": upload, "Initiated": _moment(ms)} for name, upload, ms in page]
            last = {"NextKeyMarker": page[-1][0], "NextUploadIdMarker": page[-1][1]} if page else {}
            return {"Uploads": shown, "IsTruncated": len(found) > len(page), **last}

        return await self._ask("list_multipart_uploads", wanted["Prefix"], uploads)

    async def _begin(self, wanted: Answer, _: bytes) -> Answer:
        def begin(created_ms: int) -> Answer:
            upload = f"upload-{self._server.requests}"
            self._server.uploads[upload] = (wanted["Key"], created_ms, {}, _created(wanted, b"", created_ms))
            return {"UploadId": upload}

        return await self._ask("create_multipart_upload", wanted["Key"], begin, mutates=True)

    async def _part(self, wanted: Answer, data: bytes) -> Answer:
        def part(_: int) -> Answer:
            self._upload(wanted["UploadId"])[2][wanted["PartNumber"]] = data
            return {"ETag": str(wanted["PartNumber"])}

        return await self._ask("upload_part", wanted["Key"], part, mutates=True, has_body=True)

    async def _complete(self, wanted: Answer, _: bytes) -> Answer:
        def complete(created_ms: int) -> Answer:
            _name, begun_ms, parts, stored = self._upload(wanted["UploadId"])
            whole = b"".join(parts[number] for number in sorted(parts))
            stored.data, stored.created_ms = whole, begun_ms if self._server.dates_by_start else created_ms
            self._server.put(wanted["Key"], stored, if_absent="IfNoneMatch" in wanted)
            del self._server.uploads[wanted["UploadId"]]
            return {}

        return await self._ask(
            "complete_multipart_upload", wanted["Key"], complete, mutates=True, creates="IfNoneMatch" in wanted
        )

    async def _abort(self, wanted: Answer, _: bytes) -> Answer:
        def abort(_: int) -> Answer:
            self._upload(wanted["UploadId"])
            del self._server.uploads[wanted["UploadId"]]
            return {}

        return await self._ask("abort_multipart_upload", wanted["Key"], abort, mutates=True)

    def _upload(self, upload: str) -> tuple[str, int, dict[int, bytes], SimObject]:
        found = self._server.uploads.get(upload)
        if found is None:
            raise self._server.refusal(HTTPStatus.NOT_FOUND, "NoSuchUpload")
        return found


class SimS3Store(S3Store):
    """The real store with a simulated client."""

    def __init__(self, server: SimServer, process: str, prefix: str, settings: S3Settings | None = None) -> None:
        super().__init__(BUCKET, prefix, settings)
        self._bucket.client = SimS3Client(server, process, prefix, self.settings)  # type: ignore[assignment]  # its double

    @override
    async def read_into(
        self, key: str, sink: Sink, *, start: int = 0, size_bytes: int | None = None, **how: Any
    ) -> None:
        # `fresh` would open another, real, client: here every request has a connection of its own.
        await super().read_into(key, sink, start=start, size_bytes=size_bytes, deleted=how.get("deleted", False))


def _created(wanted: Answer, data: bytes, created_ms: int) -> SimObject:
    tag = str(wanted.get("Tagging", "")).partition("=")[2]
    return SimObject(data=data, created_ms=created_ms, metadata=dict(wanted["Metadata"]), tag=tag)


@lru_cache(maxsize=64)
def _http_date(now_s: int) -> str:
    return formatdate(now_s, usegmt=True)


@lru_cache(maxsize=1024)
def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, tz=UTC)
