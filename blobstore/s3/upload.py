"""Bodies on their way to an S3 server: hashed before they are sent, whole or in parts (design 0003, W3 to W5)."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final

from blobstore.base import Body, Created
from blobstore.checks import checked_chunks
from blobstore.concurrency import first_error, run_blocking
from blobstore.errors import StoreError
from blobstore.s3.bucket import S3Bucket
from blobstore.s3.client import ReadBody, S3Client, SentBody
from blobstore.s3.errors import SERVER_ERRORS, Answer, BrokenError, RefusedError, read_created
from blobstore.s3.settings import PARTS_MAX
from blobstore.sink import Buffer

# A body up to this size stays in memory between being hashed and being sent.
HELD_BYTES_MAX: Final = 1024 * 1024
# Chunks above this are hashed in a thread.
_HASHED_HERE_BYTES_MAX: Final = 256 * 1024
_ABORT_TIMEOUT_S: Final = 10.0


async def hash_body(client: S3Client, body: Body, *, operation: str, key: str) -> SentBody:
    """A body ready to be sent: its length checked, its hash known, and the bytes kept if they are few.

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
        """Nothing is sent yet.

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

    async def put(self, body: Body, birth: Answer) -> Created:
        """All of it: begin, send the parts, complete.

        Raises:
            RefusedError: As the store says.
            BrokenError: As the store does not say.
        """
        upload = await self._begin(birth)
        try:
            parts = await self._send(body, upload)
            completed = await self._complete(upload, parts)
        except BaseException as error:
            if not self.is_completing or _is_refused(error):
                await _abort(self._bucket, upload)
            # Otherwise it may be completing just now, and Ceph carries out both: the object would lose its parts.
            raise
        return read_created(completed, self._operation, self._key)

    async def _begin(self, birth: Answer) -> dict[str, Any]:
        begun = asyncio.ensure_future(self._bucket.call("create_multipart_upload", **self._target, **birth))

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
        """The body in parts of one size, the last as large as it is; at least one. Each holds a slot."""
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
    """Whether the store has said for certain that it did not and will not complete the upload."""
    return isinstance(error, RefusedError) and error.refusal.status < SERVER_ERRORS


async def _abort(bucket: S3Bucket, upload: dict[str, Any]) -> None:
    """Give an upload up."""
    await _tidy_up(lambda: bucket.call("abort_multipart_upload", **upload))


async def _tidy_up(tidy: Callable[[], Awaitable[object]]) -> None:
    """Tidy up as far as possible; what is left is found by `collect`."""

    async def bounded() -> None:
        with suppress(RefusedError, BrokenError, StoreError, TimeoutError):
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await tidy()

    # A caller that is cancelled once more does not stop it.
    await asyncio.shield(asyncio.ensure_future(bounded()))
