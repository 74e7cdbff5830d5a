"""obstore as a user would copy a tree with it: on an event loop, or from threads; nothing is hashed.

Files up to `WHOLE_BYTES` are one GET. A larger one is fetched in ranges, where the server answers those as HTTP has it
(see `servers`), else as one stream. obstore itself cuts large uploads.
"""

import asyncio
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import obstore
from obstore.store import S3Store
from typing_extensions import Buffer

from benchmarks.peers.clients.job import Job, leave, main, opened

WHOLE_BYTES = 16 * 1024 * 1024
RANGE_BYTES = 8 * 1024 * 1024
CHUNK_BYTES = 8 * 1024 * 1024


def open_store(job: Job) -> S3Store:
    """The bucket."""
    return S3Store(
        job.bucket,
        endpoint=job.endpoint_url,
        region=job.region,
        access_key_id=job.access_key,
        secret_access_key=job.secret_key,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )


class Part(NamedTuple):
    """One request: a whole object, or a range of one."""

    key: str
    file: int
    begin: int
    end: int
    is_whole: bool


def parts_of(store: S3Store, job: Job) -> list[Part]:
    """The requests for the whole tree; their files are open."""
    parts = []
    for page in obstore.list(store, job.prefix):
        for found in page:
            key, size_bytes = found["path"], found["size"]
            file = os.open(job.target(key), os.O_CREAT | os.O_WRONLY)
            if size_bytes <= WHOLE_BYTES or not job.options["ranges"]:
                parts.append(Part(key, file, 0, size_bytes, is_whole=True))
            else:
                begins = range(0, size_bytes, RANGE_BYTES)
                parts += (Part(key, file, b, min(b + RANGE_BYTES, size_bytes), is_whole=False) for b in begins)
    return parts


def copy_in_threads(job: Job, store: S3Store) -> None:
    """One blocking call per thread."""

    def fetch(part: Part) -> None:
        if not part.is_whole:
            write(part.file, obstore.get_range(store, part.key, start=part.begin, end=part.end), part.begin)
            return
        at = 0
        for data in obstore.get(store, part.key).stream(min_chunk_size=CHUNK_BYTES):
            at = write(part.file, data, at)

    with ThreadPoolExecutor(job.workers) as threads:
        if job.verb == "upload":
            list(threads.map(lambda file: obstore.put(store, file[0], file[1]), job.files()))
            return
        parts = parts_of(store, job)
        list(threads.map(fetch, parts))
    close(parts)


async def copy_in_loop(job: Job, store: S3Store) -> None:
    """One task per request, that many at once; writes go to threads."""
    limit = asyncio.Semaphore(job.workers)

    async def send(key: str, path: Path) -> None:
        async with limit:
            await obstore.put_async(store, key, path)

    async def fetch(part: Part) -> None:
        async with limit:
            if not part.is_whole:
                data = await obstore.get_range_async(store, part.key, start=part.begin, end=part.end)
                await asyncio.to_thread(write, part.file, data, part.begin)
                return
            at = 0
            async for chunk in (await obstore.get_async(store, part.key)).stream(min_chunk_size=CHUNK_BYTES):
                at = await asyncio.to_thread(write, part.file, chunk, at)

    if job.verb == "upload":
        await asyncio.gather(*(send(key, path) for key, path, _ in job.files()))
        return
    parts = parts_of(store, job)
    await asyncio.gather(*map(fetch, parts))
    close(parts)


def write(file: int, data: Buffer, at: int) -> int:
    """Into its place; where the next one goes."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written
    return at


def close(parts: Iterable[Part]) -> None:
    """Every file once."""
    for file in {part.file for part in parts}:
        os.close(file)


def copy(job: Job) -> None:
    """The step."""
    if job.verb == "start":
        return
    store = open_store(job)
    if job.verb == "open":
        list(obstore.list(store, job.prefix))
        return
    opened()
    if job.options.get("threads"):
        copy_in_threads(job, store)
    else:
        asyncio.run(copy_in_loop(job, store))
        # obstore 0.12.1 aborts one process in about ten on the interpreter's way out, when all is done.
        leave()


if __name__ == "__main__":
    main(copy)
