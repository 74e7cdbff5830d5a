"""tidemark as a job uses it: one process that backs a directory up and commits, or restores it."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from typing_extensions import override

from benchmarks.peers.clients.job import Job, main, opened
from blobstore.base import Body, BytesBody, Capabilities, Created, CreateOutcome, Lost
from blobstore.opening import StoreSettings, open_s3, open_store
from blobstore.s3.settings import PROFILE_KEY, S3Settings, StoreProfile, encode_profile
from blobstore.wrappers.forwarding import ForwardingStore, Meter
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from index.snapshot.model import Scope

SCOPE: Final = Scope("bench")


def store_settings(job: Job) -> StoreSettings:
    """Where the server is; all else as everybody has it, but for `--set s3.NAME=VALUE`."""
    more = {name.removeprefix("s3."): value for name, value in job.options.items() if name.startswith("s3.")}
    return StoreSettings(s3=msgspec.convert({"endpoint_url": job.endpoint_url, "path_style": True} | more, S3Settings))


def transfer_settings(job: Job) -> TransferSettings:
    """As everybody has them, but for `--set NAME=VALUE`."""
    return transfer_settings_of(job.options)


def transfer_settings_of(options: Mapping[str, Any]) -> TransferSettings:
    """The same, of the options alone."""
    known = {name: value for name, value in options.items() if name in TransferSettings.__struct_fields__}
    return msgspec.convert(known, TransferSettings)


def url_of(job: Job) -> str:
    """Of the repository."""
    return f"s3://{job.bucket}/{job.prefix}"


async def open_repository(job: Job, *, cache_dir: Path | None = None, meter: Meter | None = None) -> Repository:
    """The repository, as any caller opens it."""
    store = open_store(url_of(job), store_settings(job), meter=meter)
    if not job.options.get("safe"):
        store = _KeepsWithoutTags(store)
    return await Repository.open(store, settings=transfer_settings(job), cache_dir=cache_dir)


class _KeepsWithoutTags(ForwardingStore):
    """Says that TTLs can be removed where there are no tags: the store asks a HEAD for each (see `servers`)."""

    @property
    @override
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self._inner.capabilities, removes_ttl=True)


class _RefusesASecond(ForwardingStore):
    """Says `Lost` to a create of what it has created itself; see `servers` for why, and how little depends on it."""

    created: bool = False

    @override
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        if self.created:
            return Lost()
        outcome = await super().put_if_absent(key, body, ttl_ms=ttl_ms)
        self.created = isinstance(outcome, Created)
        return outcome


async def init(job: Job) -> None:
    """Make the repository; on a server that is not safe, under a profile that denies tags (see `servers`)."""
    store = open_store(url_of(job), store_settings(job))
    if not job.options.get("safe"):
        bare = open_s3(url_of(job), store_settings(job), bound_by_profile=False)
        profile = StoreProfile(
            atomic_create=True,
            consistent_lists=True,
            tags=False,
            conditional_multipart=False,
            probed_at_ms=0,
            tidemark="benchmarks.peers",
        )
        await bare.put(PROFILE_KEY, BytesBody(encode_profile(profile)))
        await bare.close()
        store = _RefusesASecond(store)
    await (await Repository.init(store)).close()


async def copy(job: Job) -> None:
    """The step."""
    if job.verb == "start":
        return
    if job.verb == "init":
        await init(job)
        return
    async with await open_repository(job) as repository:
        opened()
        if job.verb == "upload":
            result = await repository.backup(SCOPE, Path(job.directory))
            await repository.commit(SCOPE, [result])
        elif job.verb == "restore":
            await repository.find_and_restore(SCOPE, Path(job.directory))


if __name__ == "__main__":
    main(lambda job: asyncio.run(copy(job)))
