"""How a blob comes into a bucket: hashed, once, with a doubtful answer settled by a look (design 0003, W1 to W5).

`MultipartUpload` sends a body in parts; `S3Writer` decides whether it goes so or whole, and what became of it.
"""

import asyncio
import base64
import hashlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final

from blobstore.base import Body, Created, CreateOutcome, Lost, Unknown
from blobstore.checks import checked_chunks
from blobstore.concurrency import first_error, run_blocking
from blobstore.errors import BlobNotFoundError, CapabilityMissingError, StoreError
from blobstore.s3.client import ReadBody, S3Bucket, S3Client, SentBody
from blobstore.s3.errors import (
    CONFLICT,
    FORBIDDEN,
    NOT_FOUND,
    PRECONDITION_FAILED,
    SERVER_ERRORS,
    SERVICE_UNAVAILABLE,
    TTL_MS,
    WRITE_ID,
    Answer,
    BrokenError,
    RefusedError,
    answers,
    as_unavailable,
    read_created,
    read_created_at_ms,
    store_error,
)
from blobstore.s3.lifecycle import EXPIRING, TTL_TAG
from blobstore.s3.settings import PARTS_MAX, PUT_BYTES_MAX, S3Settings
from blobstore.sink import Buffer

# Of a PUT that took longer, the creation time is asked for: it may be that of its start (design 0003, C3).
SLOW_PUT_S: Final = 5.0
# Creates without an answer of which the write id is remembered, so that sending them again is not taken for another's.
_UNSETTLED_MAX: Final = 1024
_NO_UPLOAD: Final = "NoSuchUpload"

# A body up to this size stays in memory between being hashed and being sent.
HELD_BYTES_MAX: Final = 1024 * 1024
# Chunks above this are hashed in a thread.
_HASHED_HERE_BYTES_MAX: Final = 256 * 1024
_ABORT_TIMEOUT_S: Final = 10.0


async def hash_body(client: S3Client, body: Body, *, operation: str, key: str) -> SentBody:
    """Prepare a body to be sent: check its length, hash it, and keep the bytes if they are few.

    Raises:
        InvalidRequestError: It has another size than it says.
        Exception: Whatever reading it raised.
    """
    sha256 = hashlib.sha256()
    held: list[bytes] = []
    is_small = body.size_bytes <= HELD_BYTES_MAX
    async with aclosing(checked_chunks(body, operation=operation, key=key)) as chunks:
        async for chunk in chunks:
            if len(chunk) > _HASHED_HERE_BYTES_MAX:
                await run_blocking(sha256.update, chunk)
            else:
                sha256.update(chunk)
            if is_small:
                held.append(chunk)

    def read_again() -> AsyncGenerator[bytes, None]:
        return checked_chunks(body, operation=operation, key=key)

    read = _reader(held) if is_small else read_again
    return client.send(read, size_bytes=body.size_bytes, sha256=sha256.hexdigest())


def _reader(chunks: Sequence[Buffer]) -> ReadBody:
    async def read() -> AsyncGenerator[Buffer, None]:
        for chunk in chunks:
            yield chunk

    return read


class MultipartUpload:
    """One multipart upload, aborted unless it was completed.

    Attributes:
        is_completing: Completing it was asked for, so that it may have happened.
    """

    def __init__(
        self,
        bucket: S3Bucket,
        name: str,
        *,
        key: str,
        operation: str,
        part_bytes: int,
        slots: asyncio.Semaphore,
        condition: str | None,
    ) -> None:
        """Prepare an upload; nothing is sent yet.

        Args:
            bucket: Where to.
            name: The object.
            key: For errors, as is the operation.
            operation: See `key`.
            part_bytes: Size of a part; larger if there would be too many.
            slots: Parts in memory at once, of all uploads together.
            condition: What completing it carries as `If-None-Match`.
        """
        self._bucket = bucket
        self._target: Answer = {"Key": name}
        self._key = key
        self._operation = operation
        self._part_bytes = part_bytes
        self._slots = slots
        self._condition = condition
        self.is_completing = False

    async def put(self, body: Body, creation: Answer) -> Created:
        """Begin, send the parts, complete.

        Raises:
            RefusedError: As the store says.
            BrokenError: As the store does not say.
        """
        upload = await self._begin(creation)
        try:
            parts = await self._send(body, upload)
            completed = await self._complete(upload, parts)
        except BaseException as error:
            if not self.is_completing or _is_refused(error):
                await _abort(self._bucket, upload)
            # Otherwise it may be completing just now, and Ceph carries out both: the object would lose its parts.
            raise
        return read_created(completed, self._operation, self._key)

    async def _begin(self, creation: Answer) -> dict[str, Any]:
        begun = asyncio.ensure_future(self._bucket.call("create_multipart_upload", **self._target, **creation))

        def name(answer: Answer) -> dict[str, Any]:
            return {**self._target, "UploadId": answer["UploadId"]}

        async def give_up() -> None:
            await _abort(self._bucket, name(await begun))

        try:
            return name(await asyncio.shield(begun))
        except asyncio.CancelledError:
            # Its id comes with the answer, and without that nobody could abort it.
            await _tidy_up(give_up)
            raise

    async def _complete(self, upload: dict[str, Any], parts: list[dict[str, Any]]) -> Answer:
        self.is_completing = True
        completing = asyncio.ensure_future(
            self._bucket.call(
                "complete_multipart_upload", **upload, MultipartUpload={"Parts": parts}, IfNoneMatch=self._condition
            )
        )

        async def see() -> None:
            try:
                await completing
            except RefusedError as error:
                if _is_refused(error):
                    await _abort(self._bucket, upload)

        try:
            return await asyncio.shield(completing)
        except asyncio.CancelledError:
            # Cut off here, nobody would know whether its parts are an object or lie about.
            await _tidy_up(see)
            raise

    async def _send(self, body: Body, upload: dict[str, Any]) -> list[dict[str, Any]]:
        part_bytes = max(self._part_bytes, -(-body.size_bytes // PARTS_MAX))
        sending: list[asyncio.Task[dict[str, Any]]] = []
        try:
            async with asyncio.TaskGroup() as group, aclosing(self._parts(body, part_bytes)) as parts:
                async for part in parts:
                    task = group.create_task(self._send_part(upload, len(sending) + 1, part))
                    # The part has held a slot since before it was read. The task need not have begun when it ends.
                    task.add_done_callback(lambda _: self._slots.release())
                    sending.append(task)
        except BaseExceptionGroup as failures:
            error = first_error(failures)
        else:
            return [task.result() for task in sending]
        raise error

    async def _parts(self, body: Body, part_bytes: int) -> AsyncGenerator[bytearray, None]:
        """Yield the body in parts of one size, the last one smaller; at least one. Each holds a slot."""
        await self._slots.acquire()
        part, is_handed_over = bytearray(), False
        try:
            async with aclosing(checked_chunks(body, operation=self._operation, key=self._key)) as chunks:
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
        sent = self._bucket.client.send(_reader([part]), size_bytes=len(part), sha256=sha256)
        answer = await self._bucket.call("upload_part", **upload, PartNumber=number, Body=sent, ContentLength=len(part))
        return {"PartNumber": number, "ETag": answer["ETag"]}


def _is_refused(error: BaseException) -> bool:
    """Return whether the store said for certain that it did not and will not complete the upload."""
    return isinstance(error, RefusedError) and error.refusal.status < SERVER_ERRORS


async def _abort(bucket: S3Bucket, upload: dict[str, Any]) -> None:
    await _tidy_up(lambda: bucket.call("abort_multipart_upload", **upload))


async def _tidy_up(tidy: Callable[[], Awaitable[object]]) -> None:
    """Tidy up as far as possible; what is left is found by `collect`."""

    async def bounded() -> None:
        with suppress(RefusedError, BrokenError, StoreError, TimeoutError):
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await tidy()

    # A caller that is cancelled once more does not stop it.
    await asyncio.shield(asyncio.ensure_future(bounded()))


class S3Writer:
    """The writing half of an S3 store. It knows objects by their whole names.

    Args:
        bucket: Where to.
        settings: When a body goes in parts, how large these are, how it is encrypted.
    """

    def __init__(self, bucket: S3Bucket, settings: S3Settings) -> None:
        self._bucket = bucket
        self._settings = settings
        self.part_slots = asyncio.Semaphore(settings.parts_in_memory_max)
        # By object and hash: the write id of a create that may have happened (design 0002, C3).
        self._unsettled: dict[tuple[str, str], str] = {}

    async def put(self, name: str, body: Body, *, key: str, ttl_ms: int | None, tagged: bool) -> Created:
        """Write an object, replacing one that is there; see `BlobStore.put`.

        Args:
            name: The object.
            key: What it is called in errors.
            ttl_ms: The TTL that it is created with.
            tagged: Whether the TTL is in a tag, too.
        """
        creation = self.created_with(new_write_id(), ttl_ms, tagged=tagged)
        if body.size_bytes > self._settings.single_put_bytes_max:
            upload = self._upload(key, name, "put", condition=None)
            try:
                return await upload.put(body, creation)
            except (RefusedError, BrokenError) as error:
                raise _upload_error(error, "put", key) from None
        sent = await hash_body(self._bucket.client, body, operation="put", key=key)
        answer = await self._bucket.ask("put_object", "put", key, Key=name, **_content(sent), **creation)
        return read_created(answer, "put", key)

    async def create(
        self, name: str, body: Body, *, key: str, ttl_ms: int | None, tagged: bool, may_go_in_parts: bool
    ) -> CreateOutcome:
        """Write an object unless it is there; see `BlobStore.put_if_absent`, and `put` for the arguments.

        Args:
            may_go_in_parts: Completing a multipart upload takes `If-None-Match` here.
        """
        operation = "put_if_absent"
        is_multipart = may_go_in_parts and body.size_bytes > self._settings.single_put_bytes_max
        if body.size_bytes > PUT_BYTES_MAX and not is_multipart:
            raise CapabilityMissingError(
                "is larger than one PUT can be, and this store cannot complete a multipart upload conditionally",
                operation=operation,
                key=key,
                hint="lower blob_bytes_max to 5 GiB or less",
            )
        sent = await hash_body(self._bucket.client, body, operation=operation, key=key)
        create = (name, sent.sha256)
        # A create that is sent again after an unknown outcome says the same as before, so that it knows itself.
        known_id = self._unsettled.pop(create, "")
        write_id = known_id or new_write_id()
        try:
            if is_multipart:
                own = await self._find_own(key, name, write_id) if known_id else None
                if own is not None:
                    return own
                outcome = await self.create_in_parts(
                    name, body, key=key, ttl_ms=ttl_ms, tagged=tagged, write_id=write_id
                )
            else:
                outcome = await self._create(
                    key, name, sent, self.created_with(write_id, ttl_ms, tagged=tagged), write_id
                )
        except BaseException:
            self._remember(create, write_id)
            raise
        if isinstance(outcome, Unknown):
            self._remember(create, write_id)
        return outcome

    async def create_in_parts(
        self,
        name: str,
        body: Body,
        *,
        key: str,
        ttl_ms: int | None,
        tagged: bool,
        write_id: str = "",
        part_bytes: int | None = None,
    ) -> CreateOutcome:
        """Write as `create`, by a multipart upload whatever the size."""
        operation = "put_if_absent"
        write_id = write_id or new_write_id()
        upload = self._upload(key, name, operation, condition="*", part_bytes=part_bytes)
        try:
            await upload.put(body, self.created_with(write_id, ttl_ms, tagged=tagged))
            # It may be dated by its first request, long ago.
            return await self._found(key, name)
        except (RefusedError, BrokenError) as error:
            if upload.is_completing:
                return await self._settle(error, key, name, write_id)
            raise _upload_error(error, operation, key) from None

    async def _create(
        self, key: str, name: str, sent: SentBody, creation: dict[str, Any], write_id: str
    ) -> CreateOutcome:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            answer = await self._bucket.call("put_object", Key=name, IfNoneMatch="*", **_content(sent), **creation)
        except (RefusedError, BrokenError) as error:
            return await self._settle(error, key, name, write_id)
        if clock() - began_s > SLOW_PUT_S:
            return await self._found(key, name)
        return read_created(answer, "put_if_absent", key)

    async def _found(self, key: str, name: str) -> CreateOutcome:
        """Ask for the time of a blob that was just created: a store may date it by the start of its PUT.

        Returns:
            Unknown if it is gone, because the caller was away for longer than its TTL: it is to be sent again.

        Raises:
            StoreError: As the store says.
        """
        operation = "put_if_absent"
        try:
            answer = await self._bucket.ask("head_object", operation, key, Key=name)
        except BlobNotFoundError:
            return Unknown(reason="it was created, and was deleted before its time could be asked for")
        with answers(operation, key):
            return Created(created_at_ms=read_created_at_ms(answer))

    async def _find_own(self, key: str, name: str, write_id: str) -> Created | None:
        try:
            answer = await self._bucket.ask("head_object", "put_if_absent", key, Key=name)
        except BlobNotFoundError:
            return None
        return _own(answer, key, write_id)

    async def _settle(self, error: RefusedError | BrokenError, key: str, name: str, write_id: str) -> CreateOutcome:
        """Find out what became of a create that was not plainly answered (design 0003, W1 and W2)."""
        operation = "put_if_absent"
        if not _needs_a_look(error):
            raise store_error(error, operation, key) from None
        try:
            found = await self._bucket.call("head_object", Key=name)
        except (RefusedError, BrokenError) as unseen:
            if _status(error) == PRECONDITION_FAILED and _status(unseen) == FORBIDDEN:
                return Lost()  # the store has said that it is there, and lets nobody look at it
            is_gone = _status(unseen) == NOT_FOUND
            if isinstance(error, BrokenError) or _status(error) >= SERVER_ERRORS:
                seen = "it is not there yet" if is_gone else f"nor when asked whether it is there: {unseen}"
                return Unknown(reason=f"no answer: {error}; {seen}")
            raise as_unavailable(store_error(error if is_gone else unseen, operation, key), operation, key) from None
        return _own(found, key, write_id) or Lost()

    def _remember(self, create: tuple[str, str], write_id: str) -> None:
        if len(self._unsettled) >= _UNSETTLED_MAX:
            del self._unsettled[next(iter(self._unsettled))]
        self._unsettled[create] = write_id

    def created_with(self, write_id: str, ttl_ms: int | None, *, tagged: bool) -> dict[str, Any]:
        """Return what an object is created with beside its content."""
        metadata = {WRITE_ID: write_id}
        if ttl_ms is not None:
            metadata[TTL_MS] = str(ttl_ms)
        return {
            "Metadata": metadata,
            "Tagging": f"{TTL_TAG}={EXPIRING}" if ttl_ms is not None and tagged else None,
            "ServerSideEncryption": self._settings.encryption or None,
            "SSEKMSKeyId": self._settings.kms_key_id or None,
        }

    def _upload(
        self, key: str, name: str, operation: str, *, condition: str | None, part_bytes: int | None = None
    ) -> MultipartUpload:
        return MultipartUpload(
            self._bucket,
            name,
            key=key,
            operation=operation,
            part_bytes=part_bytes or self._settings.part_bytes,
            slots=self.part_slots,
            condition=condition,
        )


def new_write_id() -> str:
    """Return an id that only one create has."""
    return secrets.token_hex(16)


def _content(sent: SentBody) -> dict[str, Any]:
    """Pass a body as `put_object` takes it; a store that keeps checksums keeps the one that the signature covers."""
    checksum = base64.b64encode(bytes.fromhex(sent.sha256)).decode()
    return {"Body": sent, "ContentLength": sent.size, "ChecksumSHA256": checksum}


def _own(answer: Answer, key: str, write_id: str) -> Created | None:
    with answers("put_if_absent", key):
        if answer.get("Metadata", {}).get(WRITE_ID) != write_id:
            return None
        return Created(created_at_ms=read_created_at_ms(answer))


def _upload_error(error: RefusedError | BrokenError, operation: str, key: str) -> StoreError:
    """Return the error of an upload that was not completed; one that a collector aborted is begun again."""
    raised = store_error(error, operation, key)
    return as_unavailable(raised, operation, key) if isinstance(raised, BlobNotFoundError) else raised


def _status(error: RefusedError | BrokenError) -> int:
    """Return the status of an answer; 0 if there was none."""
    return error.refusal.status if isinstance(error, RefusedError) else 0


def _needs_a_look(error: RefusedError | BrokenError) -> bool:
    """Return whether a create that ended so may have happened, now or when it was sent before."""
    if isinstance(error, BrokenError):
        return error.sent
    status = error.refusal.status
    is_overload = status == SERVICE_UNAVAILABLE
    return (
        status in {PRECONDITION_FAILED, CONFLICT}
        or (status >= SERVER_ERRORS and not is_overload)
        or error.refusal.code == _NO_UPLOAD
    )
