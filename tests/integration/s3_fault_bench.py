"""A bucket behind a fault proxy, a repository in it, and the faults that know what S3 answers look like.

The tests play the table of faults that a top engine has to survive, rows 1 to 19; each names its row. What of a
row cannot apply here:

- Rows 3, 8: no request carries `If-Match`; blobs are written once, so a range that is gone on with cannot be of
  another version (design 0003, options that lost).
- Row 2: nothing is copied on the store.
- Row 7: what hangs is cut off and sent again; that reads are asked for a second time is for `test_s3_threads`, and
  switched off elsewhere, so that each fault meets the request that it is meant for.
- Row 15: blobs have one copy; the way out is another commit, which the caller chooses.
- Row 16: a store whose every list leaves out the same key for good is below what the protocol needs (design 0002).
- Row 17: that a probe finds such a store out is the business of `doctor` and its tests; here, what a store does that
  is known to be one, or behaves like one at the wrong moment.
- Row 19: an S3 store of ours does not let the server delete by itself before a backstop of a week; that its rule fires
  early is played by deleting.
"""

import asyncio
import datetime as dt
import itertools
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from email.utils import formatdate
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace
from typing_extensions import override

from blobstore.base import BlobStore, BytesBody, read_blob
from blobstore.opening import StoreSettings, open_s3, open_store
from blobstore.s3.settings import S3Settings
from blobstore.wrappers.retry import HedgeSettings, RetrySettings
from engine.backup.backup import BackupResult
from engine.collect.backend import InProcessBackend, Listing
from engine.collect.report import CollectReport
from engine.repository.repository import Repository
from index.plan.commits import Commit, Retention
from index.snapshot.keys import RunId
from index.snapshot.model import Scope
from tests.fault_proxy import FaultProxy
from tests.fault_rules import Answer, Fault, Predicate, Request, Rewrite, Rule, on
from tests.servers.s3_server import S3Server
from tests.unit.engine.conftest import text_tree
from tests.unit.engine.workbench import read_tree

MIB = 1024 * 1024
JOB = Scope("job")
LAST = Retention(keep_last=1)
DAY_MS = 86_400_000
RETRY = RetrySettings(attempts_max=5, first_wait_s=0.01, wait_max_s=0.1, deadline_s=10.0)
S3 = S3Settings(path_style=True, connect_timeout_s=1.0, read_timeout_s=3.0)
# For tests of silence. All others have time, so that a slow machine is not a fault.
IMPATIENT = msgspec.structs.replace(S3, read_timeout_s=0.3)
IN_PARTS = msgspec.structs.replace(S3, single_put_bytes_max=5 * MIB, part_bytes=5 * MIB, conditional_multipart=True)
PREFIX = "some/prefix/"
# Every request that a repository makes but for those of multipart uploads.
OPERATIONS = (
    "PutObject",
    "GetObject",
    "HeadObject",
    "ListObjectsV2",
    "DeleteObjects",
    "PutObjectTagging",
    "GetObjectTagging",
)
BLOB = "/blobs/"
INDEX = "/indexes/"
RECORD = "/log/"


class AgedBackend(InProcessBackend):
    """See every upload as two days older than it is, as no server of tests lets anybody wait for that."""

    @override
    async def list_uploads(self, run: RunId, now_ms: int) -> Listing:
        listing = await super().list_uploads(run, now_ms)
        self._uploads = tuple(replace(u, created_at_ms=u.created_at_ms - 2 * DAY_MS) for u in self._uploads)
        return listing


class Bench:
    """A bucket behind a proxy, with and without the proxy, and a repository in it."""

    def __init__(self, server: S3Server, bucket: str, proxy: FaultProxy, root: Path, stack: AsyncExitStack) -> None:
        self.server = server
        self.bucket = bucket
        self.proxy = proxy
        self._root = root
        self._stack = stack
        self._names = itertools.count()
        self._direct: BlobStore | None = None

    def store(
        self,
        *,
        retry: RetrySettings = RETRY,
        s3: S3Settings = S3,
        in_flight_max: int = 16,
        hedge: HedgeSettings | None = None,
    ) -> BlobStore:
        """The whole stack, through the proxy."""
        return self._open(self.proxy.endpoint_url, retry, s3, in_flight_max, hedge)

    def bare(self, s3: S3Settings = S3) -> BlobStore:
        """The S3 store alone, through the proxy: what one attempt comes to."""
        s3 = msgspec.structs.replace(s3, endpoint_url=self.proxy.endpoint_url)
        return self._closed(open_s3(self.url, StoreSettings(s3=s3)))

    def direct(self) -> BlobStore:
        """The whole stack, past the proxy."""
        self._direct = self._direct or self._open(self.server.endpoint_url, RETRY, S3, 16)
        return self._direct

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{PREFIX}"

    def stored(self, key: str) -> bytes:
        """The bytes of an object, as the SDK's own client finds them."""
        data = self.server.client.get_object(Bucket=self.bucket, Key=PREFIX + key)["Body"].read()
        assert isinstance(data, bytes)
        return data

    def plant(self, key: str, data: bytes) -> None:
        """Put an object past the proxy and the store."""
        self.server.client.put_object(Bucket=self.bucket, Key=PREFIX + key, Body=data)

    def remove(self, key: str) -> None:
        """Delete an object past the proxy and the store."""
        self.server.client.delete_object(Bucket=self.bucket, Key=PREFIX + key)

    def keys(self, prefix: str = "") -> list[str]:
        """What there is, past the proxy and the store."""
        listed = self.server.client.list_objects_v2(Bucket=self.bucket, Prefix=PREFIX + prefix)
        return [str(listed["Key"]).removeprefix(PREFIX) for listed in listed.get("Contents", ())]

    async def repository(self, **settings: Any) -> Repository:
        """A repository as one process sees it, through the proxy; the first one makes it."""
        store = self.store()
        if self.keys("repository"):
            return await Repository.open(store)
        repository = await Repository.init(store, **settings)
        self.proxy.clear_log()
        return repository

    @staticmethod
    async def collect(repository: Repository) -> CollectReport:
        """Collect as in two days: only the newest commit stays."""
        return await repository.collect(LAST, delete_share_max=1, backend=AgedBackend(repository.store))

    async def backup(self, repository: Repository, text: str) -> BackupResult:
        tree = self._root / f"tree-{next(self._names)}"
        for name, data in text_tree(text).items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes(data)
        return await repository.backup(JOB, tree)

    async def commit(self, repository: Repository, text: str) -> Commit:
        return await repository.commit(JOB, [await self.backup(repository, text)], offsets=text)

    def target(self) -> Path:
        return self._root / f"target-{next(self._names)}"

    async def check_restores(self, text: str, *, past_proxy: bool = True) -> None:
        """That the newest commit restores to this text, byte for byte (G1)."""
        repository = await Repository.open(self.direct() if past_proxy else self.store())
        target = self.target()
        await repository.find_and_restore(JOB, target)
        assert read_tree(target) == text_tree(text)

    def strike(self, fault: Fault, *operations: str, key: str = "", **how: Any) -> Rule:
        return self.proxy.add(Rule(fault=fault, when=on(*operations, key=key), **how))

    def _open(
        self,
        endpoint_url: str,
        retry: RetrySettings,
        s3: S3Settings,
        in_flight_max: int,
        hedge: HedgeSettings | None = None,
    ) -> BlobStore:
        settings = StoreSettings(
            retry=retry,
            s3=msgspec.structs.replace(s3, endpoint_url=endpoint_url, hedged_reads=hedge is not None),
            in_flight_max=in_flight_max,
            hedge=hedge or HedgeSettings(),
        )
        return self._closed(open_store(self.url, settings, rng=Random(1).random))

    def _closed(self, store: BlobStore) -> BlobStore:
        self._stack.push_async_callback(store.close)
        return store


def body(size_bytes: int) -> BytesBody:
    return BytesBody(pattern(size_bytes))


def pattern(size_bytes: int) -> bytes:
    return Random(size_bytes).randbytes(size_bytes)


async def read(store: BlobStore, key: str) -> bytes:
    return await read_blob(store, key, size_bytes_max=64 * MIB)


def now_s() -> float:
    return asyncio.get_running_loop().time()


_CONTENTS = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)


def list_with(change: Callable[[list[bytes]], list[bytes]], *, truncated: bool | None = None) -> Fault:
    """A list whose entries are others."""

    def rewrite(answer: Answer) -> Answer:
        contents = _CONTENTS.findall(answer.body)
        changed = change(contents)
        text = _CONTENTS.sub(b"", answer.body)
        text = text.replace(b"</ListBucketResult>", b"".join(changed) + b"</ListBucketResult>")
        text = re.sub(rb"<KeyCount>\d+</KeyCount>", b"<KeyCount>%d</KeyCount>" % len(changed), text)
        if truncated is not None:
            text = re.sub(rb"<IsTruncated>\w+<", b"<IsTruncated>%s<" % str(truncated).lower().encode(), text)
        return msgspec.structs.replace(answer, body=text)

    return Rewrite(name="list", change=rewrite)


def list_without_contents() -> Fault:
    return list_with(lambda _: [])


def created_hours_ago(hours: float) -> Fault:
    """An answer with a date of the past: to anyone who believes it, what was just put is that old."""
    date = formatdate(dt.datetime.now(dt.UTC).timestamp() - hours * 3600, usegmt=True)
    return Rewrite(name="old date", change=lambda answer: answer.with_headers(date=date))


def signed_by(credential: str) -> Predicate:
    return lambda request: credential in request.header("Authorization")


def lists_of(prefix: str, *, later: bool = False) -> Predicate:
    """Lists of a prefix: all pages, or only those after the first."""

    def match(request: Request) -> bool:
        return on("ListObjectsV2", key=f"prefix={PREFIX}{prefix}")(request) and (
            not later or "start-after=" in request.target
        )

    return match


def delete_error(name: str) -> Fault:
    """The answer to a batch of deletes, with an error for one object."""
    error = f"<Error><Key>{name}</Key><Code>InternalError</Code><Message>injected</Message></Error>"

    def rewrite(answer: Answer) -> Answer:
        head = b'<?xml version="1.0"?><DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        return msgspec.structs.replace(answer, body=head + error.encode() + b"</DeleteResult>")

    return Rewrite(name="partial delete", change=rewrite)
