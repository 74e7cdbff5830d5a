"""How objects and unfinished uploads leave a bucket: in a batch, or one by one where the batch is denied."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from blobstore.base import DeleteFailure, UnfinishedPut
from blobstore.concurrency import map_bounded
from blobstore.errors import AccessDeniedError, BlobNotFoundError, StoreUnavailableError
from blobstore.s3.bucket import S3Bucket
from blobstore.s3.errors import showable

_SINGLE_REQUESTS_IN_FLIGHT_MAX: Final = 16


async def delete_objects(bucket: S3Bucket, names: Mapping[str, str]) -> tuple[DeleteFailure, ...]:
    """Delete objects, there or not; see `BlobStore.delete`.

    Args:
        bucket: Where they are.
        names: The key of each object; at least one.

    Raises:
        AccessDeniedError: None may be deleted.
        StoreError: As the store says.
    """
    wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
    try:
        answer = await bucket.ask("delete_objects", "delete", "", Delete=wanted)
    except AccessDeniedError:
        # Ceph judges a batch by the bucket, to which rights on a prefix do not reach.
        return await _delete_singly(bucket, names)
    failures: list[DeleteFailure] = []
    for error in answer.get("Errors", ()):
        key, code = names.get(str(error.get("Key", ""))), str(error.get("Code", ""))
        if key is None:
            raise StoreUnavailableError(f"failed for a key that was not asked for: {code}", operation="delete")
        if code != "NoSuchKey":
            failures.append(DeleteFailure(key=key, reason=f"{code}: {showable(error.get('Message'))}".rstrip(": ")))
    return tuple(failures)


async def _delete_singly(bucket: S3Bucket, names: Mapping[str, str]) -> tuple[DeleteFailure, ...]:
    """Delete one by one; who may not delete the first is told so at once.

    Raises:
        AccessDeniedError: The first may not be deleted.
    """

    async def delete(name: str) -> None:
        with suppress(BlobNotFoundError):
            await bucket.ask("delete_object", "delete", names[name], Key=name)

    async def delete_if_allowed(name: str) -> DeleteFailure | None:
        try:
            await delete(name)
        except AccessDeniedError as error:
            return DeleteFailure(key=names[name], reason=str(error))
        return None

    first, *rest = names
    await delete(first)
    failures = await map_bounded(delete_if_allowed, rest, in_flight_max=_SINGLE_REQUESTS_IN_FLIGHT_MAX)
    return tuple(failure for failure in failures if failure is not None)


async def abort_uploads(bucket: S3Bucket, puts: Sequence[tuple[str, UnfinishedPut]]) -> tuple[DeleteFailure, ...]:
    """Give up multipart uploads, each with the name of its object; see `BlobStore.abort_unfinished`.

    Raises:
        StoreError: As the store says.
    """

    async def abort(named: tuple[str, UnfinishedPut]) -> DeleteFailure | None:
        name, put = named
        try:
            await bucket.ask("abort_multipart_upload", "abort_unfinished", put.key, Key=name, UploadId=put.upload_id)
        except BlobNotFoundError:
            return None
        except AccessDeniedError as error:
            return DeleteFailure(key=put.key, reason=str(error))
        return None

    failures = await map_bounded(abort, puts, in_flight_max=_SINGLE_REQUESTS_IN_FLIGHT_MAX)
    return tuple(failure for failure in failures if failure is not None)
