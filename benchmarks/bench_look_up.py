"""One key of a large store: read in place, beside a restore of the store and RocksDB, in the same run (design 0013).

A RocksDB of about 10 GiB, of several levels, is backed up to a repository in a directory. Each request of a reader then
takes 20 ms before it begins, as to an object store. Each round, of a key that no round before it had:

- `cold`: a repository is opened, the newest commit found and pinned, and the key looked up; nothing is in memory.
- `warm`: a key near that one, in the store that is open: what leads to it is in memory.
- `elsewhere`: two more keys, each by itself, of other files.
- `restored`: the store is restored to an empty directory, opened by RocksDB, and the key read. Only in the last round.

Requests are all that the store is asked, the pin's among them, but not its release.

Run `make bench PART=look_up`, or `python -m benchmarks.bench_look_up --size-mb 1024` for a quick look.
"""

import argparse
import asyncio
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.local.store import LocalStore
from blobstore.wrappers.forwarding import ForwardingStore
from engine.repository.repository import Repository, SyncRepository
from engine.rocksdb.sst_run import SstRun
from engine.rocksdb.store import StoreReader, StoreWriter, spark_settings
from index.snapshot.model import Scope

SIZE_MB, ROUNDS = 10 * 1024, 5
VALUE_BYTES = 4096
REQUEST_S = 0.02
COLD_S, COLD_REQUESTS, WARM_REQUESTS = 0.5, 12, 2
JOB = Scope("job")
# Each how manieth key is written again, the oldest first: on a higher level each time.
AGAIN = (20, 100, 1000)


class FarStore(ForwardingStore):
    """Takes a while before each request, and counts them."""

    def __init__(self, store: BlobStore) -> None:
        super().__init__(store)
        self.requests: Counter[str] = Counter()

    @asynccontextmanager
    async def _pass(self, operation: str) -> AsyncIterator[None]:
        self.requests[operation] += 1
        await asyncio.sleep(REQUEST_S)
        yield

    @override
    def _around(self, operation: str, *keys: str) -> AbstractAsyncContextManager[None]:
        return self._pass(operation)


def key(number: int) -> bytes:
    return b"key-%012d" % number


def value(number: int) -> bytes:
    return random.Random(number).randbytes(VALUE_BYTES)


def write_store(root: Path, keys: int) -> Path:
    """Write a store of several levels; return its rocksdb_checkpoint."""
    with StoreWriter.open(root / "store", spark_settings(), compactions_wait=True) as store:
        for turn, step in enumerate((1, *AGAIN)):
            run = SstRun(root, turn, spark_settings())
            for start in range(0, keys, 10_000 * step):
                run.put([(key(n), value(n)) for n in range(start, min(keys, start + 10_000 * step), step)])
            store.ingest(run.finish())
        store.checkpoint(root / "checkpoint")
    return root / "checkpoint"


async def look_up(root: Path, numbers: Sequence[int], seconds: dict[str, list[float]]) -> None:
    """Look keys up: the first one cold. Note how long each took; show the requests."""
    store = FarStore(LocalStore(root / "repository"))
    began = time.perf_counter()
    async with await Repository.open(store) as repository:
        commit = await repository.find(JOB)
        async with repository.store_in_place(commit) as rows:
            before = 0
            for step, number in zip(("cold", "warm", "elsewhere", "elsewhere"), numbers, strict=True):
                assert await rows.get(key(number)) == value(number)
                seconds[step].append(time.perf_counter() - began)
                seconds[f"requests, {step}"].append(store.requests.total() - before)
                began, before = time.perf_counter(), store.requests.total()


async def restore(root: Path, number: int) -> None:
    async with await Repository.open(FarStore(LocalStore(root / "repository"))) as repository:
        await repository.find_and_restore(JOB, root / "restored")
    with StoreReader.open(root / "restored") as store:
        assert store.get(key(number)) == value(number)


def measure(root: Path, *, size_mb: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds, and numbers of requests, of each step by round."""
    steps = ("cold", "warm", "elsewhere")
    found: dict[str, list[float]] = {name: [] for step in steps for name in (step, f"requests, {step}")}
    keys = size_mb * 2**20 // VALUE_BYTES
    checkpoint = write_store(root, keys)
    with SyncRepository.init(f"file://{root}/repository") as repository:
        repository.commit(JOB, [repository.backup(JOB, checkpoint)])
    shutil.rmtree(checkpoint)
    shutil.rmtree(root / "store")
    rng = random.Random(1)
    for _ in range(rounds):
        first, *others = (rng.randrange(keys - 10) for _ in range(3))
        asyncio.run(look_up(root, [first, first + 10, *others], found))
    began = time.perf_counter()
    asyncio.run(restore(root, rng.randrange(keys)))
    found["restored"] = [time.perf_counter() - began]
    return found


def report(found: dict[str, list[float]], *, size_mb: int) -> None:
    print(f"a store of {size_mb} MB, {REQUEST_S * 1000:.0f} ms before each request")
    for step, values in found.items():
        print(f"{step:19} median {statistics.median(values):7.3f}, from {min(values):7.3f} to {max(values):7.3f}")
    print(f"restored / cold: {found['restored'][0] / statistics.median(found['cold']):.0f}")
    goals = (("cold", COLD_S), ("requests, cold", COLD_REQUESTS), ("requests, warm", WARM_REQUESTS))
    for step, most in goals:
        print(f"{step} at most {most} each time: {'reached' if max(found[step]) <= most else 'missed'}")


def test_a_key_is_looked_up_without_a_restore(tmp_path: Path) -> None:
    report(measure(tmp_path, size_mb=SIZE_MB, rounds=ROUNDS), size_mb=SIZE_MB)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_look_up", description=__doc__)
    parser.add_argument("--size-mb", type=int, default=SIZE_MB, help="size of the store (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch_directory:
        measured = measure(Path(scratch_directory), size_mb=options.size_mb, rounds=options.rounds)
    report(measured, size_mb=options.size_mb)
