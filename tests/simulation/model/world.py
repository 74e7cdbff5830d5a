"""The world of one schedule: a bucket that is watched, and processes whose requests can be trapped."""

import asyncio
import contextvars
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Final, TypeVar

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore, Body, CreateOutcome, Sink, Unknown
from blobstore.errors import StoreUnavailableError
from blobstore.s3.errors import RefusedError
from blobstore.wrappers.forwarding import ForwardingStore
from index.snapshot.codec import encode_record
from index.snapshot.keys import REPOSITORY, parse_log_key
from index.snapshot.model import RepositoryRecord, Scope
from tests.simulation.checks.coverage import Coverage, Moment
from tests.simulation.checks.history import RecordHistory
from tests.simulation.checks.judge import JUDGE
from tests.simulation.faults.request_faults import Fault, Request, matching
from tests.simulation.model.pending import Pending
from tests.simulation.model.processes import PREFIX, SimProcess
from tests.simulation.model.s3 import SimObject, SimServer
from tests.simulation.scenarios.schedule import Effect, Times, Trap

T = TypeVar("T")

ROOT: Final = f"{PREFIX}/"
_FREE: Final = nullcontext()
_FAULTS: Final[dict[Effect, Fault]] = {
    "lost": Fault.LOST,
    "late": Fault.LATE,
    "refused": Fault.ERROR_500,
    "conflict": Fault.CONFLICT,
    "hang": Fault.HANG,
    "never": Fault.NEVER,
    "adrift": Fault.ADRIFT,
    "cut": Fault.CUT,
    "flip": Fault.FLIPPED,
}
# As many as a `RetryingStore` makes after the first.
_MORE_ATTEMPTS: Final = 5
# What the history says of requests of these ends.
_AS_ASKED: Final[str] = Fault.NONE.value
_LATE: Final[str] = Fault.LATE.value
_ANSWERED: Final = (_AS_ASKED, _LATE)
_FLIPPED: Final[str] = Fault.FLIPPED.value
_WHOLE: Final = frozenset({_AS_ASKED, Fault.SLOW.value})
_UNTOLD: Final = frozenset({Fault.LOST.value, Fault.LOST_500.value, Fault.HANG_DONE.value})
_MOMENTS: Final = {
    Fault.CONFLICT: Moment.CONFLICT_409,
    Fault.CUT: Moment.BODY_DAMAGED,
    Fault.FLIPPED: Moment.BODY_DAMAGED,
    Fault.ERROR_500: Moment.REFUSED,
    Fault.SLOW_DOWN: Moment.REFUSED,
    Fault.RESET: Moment.REFUSED,
    Fault.HANG: Moment.HUNG,
    Fault.HANG_DONE: Moment.HUNG,
}


class WatchedServer(SimServer):
    """Report every change to a history, and count the moments that only the server sees.

    Args:
        coverage: Where it counts them.
        whole_seconds: Objects are created at whole seconds only.
        options: As of `SimServer`.

    Attributes:
        actor: Who makes the change that is being carried out; a judge sets it to itself.
        in_flight_max: The most requests that one process has had under way.
        damaged_twice: Processes and keys whose body came damaged twice in a row: that is taken for damage.
        troubles: How many requests of each process have gone wrong.
        boundaries: How many boundaries each scope has seen.
        collections: How many of them collectors of the schedule wrote.
        writer_of: Which process has created a record, by key.
        sent: Keys of the records that a process has sent since its action began.
        met: Those of them where one of its own was there already.
        refused_full: How many objects of each process were refused because the store is full.
    """

    def __init__(self, coverage: Coverage, *, whole_seconds: bool, **options: Any) -> None:
        super().__init__(**options)
        self._created_every_ms = 1000 if whole_seconds else 1
        self.record_history = RecordHistory(self.objects, ROOT, self.now_ms)
        self.coverage = coverage
        self.actor = ""
        self.in_flight_max = 0
        self.damaged_twice: set[tuple[str, str]] = set()
        self.troubles: Counter[str] = Counter()
        self.boundaries: Counter[Scope] = Counter()
        self.collections: Counter[Scope] = Counter()
        self.writer_of: dict[str, str] = {}
        self.sent: dict[str, set[str]] = {}
        self.met: dict[str, set[str]] = {}
        self.refused_full: Counter[str] = Counter()
        # The body of which this process has just read came altered.
        self._altered: set[tuple[str, str]] = set()
        self._under_way: dict[str, int] = {}
        # Processes with a record written that have not looked since; True once a collection has changed something.
        self._unchecked: dict[str, bool] = {}

    def begin_action(self, process: str) -> None:
        """A process begins something new: what it had met before explains nothing any more."""
        self.sent[process], self.met[process] = set(), set()
        self.damaged_twice = {met for met in self.damaged_twice if met[0] != process}

    @override
    async def request(self, request: Request, carry_out: Any, *, damage: Any = None) -> Any:
        name = request.process
        if request.creates and request.key.endswith(".commit"):
            self.sent[name].add(request.key)
        self._under_way[name] = self._under_way.get(name, 0) + 1
        self.in_flight_max = max(self.in_flight_max, self._under_way[name])
        try:
            return await self._send(request, carry_out, damage)
        finally:
            self._under_way[name] -= 1

    @override
    def _carry_out(self, pending: Pending, how: str, created_ms: int) -> object:
        self._expire()
        request = pending.request
        self.actor = request.process
        try:
            answer = super()._carry_out(pending, how, created_ms)
        finally:
            self.actor = ""
        self._look(request, how, carried_out=not isinstance(answer, RefusedError))
        return answer

    @override
    def _note(self, pending: Pending, what: str) -> None:
        super()._note(pending, what)
        if not what.startswith(_ANSWERED):
            self.troubles[pending.request.process] += 1

    @override
    def list_names(self, prefix: str, start_after: str, limit: int) -> tuple[list[str], bool]:
        names, is_truncated = super().list_names(prefix, start_after, limit)
        if is_truncated and len(names) == self.page_max and self.actor not in {"", JUDGE}:
            self.coverage.met(Moment.LIST_IN_PAGES)
        return names, is_truncated

    def _look(self, request: Request, how: str, *, carried_out: bool) -> None:
        met = self.coverage.met
        if request.method.startswith("list_objects"):
            if request.key.startswith("log/") and self._unchecked.pop(request.process, False):
                met(Moment.COLLECTION_BEFORE_CHECK)
            return
        if not request.mutates:
            self._look_at_body(request, how)
            return
        is_record, is_boundary = request.key.endswith(".commit"), request.key.endswith(".boundary")
        if request.creates and is_record and carried_out:
            self._unchecked[request.process] = False
        elif request.creates and is_record:
            if self.writer_of.get(request.key) == request.process:
                self.met[request.process].add(request.key)
        elif carried_out and (is_boundary or request.method.startswith("delete")):
            for name in self._unchecked:
                self._unchecked[name] = self._unchecked[name] or name != request.process
        self._count_answer(request, how, carried_out=carried_out)

    def _count_answer(self, request: Request, how: str, *, carried_out: bool) -> None:
        met = self.coverage.met
        if how == _AS_ASKED:
            return
        if request.method == "put_object" and how == _LATE:
            met(Moment.LATE_PUT)
            met(Moment.LATE_PUT_CREATED, int(carried_out))
        if how in _UNTOLD:
            met(Moment.LOST_ANSWER_AT_COMMIT, int(request.key.endswith(".commit")))
            met(Moment.LOST_ANSWER_AT_BOUNDARY, int(request.key.endswith(".boundary")))

    def _look_at_body(self, request: Request, how: str) -> None:
        if not request.has_body:
            return
        it = request.process, request.key
        if how == _FLIPPED:
            if it in self._altered:
                self.damaged_twice.add(it)
            self._altered.add(it)
        elif how in _WHOLE:
            self._altered.discard(it)

    @override
    def put(self, name: str, stored: SimObject, *, if_absent: bool) -> None:
        # S3 reports times in whole seconds; who looks past its client, as a judge does, sees the same.
        stored.created_ms -= stored.created_ms % self._created_every_ms
        self.refused_full[self.actor] += self.is_full
        super().put(name, stored, if_absent=if_absent)
        key = name.removeprefix(ROOT)
        if key.endswith(".commit"):
            self.writer_of[key] = self.actor
        elif key.endswith(".boundary"):
            scope = parse_log_key(key).scope
            self.boundaries[scope] += 1
            self.collections[scope] += self.actor in self.record_history.collecting and self.actor != JUDGE
        self.record_history.created(self.actor, key)

    @override
    def delete(self, name: str) -> None:
        if name in self.objects:
            self.record_history.deleting(self.actor, name.removeprefix(ROOT))
        super().delete(name)

    def count_faults(self) -> None:
        """Note in the coverage what has gone wrong; once, at the end."""
        for fault, moment in _MOMENTS.items():
            self.coverage.met(moment, self.faults.counts.get(fault, 0))
        self.coverage.met(Moment.EXPIRY_BY_STORE, self.expired)


def make_repository(server: SimServer, times: Times) -> None:
    """Let an empty bucket be a repository."""
    record = RepositoryRecord(
        id="00000000-0000-4000-8000-000000000000",
        ttl_ms=times.ttl_ms,
        margin_ms=times.margin_ms,
        collection_period_ms=times.period_ms,
    )
    stored = SimObject(data=encode_record(record), created_ms=server.now_ms(), metadata={})
    server.put(f"{ROOT}{REPOSITORY}", stored, if_absent=True)


class TrappedStore(ForwardingStore):
    """The outermost wrapper of a process's store: springs the traps that are set for the process.

    Args:
        inner: The store.
        process: Whose.
        server: Gets what goes wrong below.
        act: Begins what others do just then, outside this process.
        traps: Shared with anyone who arms them: they outlive the process.
        sprung: Called for each trap that was sprung, with the key.
    """

    def __init__(
        self,
        inner: BlobStore,
        process: SimProcess,
        server: WatchedServer,
        *,
        act: Callable[[Trap], asyncio.Task[None]],
        traps: list[Trap],
        sprung: Callable[[Trap, str], None],
    ) -> None:
        super().__init__(inner)
        self._process = process
        self._server = server
        self._act = act
        self._sprung = sprung
        self._traps = traps

    def _find(self, operation: str, key: str) -> Trap | None:
        """The trap that a request springs; one that lets some pass counts them."""
        for at, trap in enumerate(self._traps):
            if trap.operation not in {"", operation} or not key.startswith(trap.prefix):
                continue
            if not key.endswith(trap.suffix):
                continue
            if trap.skip:
                self._traps[at] = msgspec.structs.replace(trap, skip=trap.skip - 1)
                return None
            del self._traps[at]
            return trap
        return None

    # Where no trap is set, which is nearly always, nothing is between.

    @override
    async def _send(self, operation: str, keys: Sequence[str], request: Callable[[], Awaitable[T]]) -> T:
        return await (super()._send(operation, keys, request) if self._traps else request())

    @override
    async def read_into(self, key: str, sink: Sink, **how: Any) -> None:
        read_into = super().read_into if self._traps else self._inner.read_into
        await read_into(key, sink, **how)

    @override
    def _around(self, operation: str, *keys: str) -> AbstractAsyncContextManager[None]:
        if operation == "now_ms":
            return _FREE
        key = keys[0] if keys else ""
        trap = self._find(operation, key)
        return _FREE if trap is None else self._trapped(trap, operation, key)

    @asynccontextmanager
    async def _trapped(self, trap: Trap, operation: str, key: str) -> AsyncIterator[None]:
        if trap.phase == "after" and trap.effect not in _FAULTS:
            yield
        await self._spring(trap, operation, key)
        if trap.phase == "before" or trap.effect in _FAULTS:
            yield

    async def _spring(self, trap: Trap, operation: str, key: str) -> None:
        self._sprung(trap, key)
        fault = _FAULTS.get(trap.effect)
        if fault is Fault.ADRIFT:
            # It lands when the schedule says; and none of the attempts after it comes through.
            for each in (fault, *[Fault.NO_CONNECTION] * _MORE_ATTEMPTS):
                self._server.faults.arm(each, matching("put_object", process=self._process.name, key=key))
        elif fault is not None:
            self._server.faults.arm(fault, matching(process=self._process.name, key=key))
        elif trap.effect == "stop":
            self._process.stop()
        elif trap.effect == "kill":
            self._process.kill()
        if trap.then:
            acting = self._act(trap)
            if trap.effect == "none":
                await asyncio.wait({acting})
        if trap.effect in {"stop", "kill"}:
            await asyncio.sleep(0)
        if trap.effect == "outage":
            self._server.troubles[self._process.name] += 1
            raise _OutageError("an outage: simulated", operation=operation, key=key)

    @override
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        try:
            return await super().put_if_absent(key, body, ttl_ms=ttl_ms)
        except _OutageError as error:
            return Unknown(reason=str(error))


class _OutageError(StoreUnavailableError):
    """No attempt at the operation was answered."""


def outside(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that belongs to no process."""
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())
