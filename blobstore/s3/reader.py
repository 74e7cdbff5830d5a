"""Reading an object: chunk by chunk through the event loop, or by a thread (design 0008)."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Final

from blobstore.checks import range_size_bytes
from blobstore.errors import StoreUnavailableError
from blobstore.s3.client import S3Bucket, abandon
from blobstore.s3.errors import (
    RANGE_NOT_SATISFIABLE,
    Answer,
    BrokenError,
    RefusedError,
    answers,
    read_promised_bytes,
    store_error,
)
from blobstore.s3.settings import S3Settings
from blobstore.sink import Sink, write_chunks

# From this size on a thread reads a range. For less, two hops and a second pool do not pay (design 0008, B2).
THREADED_FROM_BYTES: Final = 1024 * 1024


class S3Reader:
    """Reads the objects of a bucket.

    Args:
        bucket: Which.
        settings: How the server is reached.
        size_bytes_of: The size of a blob, asked of the store: for ranges that HTTP cannot say.
    """

    def __init__(
        self, bucket: S3Bucket, settings: S3Settings, *, size_bytes_of: Callable[[str], Awaitable[int]]
    ) -> None:
        self._bucket = bucket
        self._settings = settings
        self._size_bytes_of = size_bytes_of

    async def read_into(
        self, name: str, key: str, sink: Sink, start: int, size_bytes: int | None, *, fresh: bool
    ) -> None:
        """Give a range of an object to a sink.

        Args:
            name: Of the object.
            key: Of the blob, for errors.
            sink: For the bytes.
            start: Of the range.
            size_bytes: Of the range, more than 0; None: to the end.
            fresh: By a connection of its own.

        Raises:
            StoreError: As `BlobStore.read_into`.
        """
        threaded = self._settings.threaded_reads and size_bytes is not None and size_bytes >= THREADED_FROM_BYTES
        async with self._asking(key, fresh=fresh) as bucket:
            asked = await self._ask(bucket, name, key, start, size_bytes, threaded=threaded)
            if asked is None:
                return
            answer, left = asked
            if threaded:
                await bucket.client.read_into(answer, sink, size_bytes=left)
            else:
                await write_chunks(_checked_chunks(bucket.client.read(answer), left, key), sink)

    @asynccontextmanager
    async def _asking(self, key: str, *, fresh: bool) -> AsyncGenerator[S3Bucket, None]:
        """Yield the bucket to ask; its broken answers become errors of the contract."""
        bucket = S3Bucket(self._bucket.name, self._settings) if fresh else self._bucket
        try:
            yield bucket
        except BrokenError as error:
            raise store_error(error, "get", key) from None
        finally:
            if fresh:
                await bucket.client.close()

    async def _ask(
        self, bucket: S3Bucket, name: str, key: str, start: int, size_bytes: int | None, *, threaded: bool = False
    ) -> tuple[Answer, int] | None:
        """Return an answer whose body is to be read, and the size of that; None for the empty rest of a blob."""
        is_whole = start == 0 and size_bytes is None
        last = "" if size_bytes is None else start + size_bytes - 1
        wanted = {"Key": name, "Range": None if is_whole else f"bytes={start}-{last}"}
        try:
            answer = await (bucket.fetch(**wanted) if threaded else bucket.call("get_object", **wanted))
        except RefusedError as error:
            if error.refusal.status != RANGE_NOT_SATISFIABLE:
                raise store_error(error, "get", key) from None
            # Legal if it is the empty rest of the blob, which HTTP cannot say.
            range_size_bytes(start, size_bytes, blob_size_bytes=await self._size_bytes_of(key), key=key)
            return None
        try:
            with answers("get", key):
                return answer, read_promised_bytes(answer, start, size_bytes, key=key)
        except BaseException:
            abandon(answer)
            raise


async def _checked_chunks(stream: AsyncGenerator[bytes, None], left: int, key: str) -> AsyncGenerator[bytes, None]:
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            left -= len(chunk)
            if left < 0:
                raise StoreUnavailableError("more bytes came than were announced", operation="get", key=key)
            yield chunk
    if left:
        raise StoreUnavailableError(f"the last {left} bytes did not come", operation="get", key=key)
