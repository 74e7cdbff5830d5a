"""How a blob comes into a bucket: hashed, once, with a doubtful answer settled by a look (design 0003, W1 to W5).

`_MultipartUpload` sends a body in parts; `S3Writer` decides whether it goes so or whole, and what became of it.
"""

import asyncio
import base64
import functools
import hashlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any, Final

import msgspec

from blobstore import errors
from blobstore.base import Body, Buffer, Created, CreateOutcome, Lost, UnfinishedPut, Unknown, checked_chunks
from blobstore.concurrency import join, run_blocking
from blobstore.s3.bucket_rules import EXPIRING, TTL_TAG
from blobstore.s3.client import S3Bucket, S3Client, SentBody
from blobstore.s3.errors import (
    TTL_MS,
    WRITE_ID,
    Answer,
    BrokenError,
    RefusedError,
    answers,
    date_ms,
    read_created,
    store_error,
    whole_seconds_ms,
)
from blobstore.s3.settings import PARTS_MAX, PUT_BYTES_MAX, S3Settings

# Of a PUT that took longer, the creation time is asked for: it may be that of its start (design 0003, C3).
SLOW_PUT_S: Final = 5.0
# Creates without an answer of which the write id is remembered, so that sending them again is not taken for another's.
_UNSETTLED_MAX: Final = 1024
# A body up to this size stays in memory between being hashed and being sent.
_HELD_BYTES_MAX: Final = 1024 * 1024
# Chunks above this are hashed in a thread.
_HASHED_HERE_BYTES_MAX: Final = 256 * 1024
_ABORT_TIMEOUT_S: Final = 10.0


class NewBlob(msgspec.Struct, frozen=True, kw_only=True):
    """A blob that is to be written, and its object."""

    operation: str
    key: str
    # Of the object.
    name: str
    body: Body
    ttl_ms: int | None = None
    # Whether the TTL is in a tag, too.
    tagged: bool

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """Read the body again, and check its length."""
        return checked_chunks(self.body, operation=self.operation, key=self.key)


async def _hash(client: S3Client, blob: NewBlob) -> SentBody:
    """Prepare a body to be sent: check its length, hash it, and keep the bytes if they are few."""
    sha256 = hashlib.sha256()
    held: list[bytes] = []
    is_small = blob.body.size_bytes <= _HELD_BYTES_MAX
    async with aclosing(blob.chunks()) as chunks:
        async for chunk in chunks:
            if len(chunk) > _HASHED_HERE_BYTES_MAX:
                await run_blocking(sha256.update, chunk)
            else:
                sha256.update(chunk)
            if is_small:
                held.append(chunk)
    read = functools.partial(_read_held, held) if is_small else blob.chunks
    return client.send(read, size_bytes=blob.body.size_bytes, sha256=sha256.hexdigest())


async def _read_held(chunks: Iterable[Buffer]) -> AsyncGenerator[Buffer, None]:
    for chunk in chunks:
        yield chunk


class _MultipartUpload:
    """One multipart upload, aborted unless it was completed; `condition` is what that carries as `If-None-Match`."""

    def __init__(
        self, bucket: S3Bucket, blob: NewBlob, *, part_bytes: int, slots: asyncio.Semaphore, condition: str | None
    ) -> None:
        self._bucket = bucket
        self._blob = blob
        self._part_bytes = part_bytes
        self._slots = slots
        self._condition = condition
        # Completing it was asked for, so that it may have happened.
        self.is_completing = False

    async def put(self, creation: Answer) -> Created:
        """Begin, send the parts, complete; errors as `S3Bucket.call`, or an answer that lacks something."""
        upload = await self._begin(creation)
        try:
            parts = await self._send(upload)
            completed = await self._complete(upload, parts)
        except BaseException as error:
            if not self.is_completing or _is_refused(error):
                await _abort(self._bucket, upload)
            # Otherwise it may be completing just now, and Ceph carries out both: the object would lose its parts.
            raise
        return read_created(completed, self._blob.operation, self._blob.key)

    async def _begin(self, creation: Answer) -> dict[str, Any]:
        begun = asyncio.ensure_future(self._bucket.call("create_multipart_upload", Key=self._blob.name, **creation))

        def name(answer: Answer) -> dict[str, Any]:
            with answers(self._blob.operation, self._blob.key):
                return {"Key": self._blob.name, "UploadId": answer["UploadId"]}

        async def give_up() -> None:
            await _abort(self._bucket, name(await begun))

        # Its id comes with the answer, and without that nobody could abort it.
        return name(await _see_to_end(begun, give_up))

    async def _complete(self, upload: dict[str, Any], parts: list[dict[str, Any]]) -> Answer:
        self.is_completing = True
        wanted = {**upload, "MultipartUpload": {"Parts": parts}, "IfNoneMatch": self._condition}
        completing = asyncio.ensure_future(self._bucket.call("complete_multipart_upload", **wanted))

        async def see() -> None:
            try:
                await completing
            except RefusedError as error:
                if _is_refused(error):
                    await _abort(self._bucket, upload)

        # Cut off here, nobody would know whether its parts are an object or lie about.
        return await _see_to_end(completing, see)

    async def _send(self, upload: dict[str, Any]) -> list[dict[str, Any]]:
        sending: list[asyncio.Task[dict[str, Any]]] = []

        async def send() -> None:
            async with asyncio.TaskGroup() as group, aclosing(self._parts()) as parts:
                async for part in parts:
                    task = group.create_task(self._send_part(upload, len(sending) + 1, part))
                    # The part has held a slot since before it was read. The task need not have begun when it ends.
                    task.add_done_callback(lambda _: self._slots.release())
                    sending.append(task)

        try:
            # In a task of its own: the group cancels that one, and not the caller.
            await join([asyncio.ensure_future(send())])
        except BaseExceptionGroup as failures:
            error = failures.exceptions[0]
        else:
            return [task.result() for task in sending]
        raise error

    async def _parts(self) -> AsyncGenerator[bytearray, None]:
        """Yield the body in parts of one size, the last one smaller; at least one. Each holds a slot."""
        # Larger parts where there would be too many.
        part_bytes = max(self._part_bytes, -(-self._blob.body.size_bytes // PARTS_MAX))
        await self._slots.acquire()
        part, is_handed_over = bytearray(), False
        try:
            async with aclosing(self._blob.chunks()) as chunks:
                async for chunk in chunks:
                    view = memoryview(chunk)
                    while len(part) + len(view) > part_bytes:
                        taken = part_bytes - len(part)
                        part += view[:taken]
                        view = view[taken:]
                        is_handed_over = True
                        yield part
                        await self._slots.acquire()
                        part, is_handed_over = bytearray(), False
                    part += view
            is_handed_over = True
            yield part
        finally:
            if not is_handed_over:
                self._slots.release()

    async def _send_part(self, upload: dict[str, Any], number: int, part: bytearray) -> dict[str, Any]:
        sha256 = await run_blocking(lambda: hashlib.sha256(part).hexdigest())
        read = functools.partial(_read_held, [part])
        sent = self._bucket.client.send(read, size_bytes=len(part), sha256=sha256)
        answer = await self._bucket.call("upload_part", **upload, PartNumber=number, Body=sent, ContentLength=len(part))
        with answers(self._blob.operation, self._blob.key):
            return {"PartNumber": number, "ETag": answer["ETag"]}


def _is_refused(error: BaseException) -> bool:
    """Return whether the store said for certain that it did not and will not complete the upload."""
    return isinstance(error, RefusedError) and error.refusal.status < HTTPStatus.INTERNAL_SERVER_ERROR


async def _abort(bucket: S3Bucket, upload: dict[str, Any]) -> None:
    await _tidy_up(lambda: bucket.call("abort_multipart_upload", **upload))


async def _see_to_end(request: asyncio.Future[Answer], tidy: Callable[[], Awaitable[object]]) -> Answer:
    """Await a request that goes on where this call is cancelled: then tidy up after it."""
    try:
        return await asyncio.shield(request)
    except asyncio.CancelledError:
        await _tidy_up(tidy)
        raise


async def _tidy_up(tidy: Callable[[], Awaitable[object]]) -> None:
    """Tidy up as far as possible; what is left is found by `collect`."""

    async def bounded() -> None:
        with suppress(RefusedError, BrokenError, errors.StoreError, TimeoutError):
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await tidy()

    # A caller that is cancelled once more does not stop it.
    await asyncio.shield(asyncio.ensure_future(bounded()))


class S3Writer:
    """The writing half of an S3 store. It knows objects by their whole names."""

    def __init__(self, bucket: S3Bucket, settings: S3Settings) -> None:
        self._bucket = bucket
        self._settings = settings
        # Parts in memory at once, of all uploads together.
        self.part_slots = asyncio.Semaphore(settings.parts_in_memory_max)
        # By object and hash: the write id of a create that may have happened (design 0002, C3).
        self._unsettled: dict[tuple[str, str], str] = {}

    async def put(self, blob: NewBlob) -> Created:
        creation = self._creation(blob, _new_write_id())
        if blob.body.size_bytes > self._settings.single_put_bytes_max:
            try:
                return await self._upload(blob, self._settings.part_bytes, condition=None).put(creation)
            except (RefusedError, BrokenError) as error:
                raise _upload_error(error, blob) from None
        sent = await _hash(self._bucket.client, blob)
        wanted = {"Key": blob.name, **_content(sent), **creation}
        answer = await self._bucket.ask("put_object", blob.operation, blob.key, **wanted)
        return read_created(answer, blob.operation, blob.key)

    async def create(self, blob: NewBlob, *, may_go_in_parts: bool) -> CreateOutcome:
        """Write an object unless it is there; in parts only where completing these takes `If-None-Match`."""
        is_multipart = may_go_in_parts and blob.body.size_bytes > self._settings.single_put_bytes_max
        if blob.body.size_bytes > PUT_BYTES_MAX and not is_multipart:
            why = "is larger than one PUT can be, and this blob store cannot complete a multipart upload conditionally"
            hint = "lower blob_bytes_max to 5 GiB or less"
            raise errors.CapabilityMissingError(why, operation=blob.operation, key=blob.key, hint=hint)
        sent = await _hash(self._bucket.client, blob)
        create = (blob.name, sent.sha256)
        # A create that is sent again after an unknown outcome says the same as before, so that it knows itself.
        known_id = self._unsettled.pop(create, "")
        write_id = known_id or _new_write_id()
        outcome: CreateOutcome | None = None
        try:
            if not is_multipart:
                outcome = await self._create(blob, sent, write_id)
                return outcome
            if known_id:
                with suppress(errors.BlobNotFoundError):
                    outcome = _own(await self._look(blob), blob.key, write_id)
            if outcome is None:
                outcome = await self.create_in_parts(blob, write_id=write_id)
            return outcome
        finally:
            if outcome is None or isinstance(outcome, Unknown):
                if len(self._unsettled) >= _UNSETTLED_MAX:
                    del self._unsettled[next(iter(self._unsettled))]
                self._unsettled[create] = write_id

    async def create_in_parts(
        self, blob: NewBlob, *, write_id: str = "", part_bytes: int | None = None
    ) -> CreateOutcome:
        """Write as `create`, by a multipart upload whatever the size."""
        write_id = write_id or _new_write_id()
        upload = self._upload(blob, part_bytes or self._settings.part_bytes, condition="*")
        try:
            await upload.put(self._creation(blob, write_id))
            # It may be dated by its first request, long ago.
            return await self._found(blob)
        except (RefusedError, BrokenError) as error:
            if upload.is_completing:
                return await self._settle(error, blob, write_id)
            raise _upload_error(error, blob) from None

    async def begin(self, blob: NewBlob) -> UnfinishedPut:
        creation = self._creation(blob, _new_write_id())
        answer = await self._bucket.ask("create_multipart_upload", blob.operation, blob.key, Key=blob.name, **creation)
        with answers(blob.operation, blob.key):
            return UnfinishedPut(key=blob.key, upload_id=str(answer["UploadId"]), begun_at_ms=date_ms(answer) or 0)

    async def _create(self, blob: NewBlob, sent: SentBody, write_id: str) -> CreateOutcome:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            wanted = {"Key": blob.name, "IfNoneMatch": "*", **_content(sent), **self._creation(blob, write_id)}
            answer = await self._bucket.call("put_object", **wanted)
        except (RefusedError, BrokenError) as error:
            return await self._settle(error, blob, write_id)
        if clock() - began_s > SLOW_PUT_S:
            return await self._found(blob)
        return read_created(answer, blob.operation, blob.key)

    async def _found(self, blob: NewBlob) -> CreateOutcome:
        """Ask for the time of a blob that was just created: a store may date it by the start of its PUT.

        Unknown if it is gone, because the caller was away for longer than its TTL: it is to be sent again.
        """
        try:
            answer = await self._look(blob)
        except errors.BlobNotFoundError:
            return Unknown(reason="it was created, and was deleted before its time could be asked for")
        with answers(blob.operation, blob.key):
            return Created(created_at_ms=whole_seconds_ms(answer["LastModified"]))

    async def _look(self, blob: NewBlob) -> Answer:
        return await self._bucket.ask("head_object", blob.operation, blob.key, Key=blob.name)

    async def _settle(self, error: RefusedError | BrokenError, blob: NewBlob, write_id: str) -> CreateOutcome:
        """Find out what became of a create that was not plainly answered (design 0003, W1 and W2)."""
        if not _needs_a_look(error):
            raise store_error(error, blob.operation, blob.key) from None
        try:
            found = await self._bucket.call("head_object", Key=blob.name)
        except (RefusedError, BrokenError) as unseen:
            if _status(error) == HTTPStatus.PRECONDITION_FAILED and _status(unseen) == HTTPStatus.FORBIDDEN:
                return Lost()  # the store has said that it is there, and lets nobody look at it
            is_gone = _status(unseen) == HTTPStatus.NOT_FOUND
            if isinstance(error, BrokenError) or _status(error) >= HTTPStatus.INTERNAL_SERVER_ERROR:
                seen = "it is not there yet" if is_gone else f"nor when asked whether it is there: {unseen}"
                return Unknown(reason=f"no answer: {error}; {seen}")
            raise _as_unavailable(error if is_gone else unseen, blob) from None
        return _own(found, blob.key, write_id) or Lost()

    def _creation(self, blob: NewBlob, write_id: str) -> dict[str, Any]:
        metadata = {WRITE_ID: write_id}
        if blob.ttl_ms is not None:
            metadata[TTL_MS] = str(blob.ttl_ms)
        return {
            "Metadata": metadata,
            "Tagging": f"{TTL_TAG}={EXPIRING}" if blob.ttl_ms is not None and blob.tagged else None,
            "ServerSideEncryption": self._settings.encryption or None,
            "SSEKMSKeyId": self._settings.kms_key_id or None,
        }

    def _upload(self, blob: NewBlob, part_bytes: int, *, condition: str | None) -> _MultipartUpload:
        return _MultipartUpload(self._bucket, blob, part_bytes=part_bytes, slots=self.part_slots, condition=condition)


def _new_write_id() -> str:
    return secrets.token_hex(16)


def _content(sent: SentBody) -> dict[str, Any]:
    """Pass a body as `put_object` takes it; a store that keeps checksums keeps the one that the signature covers."""
    checksum = base64.b64encode(bytes.fromhex(sent.sha256)).decode()
    return {"Body": sent, "ContentLength": sent.size, "ChecksumSHA256": checksum}


def _own(answer: Answer, key: str, write_id: str) -> Created | None:
    with answers("put_if_absent", key):
        if answer.get("Metadata", {}).get(WRITE_ID) != write_id:
            return None
        return Created(created_at_ms=whole_seconds_ms(answer["LastModified"]))


def _upload_error(error: RefusedError | BrokenError, blob: NewBlob) -> errors.StoreError:
    """Return the error of an upload that was not completed; one that a collector aborted is begun again."""
    raised = store_error(error, blob.operation, blob.key)
    return _as_unavailable(error, blob) if isinstance(raised, errors.BlobNotFoundError) else raised


def _as_unavailable(error: RefusedError | BrokenError, blob: NewBlob) -> errors.StoreError:
    """Return the error of a put that did not happen, and may when tried again: a 412 is not the caller's fault."""
    raised = store_error(error, blob.operation, blob.key)
    if isinstance(raised, errors.StoreUnavailableError | errors.AccessDeniedError):
        return raised
    return errors.StoreUnavailableError(str(raised), operation=blob.operation, key=blob.key)


def _status(error: RefusedError | BrokenError) -> int:
    return error.refusal.status if isinstance(error, RefusedError) else 0


def _needs_a_look(error: RefusedError | BrokenError) -> bool:
    """Return whether a create that ended so may have happened, now or when it was sent before."""
    if isinstance(error, BrokenError):
        return error.sent
    status = error.refusal.status
    if status in {HTTPStatus.PRECONDITION_FAILED, HTTPStatus.CONFLICT} or error.refusal.code == "NoSuchUpload":
        return True
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.SERVICE_UNAVAILABLE
