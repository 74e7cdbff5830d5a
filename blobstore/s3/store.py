"""A bucket of an S3-compatible store, as design 0003 lays it out."""

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any, Final

from typing_extensions import override

from blobstore import base, errors
from blobstore.concurrency import map_bounded
from blobstore.s3 import threads
from blobstore.s3.bucket_rules import KEPT, TTL_TAG
from blobstore.s3.client import S3Bucket, abandon
from blobstore.s3.errors import (
    Answer,
    BrokenError,
    RefusedError,
    answers,
    date_ms,
    read_promised_bytes,
    read_ttl_ms,
    showable,
    store_error,
    whole_seconds_ms,
)
from blobstore.s3.settings import PROFILE_BYTES_MAX, PROFILE_KEY, S3Settings, StoreProfile, decode_profile
from blobstore.s3.writer import SLOW_PUT_S, NewBlob, S3Writer
from blobstore.wrappers.forwarding import Bandwidth
from blobstore.wrappers.retry import Hedge, HedgeSettings

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# Forgotten uploads are listed up to this number: who aborts these sees the next.
_UNFINISHED_MAX: Final = 10_000

# One has the version that is looked for, unless its key was deleted as often.
_VERSIONS_AT_ONCE: Final = 10
# From this size on a thread reads a range. For less, two hops and a second pool do not pay (design 0008, B2).
THREADED_FROM_BYTES: Final = 1024 * 1024


class S3Store(base.BlobStore):
    """Blobs as objects of a bucket that is there already, below a prefix; bound to the event loop of the first call.

    Args:
        prefix: Everything is below it; empty for the whole bucket.
        bound_by_profile: Read the profile that `doctor` wrote, and use nothing that it denies (design 0003, P1).
        hedge: When the profile is asked for a second time: a second request for what waits for it waits, too.
        bandwidth: What every body goes through on its way to the server. Blobs that come back are for `PacedStore`.

    Raises:
        InvalidRequestError: The bucket or the prefix is not a valid name.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        settings: S3Settings | None = None,
        *,
        bound_by_profile: bool = True,
        hedge: HedgeSettings | None = None,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        if not _BUCKET.fullmatch(bucket):
            message = "is not the name of a bucket"
            hint = "3 to 63 of a-z, 0-9, `.` and `-`: s3://bucket/prefix"
            # No more of the URL, nor of a prefix: either may hold a secret that was put there by mistake.
            raise errors.InvalidRequestError(message, operation="open", key="s3://", hint=hint)
        self.bucket = bucket
        self.prefix = _checked_prefix(prefix)
        self.settings = settings or S3Settings()
        self._root = f"{self.prefix}/" if prefix else ""
        self._bucket = S3Bucket(bucket, self.settings, bandwidth)
        self._writer = S3Writer(self._bucket, self.settings)
        self._profile: StoreProfile | None = None
        self._is_ready = not bound_by_profile
        self._readying = asyncio.Lock()
        self._keeps_deleted = False
        self._hedge = None if hedge is None else Hedge(hedge)

    @property
    @override
    def capabilities(self) -> base.Capabilities:
        profile = self._profile
        return base.Capabilities(
            atomic_create=profile is None or profile.atomic_create,
            consistent_lists=profile is None or profile.consistent_lists,
            keeps_deleted=self._keeps_deleted,
            removes_ttl=self._uses_tags,
            keeps_created_at=False,
            created_late_ms=int(1000 * SLOW_PUT_S) + 1000,
        )

    @override
    def place(self) -> tuple[str, ...]:
        # Whatever the endpoint: one server has many names.
        return "s3", self.bucket, *filter(None, self.prefix.split("/"))

    @override
    async def put(
        self, key: str, body: base.Body, *, ttl_ms: int | None = None, repeatable: bool = False
    ) -> base.Created:
        return await self._writer.put(await self._new_blob(key, body, "put", ttl_ms))

    @override
    async def put_if_absent(self, key: str, body: base.Body, *, ttl_ms: int | None = None) -> base.CreateOutcome:
        blob = await self._new_blob(key, body, "put_if_absent", ttl_ms)
        # What is not known counts as absent (P2); settings may say that it is there, a profile that it is not.
        profile, setting = self._profile, self.settings.conditional_multipart
        may_go_in_parts = bool(setting) if profile is None else profile.conditional_multipart and setting is not False
        return await self._writer.create(blob, may_go_in_parts=may_go_in_parts)

    async def _new_blob(self, key: str, body: base.Body, operation: str, ttl_ms: int | None) -> NewBlob:
        base.check_put(key, ttl_ms, operation)
        name = self._object(key, operation)
        await self._ready()
        return NewBlob(operation=operation, key=key, name=name, body=body, ttl_ms=ttl_ms, tagged=self._uses_tags)

    async def put_parts_if_absent(
        self, key: str, body: base.Body, *, ttl_ms: int | None = None, part_bytes: int | None = None
    ) -> base.CreateOutcome:
        """Put by a multipart upload as `put_if_absent`, whatever the profile says of it; for `doctor`."""
        blob = await self._new_blob(key, body, "put_if_absent", ttl_ms)
        return await self._writer.create_in_parts(blob, part_bytes=part_bytes)

    @override
    async def read_into(
        self,
        key: str,
        sink: base.Sink,
        *,
        start: int = 0,
        size_bytes: int | None = None,
        deleted: bool = False,
        fresh: bool = False,
    ) -> None:
        base.check_read(key, start, size_bytes)
        wanted = {"Key": self._object(key, "get")}
        await self._ready()
        try:
            await self._read(key, sink, wanted, start=start, size_bytes=size_bytes, fresh=fresh)
        except errors.BlobNotFoundError as error:
            version = await self._deleted_version(wanted["Key"], "get", key)
            if version is None:
                raise
            if not deleted:
                raise errors.BlobDeletedError("was deleted", operation="get", key=key) from error
            wanted["VersionId"] = version
            await self._read(key, sink, wanted, start=start, size_bytes=size_bytes, fresh=fresh)

    async def _read(
        self, key: str, sink: base.Sink, blob: dict[str, str], *, start: int, size_bytes: int | None, fresh: bool
    ) -> None:
        if size_bytes == 0:
            base.range_size_bytes(start, 0, blob_size_bytes=await self._size_bytes(key, blob), key=key)
            return
        bucket = S3Bucket(self.bucket, self.settings) if fresh else self._bucket
        is_threaded = self.settings.threaded_reads and size_bytes is not None and size_bytes >= THREADED_FROM_BYTES
        is_whole = start == 0 and size_bytes is None
        last = "" if size_bytes is None else start + size_bytes - 1
        wanted = {**blob, "Range": None if is_whole else f"bytes={start}-{last}"}
        try:
            answer = await (bucket.fetch(**wanted) if is_threaded else bucket.call("get_object", **wanted))
            left = _promised_bytes(answer, start, size_bytes, key)
            if is_threaded:
                await threads.read_into(answer["Body"].raw_stream, sink, size_bytes=left)
            else:
                await base.write_chunks(_checked_chunks(bucket.client.read(answer), left, key), sink)
        except RefusedError as error:
            if error.refusal.status != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise store_error(error, "get", key) from None
            # Legal if it is the empty rest of the blob, which HTTP cannot say.
            base.range_size_bytes(start, size_bytes, blob_size_bytes=await self._size_bytes(key, blob), key=key)
        except BrokenError as error:
            raise store_error(error, "get", key) from None
        finally:
            if fresh:
                await bucket.client.close()

    async def _size_bytes(self, key: str, blob: dict[str, str]) -> int:
        answer = await self._bucket.ask("head_object", "get", key, **blob)
        with answers("get", key):
            return int(answer["ContentLength"])

    async def _deleted_version(self, name: str, operation: str, key: str) -> str | None:
        """Return the newest version of an object that is not there; None if none is kept (design 0003, V2)."""
        position: dict[str, str] = {}
        while self._keeps_deleted:
            answer = await self._bucket.ask(
                "list_object_versions", operation, key, Prefix=name, MaxKeys=_VERSIONS_AT_ONCE, **position
            )
            with answers(operation, key):
                kept = [str(each["VersionId"]) for each in answer.get("Versions", ()) if each["Key"] == name]
                if kept or not answer["IsTruncated"] or answer["NextKeyMarker"] != name:
                    return next(iter(kept), None)
                # Nothing but delete markers so far.
                following = {"KeyMarker": name, "VersionIdMarker": str(answer["NextVersionIdMarker"])}
            if following == position:
                raise errors.StoreUnavailableError("the list does not go on", operation=operation, key=key)
            position = following
        return None

    @override
    async def stat(self, key: str) -> base.BlobInfo | None:
        name = self._object(key, "stat")
        await self._ready()
        try:
            answer = await self._bucket.ask("head_object", "stat", key, Key=name)
            with answers("stat", key):
                created_at_ms, ttl_ms = whole_seconds_ms(answer["LastModified"]), read_ttl_ms(answer)
                stored_bytes = int(answer["ContentLength"])
            if ttl_ms is not None and self._uses_tags:
                tags = await self._bucket.ask("get_object_tagging", "stat", key, Key=name)
                if {"Key": TTL_TAG, "Value": KEPT} in tags.get("TagSet", ()):
                    ttl_ms = None
        except errors.BlobNotFoundError:
            return None
        expires_at_ms = None if ttl_ms is None else created_at_ms + ttl_ms
        return base.BlobInfo(key=key, size_bytes=stored_bytes, created_at_ms=created_at_ms, expires_at_ms=expires_at_ms)

    @override
    async def check_unused(self, operation: str, *, marker: str = "", prefixes: tuple[str, ...] = ()) -> None:
        parts = self.prefix.split("/") if self.prefix else []
        found: list[str] = []
        for levels in range(1, min(2, len(parts)) + 1 if marker else 0):
            above = "".join(f"{part}/" for part in parts[:-levels])
            if not f"{'/'.join(parts[-levels:])}/".startswith(prefixes):
                continue
            # Who may not look there does not use it either.
            with suppress(errors.BlobNotFoundError, errors.AccessDeniedError):
                await self._ready()
                await self._bucket.ask("head_object", "stat", marker, Key=above + marker)
                found.append(f"s3://{self.bucket}/{above}".rstrip("/"))
        base.check_not_within(found, operation)

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = base.LIST_PAGE_MAX) -> base.ListPage:
        base.check_list(prefix, limit)
        await self._ready()
        after = self._root + start_after if start_after else None
        wanted = {"Prefix": self._root + prefix, "StartAfter": after, "MaxKeys": limit}
        answer = await self._bucket.ask("list_objects_v2", "list_page", prefix, **wanted)
        with answers("list_page", prefix):
            return self._page(answer, prefix, start_after, limit)

    def _page(self, answer: Answer, prefix: str, start_after: str, limit: int) -> base.ListPage:
        blobs: list[base.BlobInfo] = []
        before = start_after
        contents = answer.get("Contents", ())
        if answer.get("KeyCount", len(contents)) != len(contents) or len(contents) > limit:
            raise errors.StoreUnavailableError("the list is not as long as it says", operation="list_page", key=prefix)
        for listed in contents:
            if self._root and listed["Key"] == self._root:
                continue  # Hadoop marks the directory that is our root with an empty object; its key is none of ours
            key = self._key(listed["Key"])
            if key is None or not key.startswith(prefix) or key <= before:
                raise errors.StoreUnavailableError("the list repeats or goes astray", operation="list_page", key=prefix)
            before = key
            created_at_ms, size_bytes = whole_seconds_ms(listed["LastModified"]), int(listed["Size"])
            blobs.append(base.BlobInfo(key=key, size_bytes=size_bytes, created_at_ms=created_at_ms, ttl_known=False))
        return base.ListPage(blobs=tuple(blobs), truncated=bool(answer["IsTruncated"]))

    @override
    async def remove_ttl(self, key: str) -> None:
        name = self._object(key, "remove_ttl")
        await self._ready()
        if not self._uses_tags:
            await self._bucket.ask("head_object", "remove_ttl", key, Key=name)
            return
        kept = {"TagSet": [{"Key": TTL_TAG, "Value": KEPT}]}
        try:
            await self._bucket.ask("put_object_tagging", "remove_ttl", key, Key=name, Tagging=kept)
        except errors.BlobNotFoundError as error:
            if await self._deleted_version(name, "remove_ttl", key) is None:
                raise
            raise errors.BlobDeletedError("was deleted", operation="remove_ttl", key=key) from error

    @override
    async def delete(self, keys: Sequence[str]) -> tuple[base.DeleteFailure, ...]:
        base.check_delete(keys)
        names = {self._object(key, "delete"): key for key in keys}
        if not names:
            return ()
        await self._ready()
        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        try:
            answer = await self._bucket.ask("delete_objects", "delete", "", Delete=wanted)
        except errors.AccessDeniedError:
            # Ceph judges a batch by the bucket, to which rights on a prefix do not reach. Where the first may not be
            # deleted one by one either, that is the answer.
            (first, key), *rest = names.items()
            with suppress(errors.BlobNotFoundError):
                await self._bucket.ask("delete_object", "delete", key, Key=first)
            return await self._remove_each("delete_object", "delete", [(key, {"Key": name}) for name, key in rest])
        failures: list[base.DeleteFailure] = []
        for error in answer.get("Errors", ()):
            failed, code = names.get(str(error.get("Key", ""))), str(error.get("Code", ""))
            if failed is None:
                message = f"failed for a key that was not asked for: {code}"
                raise errors.StoreUnavailableError(message, operation="delete")
            if code != "NoSuchKey":
                reason = f"{code}: {showable(error.get('Message'))}".rstrip(": ")
                failures.append(base.DeleteFailure(key=failed, reason=reason))
        return tuple(failures)

    @override
    async def list_unfinished(self, prefix: str) -> tuple[base.UnfinishedPut, ...]:
        base.check_list(prefix, base.LIST_PAGE_MAX)
        await self._ready()
        puts: list[base.UnfinishedPut] = []
        position: dict[str, str] = {}
        while True:
            answer = await self._bucket.ask(
                "list_multipart_uploads", "list_unfinished", prefix, Prefix=self._root + prefix, **position
            )
            with answers("list_unfinished", prefix):
                puts += self._unfinished(answer)
            following = {name: str(answer.get(f"Next{name}", "")) for name in ("KeyMarker", "UploadIdMarker")}
            if not answer.get("IsTruncated") or len(puts) >= _UNFINISHED_MAX:
                return tuple(puts)
            if following == position or following["KeyMarker"] < position.get("KeyMarker", "") or not puts:
                raise errors.StoreUnavailableError("the list does not go on", operation="list_unfinished", key=prefix)
            position = following

    def _unfinished(self, answer: Answer) -> list[base.UnfinishedPut]:
        return [
            base.UnfinishedPut(
                key=key, upload_id=str(upload["UploadId"]), begun_at_ms=whole_seconds_ms(upload["Initiated"])
            )
            for upload in answer.get("Uploads", ())
            if (key := self._key(upload["Key"])) is not None
        ]

    @override
    async def abort_unfinished(self, puts: Sequence[base.UnfinishedPut]) -> tuple[base.DeleteFailure, ...]:
        await self._ready()
        uploads = [
            (put.key, {"Key": self._object(put.key, "abort_unfinished"), "UploadId": put.upload_id}) for put in puts
        ]
        return await self._remove_each("abort_multipart_upload", "abort_unfinished", uploads)

    async def _remove_each(
        self, method: str, operation: str, wanted: Iterable[tuple[str, dict[str, str]]]
    ) -> tuple[base.DeleteFailure, ...]:
        """Remove things one by one, each with its key, and note what may not be removed."""

        async def remove(keyed: tuple[str, dict[str, str]]) -> base.DeleteFailure | None:
            key, arguments = keyed
            try:
                with suppress(errors.BlobNotFoundError):
                    await self._bucket.ask(method, operation, key, **arguments)
            except errors.AccessDeniedError as error:
                return base.DeleteFailure(key=key, reason=str(error))
            return None

        failures = await map_bounded(remove, wanted)
        return tuple(failure for failure in failures if failure is not None)

    @override
    async def now_ms(self) -> int:
        await self._ready()
        # Any answer has the date, also that there is no such object or that it may not be looked at.
        try:
            answer = await self._bucket.call("head_object", Key=self._root + PROFILE_KEY)
            now_ms = date_ms(answer)
        except BrokenError as error:
            raise store_error(error, "now_ms", "") from None
        except RefusedError as error:
            if error.refusal.status not in {HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN}:
                raise store_error(error, "now_ms", "") from None
            now_ms = error.refusal.date_ms
        if now_ms is None:
            raise errors.StoreUnavailableError("the answer has no date", operation="now_ms")
        return now_ms

    @override
    async def close(self) -> None:
        await self._bucket.client.close()

    # --- for `doctor` and `lifecycle` ---

    async def begin_upload(self, key: str) -> base.UnfinishedPut:
        """Begin a multipart upload and leave it, as a process that dies does."""
        return await self._writer.begin(await self._new_blob(key, base.BytesBody(b""), "begin_upload", None))

    async def read_lifecycle(self) -> tuple[dict[str, Any], ...]:
        """Read all lifecycle rules of the bucket, as the SDK gives them."""
        return tuple((await self._read_lifecycle()).get("Rules", ()))

    async def _read_lifecycle(self) -> Answer:
        try:
            return await self._bucket.call("get_bucket_lifecycle_configuration")
        except (RefusedError, BrokenError) as error:
            if isinstance(error, RefusedError) and error.refusal.code == "NoSuchLifecycleConfiguration":
                return {}
            raise store_error(error, "read_lifecycle", self.bucket) from None

    async def write_lifecycle(self, rules: Sequence[dict[str, Any]]) -> None:
        """Replace all lifecycle rules of the bucket; there has to be one at least."""
        # It belongs to the configuration and not to a rule, and is lost unless it is said again.
        least = "TransitionDefaultMinimumObjectSize"
        wanted = {"LifecycleConfiguration": {"Rules": list(rules)}, least: (await self._read_lifecycle()).get(least)}
        await self._bucket.ask("put_bucket_lifecycle_configuration", "write_lifecycle", self.bucket, **wanted)

    @property
    def _uses_tags(self) -> bool:
        return self._profile is None or self._profile.tags

    def _object(self, key: str, operation: str) -> str:
        name = self._root + base.check_key(key, operation)
        if len(name) > base.KEY_BYTES_MAX:
            message = f"is longer than {base.KEY_BYTES_MAX} bytes with the prefix"
            raise errors.InvalidRequestError(message, operation=operation, key=repr(key))
        return name

    def _key(self, name: object) -> str | None:
        """Return the key of an object; None if it is not below the prefix."""
        text = str(name)
        return text.removeprefix(self._root) if text.startswith(self._root) else None

    async def _ready(self) -> None:
        """Read the profile, once, before anything else (design 0003, P1)."""
        if self._is_ready:
            return
        async with self._readying:
            if not self._is_ready:
                read = self._read_profile
                self._profile = await (self._hedge.race("profile", read) if self._hedge else read())
                self._keeps_deleted = self.settings.serve_deleted and await self._has_versions()
                self._is_ready = True

    async def _has_versions(self) -> bool:
        """Return whether what is deleted from now on stays as an older version; no if that may not be asked."""
        with suppress(errors.AccessDeniedError, errors.CapabilityMissingError):
            return (await self._bucket.ask("get_bucket_versioning", "open", self.bucket)).get("Status") == "Enabled"
        return False

    async def _read_profile(self) -> StoreProfile | None:
        try:
            answer = await self._bucket.call("get_object", Key=self._root + PROFILE_KEY)
            with answers("open", PROFILE_KEY):
                size_bytes = int(answer["ContentLength"])
            if size_bytes > PROFILE_BYTES_MAX:
                abandon(answer)
                raise errors.InvalidRequestError("is too large for a profile", operation="open", key=PROFILE_KEY)
            async with aclosing(self._bucket.client.read(answer)) as chunks:
                return decode_profile(b"".join([chunk async for chunk in chunks]))
        except BrokenError as error:
            raise store_error(error, "open", PROFILE_KEY) from None
        except RefusedError as error:
            status, code = error.refusal.status, error.refusal.code
            # Who may not list gets "denied" for what is not there; what really is denied shows with the next request.
            is_missing = status == HTTPStatus.NOT_FOUND and code != "NoSuchBucket"
            if is_missing or (status == HTTPStatus.FORBIDDEN and code == "AccessDenied"):
                return None
            raise store_error(error, "open", PROFILE_KEY) from None


def _checked_prefix(prefix: str) -> str:
    try:
        return base.check_key(prefix, "open") if prefix else ""
    except errors.InvalidRequestError:
        message = "is not a prefix that tidemark can use"
        hint = "components of A-Za-z0-9._-@~%+=, between single slashes, as in s3://bucket/team/state"
        raise errors.InvalidRequestError(message, operation="open", key="s3://", hint=hint) from None


def _promised_bytes(answer: Answer, start: int, size_bytes: int | None, key: str) -> int:
    try:
        with answers("get", key):
            return read_promised_bytes(answer, start, size_bytes, key=key)
    except BaseException:
        abandon(answer)
        raise


async def _checked_chunks(stream: AsyncGenerator[bytes, None], left: int, key: str) -> AsyncGenerator[bytes, None]:
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            left -= len(chunk)
            if left < 0:
                raise errors.StoreUnavailableError("more bytes came than were announced", operation="get", key=key)
            yield chunk
    if left:
        raise errors.StoreUnavailableError(f"the last {left} bytes did not come", operation="get", key=key)
