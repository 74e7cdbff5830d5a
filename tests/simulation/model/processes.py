"""A process of one machine: a repository with a clock that is wrong and randomness of its own (design 0007, S4)."""

import asyncio
import contextvars
import fcntl
import os
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, Literal, TypeVar

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.s3.settings import S3Settings
from blobstore.wrappers.forwarding import InFlightLimit, LimitedStore
from blobstore.wrappers.retry import HedgedStore, RetryingStore, RetrySettings
from engine.repository.repository import Repository
from engine.runtime import Runtime
from engine.settings import TransferSettings
from index.snapshot.model import UniqueId, WriteId
from tests.simulation.model.direct_store import DirectStore
from tests.simulation.model.s3 import SimServer
from tests.simulation.model.s3_client import SimS3Store
from tests.simulation.model.virtual_loop import LIFELINE, BlockingHook, Lifeline, VirtualLoop

T = TypeVar("T")
Kind = Literal["s3", "parts", "direct", "stale"]

PREFIX: Final = "repository"
# Where virtual time begins: some time in 2023.
EPOCH_S: Final = 1_700_000_000.0
# As long as a client of NFS goes by what it has listed.
_LIST_AGE_S: Final = 60.0
# Small trees show packs, pieces and inline files alike.
SETTINGS: Final = TransferSettings(
    in_flight_max=4, pack_file_bytes_max=4096, pack_bytes_max=16_384, chunk_bytes=4096, blob_bytes_max=32_768
)


class KilledError(Exception):
    """The process was killed while it was at this work: nobody knows what has become of it."""


class SimRuntime(Runtime):
    """Clock and rng of a process, from a seed.

    Attributes:
        skew_s: How wrong its clock is; may be changed at any time.
    """

    def __init__(self, seed: object, skew_s: float = 0) -> None:
        self._rng = Random(f"ambient {seed}")
        self.skew_s = skew_s

    @override
    def session(self) -> str:
        return f"{self._rng.getrandbits(80):020x}"

    @override
    def unique_id(self) -> UniqueId:
        return UniqueId(str(uuid.UUID(int=self._rng.getrandbits(128), version=4)))

    @override
    def write_id(self) -> WriteId:
        return WriteId(f"{self._rng.getrandbits(128):032x}")

    @override
    def local_now_ms(self) -> int:
        return int((asyncio.get_running_loop().time() + self.skew_s) * 1000)

    @override
    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


class SimProcess:
    """A process: what it runs by `run` goes on until it is killed, and waits while it is stopped.

    Args:
        server: The bucket that it talks to.
        name: For the history; of two processes each has its own.
        seed: Of its ids and its jitter.
        skew_s: How wrong its clock is.
        kind: Its store: the real `S3Store`, also with small bodies in parts, or `DirectStore` as it is, deleting by
            itself, or with stale lists.
        retry: Of its `RetryingStore`.
        cache_dir: As of `Repository.open`.

    Attributes:
        runtime: Its clock and rng.
        lifeline: What its callbacks hang on.
        repository: Once `open` or `init` is done.
    """

    def __init__(
        self,
        server: SimServer,
        name: str,
        *,
        seed: object = 0,
        skew_s: float = 0,
        kind: Kind = "s3",
        settings: TransferSettings = SETTINGS,
        s3: S3Settings | None = None,
        retry: RetrySettings | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        self.name = name
        self.lifeline = Lifeline(name)
        self.runtime = SimRuntime(f"{seed} {name}", skew_s)
        self.repository: Repository | None = None
        self._settings = settings
        self._cache_dir = cache_dir
        self._context = contextvars.Context()
        self._context.run(LIFELINE.set, self.lifeline)
        self._waiting: set[asyncio.Future[Any]] = set()
        limit = InFlightLimit(settings.in_flight_max)
        # As `open_store` stacks them.
        bare = HedgedStore(_bare_store(server, name, kind, s3))
        rng = Random(f"jitter {seed} {name}").random
        self.store: BlobStore = LimitedStore(RetryingStore(bare, retry, limit=limit, rng=rng), limit)

    @property
    def is_alive(self) -> bool:
        """Whether it was not killed; it may be stopped."""
        return not self.lifeline.is_dead

    @property
    def on_blocking(self) -> BlockingHook | None:
        """Called before and after each call that would run in a thread; may kill the process."""
        return self.lifeline.blocking

    @on_blocking.setter
    def on_blocking(self, hook: BlockingHook | None) -> None:
        self.lifeline.blocking = hook

    async def open(self) -> Repository:
        """Open the repository."""
        opening = Repository.open(self.store, settings=self._settings, runtime=self.runtime, cache_dir=self._cache_dir)
        self.repository = await self.run(opening)
        return self.repository

    async def init(self, **times: int) -> Repository:
        """Make the bucket a repository; arguments as of `Repository.init`."""
        making = Repository.init(
            self.store, settings=self._settings, runtime=self.runtime, cache_dir=self._cache_dir, **times
        )
        self.repository = await self.run(making)
        return self.repository

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns that runs in this process.

        Raises:
            KilledError: The process is dead, or died before the result was there.
            Exception: What the coroutine raised.
        """
        if self.lifeline.is_dead:
            work.close()
            raise KilledError(self.name)
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        task = loop.create_task(work, context=self._context.copy())
        task.add_done_callback(lambda _: _pass_on(task, outcome))
        self._waiting.add(outcome)
        try:
            return await outcome
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            self._waiting.discard(outcome)

    def kill(self) -> None:
        """End it where it is: nothing of it is ever sent again, nothing cleans up, its file locks are free."""
        self.lifeline.is_dead = True
        _free_locks(self.lifeline)
        for outcome in self._waiting:
            if not outcome.done():
                outcome.set_exception(KilledError(self.name))

    def stop(self) -> None:
        """Pause it, as SIGSTOP does: what is under way at the server goes on."""
        self.lifeline.is_stopped = True

    def wake(self) -> None:
        """Let it go on; to itself no time has passed, but its clocks say so."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.wake(self.lifeline)


def plain_store(server: SimServer) -> DirectStore:
    """The repository as a judge sees it: at once, without faults, and unseen."""
    return DirectStore(server, "judge", PREFIX, is_plain=True)


def _bare_store(server: SimServer, name: str, kind: Kind, s3: S3Settings | None) -> BlobStore:
    if kind in {"s3", "parts"}:
        return SimS3Store(server, name, PREFIX, _small_parts() if kind == "parts" else s3)
    return DirectStore(server, name, PREFIX, list_age_s=_LIST_AGE_S if kind == "stale" else 0)


def _small_parts() -> S3Settings:
    """Settings with which what is larger than a record goes in parts, and most of it in several."""
    settings = S3Settings(single_put_bytes_max=1024, conditional_multipart=True)
    msgspec.structs.force_setattr(settings, "part_bytes", 1024)  # no real server would take them
    return settings


def _pass_on(task: asyncio.Task[T], outcome: asyncio.Future[T]) -> None:
    if outcome.done():
        if not task.cancelled():
            task.exception()
        return
    if task.cancelled():
        outcome.cancel()
        return
    error = task.exception()
    if error is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


# ---------------------------------------------------------------- file locks

_flock: Final = fcntl.flock
# By descriptor: who locked it, and which file it was.
_locks: dict[int, tuple[Lifeline, tuple[int, int]]] = {}


@contextmanager
def watched_locks() -> Iterator[None]:
    """Within, locks that a process holds on files end when it is killed, as they do with a real one.

    The killed process's descriptors stay open until the loop ends: they belong to this one.
    """

    def flock(descriptor: int, operation: int) -> None:
        _flock(descriptor, operation)
        lifeline = LIFELINE.get()
        if lifeline is not None and not operation & fcntl.LOCK_UN:
            status = os.fstat(descriptor)
            _locks[descriptor] = (lifeline, (status.st_dev, status.st_ino))

    fcntl.flock = flock  # type: ignore[assignment]  # the one function through which all of the engine goes
    try:
        yield
    finally:
        fcntl.flock = _flock
        _locks.clear()


def _free_locks(lifeline: Lifeline) -> None:
    for descriptor, (owner, file) in list(_locks.items()):
        if owner is not lifeline:
            continue
        del _locks[descriptor]
        try:
            status = os.fstat(descriptor)
        except OSError:
            continue
        if (status.st_dev, status.st_ino) == file:
            _flock(descriptor, fcntl.LOCK_UN)
