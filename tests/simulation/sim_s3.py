"""A bucket in memory with the semantics of S3, a clock of its own, and requests that go wrong (design 0007, S3).

Two kinds of client ask it: `SimS3Client` answers as the SDK does, below the real `S3Store`; `DirectStore` is a store by
itself, whose lists show TTLs. Both send their requests through `SimServer.request`, where faults are decided and the
history is written.
"""

import asyncio
import contextvars
import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from random import Random
from typing import Final, TypeVar, TypeVarTuple

import msgspec

from blobstore.errors import StoreError
from blobstore.s3_errors import CONFLICT, NOT_FOUND, PRECONDITION_FAILED, BrokenError, Refusal, RefusedError
from tests.simulation.faults import OF_BODIES, Fault, FaultPlan, Request
from tests.simulation.virtual_loop import VirtualLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Between client and server, one way; and what a slow request takes.
_WAY_S: Final = (0.001, 0.02)
_SLOW_S: Final = (0.5, 8.0)
# Silence for so long ends a request, as `S3Settings.read_timeout_s` says.
_SILENCE_S: Final = 30.0
_FOR_EVER_S: Final = float("inf")
# How many keys a page of a list has, where the seed says it: real lists have more than one page.
PAGES: Final = (1, 2, 3, 7, 1000)

# What a server says that does not carry out a request.
_REFUSALS: Final = {
    Fault.ERROR_500: (500, "InternalError"),
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.CONFLICT: (CONFLICT, "ConditionalRequestConflict"),
    Fault.CUT: (400, "IncompleteBody"),
    Fault.FLIPPED: (400, "XAmzContentSHA256Mismatch"),
}

# Of a batch that fails in part, so much does.
_FAILED: Final = 0.3

# Not carried out at first, and answered after so long, if ever.
_UNHEARD: Final = {
    Fault.HANG: _SILENCE_S,
    Fault.LATE: _SILENCE_S,
    Fault.ADRIFT: _SILENCE_S,
    Fault.NEVER: _FOR_EVER_S,
}
# Carried out, and not answered with what came of it.
_UNTOLD: Final = {Fault.HANG_DONE: _SILENCE_S, Fault.NEVER_DONE: _FOR_EVER_S}

# Is told before a request is carried out, and after: "before", "after". False before it: it never arrives.
EffectHook = Callable[[str, Request], bool]


class SimObject(msgspec.Struct):
    """An object of the bucket."""

    data: bytes
    created_ms: int
    metadata: dict[str, str]
    tag: str = ""
    # Of the kind of store that knows TTLs by itself.
    ttl_ms: int | None = None


def page_max_of(seed: object) -> int:
    """How many keys a page has in the run of a seed."""
    return Random(f"pages {seed}").choice(PAGES)


class _Pending:
    """A request on its way."""

    def __init__(
        self, request: Request, carry_out: Callable[[int], object], damage: Callable[[object, Fault], object] | None
    ) -> None:
        self.request = request
        self.carry_out = carry_out
        self.damage = damage
        self.answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()


class SimServer:
    """One bucket.

    Args:
        seed: Of delays and, without a plan, of the faults.
        clock: Seconds since the epoch; the loop's `time` where that starts with such.
        faults: What goes wrong; nothing if not given.
        dates_by_start: An object is dated by the start of its PUT (design 0003, C3).
        expiry_ms: Objects with a TTL are deleted by the server itself after so long: a lifecycle rule. With 0, when
            their own TTL is over. None: never.
        page_max: Keys in a page of a list; see `page_max_of`.

    Attributes:
        objects: By name; the prefix of a repository included.
        history: One line for each request, as the server saw it.
        effects: Requests carried out that change something.
        expired: Objects that the server itself has deleted.
        page_max: May be changed at any time.
        on_effect: See `EffectHook`; for requests that change something alone.
    """

    def __init__(
        self,
        *,
        seed: object,
        clock: Callable[[], float],
        faults: FaultPlan | None = None,
        dates_by_start: bool = False,
        expiry_ms: int | None = None,
        page_max: int = PAGES[-1],
    ) -> None:
        self._clock = clock
        self.faults = FaultPlan(seed) if faults is None else faults
        self.dates_by_start = dates_by_start
        self.expiry_ms = expiry_ms
        self.objects: dict[str, SimObject] = {}
        self.uploads: dict[str, tuple[str, int, dict[int, bytes], SimObject]] = {}
        self.history: list[str] = []
        self.effects = 0
        self.expired = 0
        self.page_max = page_max
        self.on_effect: EffectHook | None = None
        self._names: list[str] = []
        self._storing: dict[str, int] = {}
        self._expiring: list[tuple[int, str]] = []
        # Requests go on whatever becomes of the process that sent them.
        self._context = contextvars.Context()
        self._in_flight: set[_Pending] = set()
        self._adrift: list[_Pending] = []
        # Whether the batch that is carried out leaves some of its keys.
        self._is_partial = False
        self._delays = FaultPlan(f"delays {seed}")

    def now_ms(self) -> int:
        """The server's clock."""
        return int(self._clock() * 1000)

    def restore(self, objects: dict[str, SimObject]) -> None:
        """Let the bucket hold copies of these objects."""
        self.objects = {name: msgspec.structs.replace(stored) for name, stored in sorted(objects.items())}
        self._names = list(self.objects)
        self._expiring = []
        for name, stored in self.objects.items():
            self._watch_expiry(name, stored)

    # ---------------------------------------------------------------- requests

    async def request(
        self,
        request: Request,
        carry_out: Callable[[int], T],
        *,
        damage: Callable[[T, Fault], T] | None = None,
    ) -> T:
        """Send a request and wait for its answer.

        Args:
            request: What it is.
            carry_out: Does it, with the time in ms at which a new object is born; raises `RefusedError`.
            damage: What becomes of an answer with a body on its way.

        Raises:
            RefusedError: The server said no.
            BrokenError: No answer came.
        """
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop) or loop.is_ending:
            raise BrokenError("the run is over", sent=False)
        pending = _Pending(request, carry_out, damage)  # type: ignore[arg-type]  # a damage takes what its carry_out gives
        self._in_flight.add(pending)
        self._later(self._way_s(), self._arrive, pending)
        return await pending.answer  # type: ignore[return-value]  # as the line above

    def _arrive(self, pending: _Pending) -> None:
        gate = self.faults.gate(pending.request, after=False)
        if gate is None:
            self._decide(pending)
        else:
            self._note(pending, "held")
            gate.hold(lambda: self._later(0, lambda: self._decide(pending)))

    def _decide(self, pending: _Pending) -> None:
        request = pending.request
        if self.on_effect is not None and request.mutates and not self.on_effect("before", request):
            self._note(pending, "never arrives")
            return
        fault = self.faults.choose(request)
        refusal = self._refusal(fault, request)
        if refusal is not None:
            self._note(pending, str(refusal))
            self._answer(pending, refusal, self._way_s())
        elif fault is Fault.SLOW:
            self._store_slowly(pending)
        elif fault in _UNHEARD:
            self._note(pending, "hangs")
            self._answer(pending, BrokenError("silence"), _UNHEARD[fault])
            if fault is Fault.LATE:
                self._later(self.faults.late_by_s(), lambda: self._carry_out_late(pending))
            elif fault is Fault.ADRIFT:
                self._adrift.append(pending)
        else:
            self._finish(pending, fault)

    def _refusal(self, fault: Fault, request: Request) -> Exception | None:
        """What is said to a request that is not carried out; None to any other."""
        if fault is Fault.NO_CONNECTION:
            return BrokenError("no connection", sent=False)
        if fault is Fault.RESET:
            return BrokenError("reset")
        if fault in _REFUSALS and (request.mutates or fault not in OF_BODIES):
            return self.refusal(*_REFUSALS[fault])
        return None

    def land(self) -> int:
        """Carry out what is adrift: the requests as they were sent, write ids and all. Returns how many these were."""
        adrift, self._adrift = self._adrift, []
        for pending in adrift:
            self._carry_out_late(pending)
        return len(adrift)

    def _carry_out_late(self, pending: _Pending) -> None:
        self._carry_out(pending, "late", self.now_ms())

    def _store_slowly(self, pending: _Pending) -> None:
        key, began_ms = pending.request.key, self.now_ms()
        if pending.request.creates:
            self._storing[key] = self._storing.get(key, 0) + 1
        self._note(pending, "slow")

        def store() -> None:
            if pending.request.creates:
                self._storing[key] -= 1
            self._finish(pending, Fault.SLOW, began_ms if self.dates_by_start else self.now_ms())

        self._later(self._delays.between(*_SLOW_S), store)

    def _finish(self, pending: _Pending, fault: Fault, born_ms: int | None = None) -> None:
        request = pending.request
        if request.creates and fault is not Fault.SLOW and self._storing.get(request.key):
            self._note(pending, "beside another")
            self._answer(pending, self.refusal(CONFLICT, "ConditionalRequestConflict"), self._way_s())
            return
        self._is_partial = fault is Fault.PARTIAL
        answer = self._carry_out(pending, fault.value, self.now_ms() if born_ms is None else born_ms)
        self._is_partial = False
        if fault is Fault.LOST:
            answer = BrokenError("the answer was lost")
        elif fault is Fault.LOST_500 and not isinstance(answer, RefusedError):
            answer = self.refusal(500, "InternalError")
        elif fault in {Fault.CUT, Fault.FLIPPED} and pending.damage is not None and not isinstance(answer, Exception):
            answer = pending.damage(answer, fault)
        wait_s = _UNTOLD.get(fault) or self._way_s()
        if fault in _UNTOLD:
            answer = BrokenError("silence")
        gate = self.faults.gate(request, after=True)
        if gate is None:
            self._answer(pending, answer, wait_s)
        else:
            gate.hold(lambda: self._answer(pending, answer, wait_s))

    def _carry_out(self, pending: _Pending, how: str, born_ms: int) -> object:
        self._expire()
        request = pending.request
        answer: object
        try:
            answer = pending.carry_out(born_ms)
        except RefusedError as error:
            answer = error
            self._note(pending, f"{how} {error.refusal.status}")
        except StoreError as error:
            answer = error
            self._note(pending, f"{how} {type(error).__name__}")
        else:
            self._note(pending, how)
        if request.mutates:
            self.effects += not isinstance(answer, Exception)
            if self.on_effect is not None:
                self.on_effect("after", request)
        return answer

    def _answer(self, pending: _Pending, answer: object, wait_s: float) -> None:
        if wait_s != _FOR_EVER_S:
            self._later(wait_s, self._tell, pending, answer)

    def _tell(self, pending: _Pending, answer: object) -> None:
        self._in_flight.discard(pending)
        if pending.answer.done():
            return
        if isinstance(answer, Exception):
            pending.answer.set_exception(answer)
        else:
            pending.answer.set_result(answer)

    def _later(self, wait_s: float, do: Callable[[*Ts], None], *args: *Ts) -> None:
        asyncio.get_running_loop().call_later(wait_s, do, *args, context=self._context)

    def _way_s(self) -> float:
        return self._delays.between(*_WAY_S)

    def _note(self, pending: _Pending, what: str) -> None:
        request = pending.request
        self.history.append(f"{int(self._clock() * 1000)} {request.process} {request.method} {request.key} {what}")

    def refusal(self, status: int, code: str) -> RefusedError:
        """A refusal with the server's time."""
        return RefusedError(Refusal(status=status, code=code, date_ms=self.now_ms() // 1000 * 1000))

    # ---------------------------------------------------------------- what the bucket does

    def put(self, name: str, stored: SimObject, *, if_absent: bool) -> None:
        """Store an object.

        Raises:
            RefusedError: 412, it is there.
        """
        if name not in self.objects:
            insort(self._names, name)
        elif if_absent:
            raise self.refusal(PRECONDITION_FAILED, "PreconditionFailed")
        self.objects[name] = stored
        self._watch_expiry(name, stored)

    def find(self, name: str) -> SimObject:
        """An object.

        Raises:
            RefusedError: 404.
        """
        stored = self.objects.get(name)
        if stored is None:
            raise self.refusal(NOT_FOUND, "NoSuchKey")
        return stored

    def list_names(self, prefix: str, start_after: str, limit: int) -> tuple[list[str], bool]:
        """A page of the names below a prefix, and whether there are more."""
        first = max(bisect_left(self._names, prefix), bisect_right(self._names, start_after))
        page = [name for name in self._names[first : first + limit + 1] if name.startswith(prefix)]
        return page[:limit], len(page) > limit

    def delete(self, name: str) -> None:
        """Delete an object if it is there."""
        if self.objects.pop(name, None) is not None:
            del self._names[bisect_left(self._names, name)]

    def delete_batch(self, names: Sequence[str]) -> list[str]:
        """Delete objects; those of which it fails, by chance at least one where the request goes wrong so."""
        failed: list[str] = []
        if self._is_partial and names:
            chosen = int(self.faults.between(0, len(names)))
            failed = [name for at, name in enumerate(names) if at == chosen or self.faults.between(0, 1) < _FAILED]
        for name in names:
            if name not in failed:
                self.delete(name)
        return failed

    def keep(self, name: str) -> None:
        """Remove the TTL of an object.

        Raises:
            RefusedError: 404.
        """
        stored = self.find(name)
        stored.tag, stored.ttl_ms = "kept", None

    def damaged(self, data: bytes, fault: Fault) -> tuple[bytes, bool]:
        """What comes of a body on its way, and whether its end does."""
        if not data:
            return data, True
        at = int(self.faults.between(0, len(data)))
        if fault is Fault.CUT:
            return data[:at], False
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(self.faults.between(0, 8))
        return bytes(flipped), True

    def _watch_expiry(self, name: str, stored: SimObject) -> None:
        if self.expiry_ms is None or stored.tag != "expiring":
            return
        after_ms = self.expiry_ms or stored.ttl_ms or 0
        heapq.heappush(self._expiring, (stored.created_ms + after_ms, name))

    def _expire(self) -> None:
        now_ms = self.now_ms()
        while self._expiring and self._expiring[0][0] <= now_ms:
            _, name = heapq.heappop(self._expiring)
            stored = self.objects.get(name)
            if stored is not None and stored.tag == "expiring":
                self.delete(name)
                self.expired += 1
                self.history.append(f"{now_ms} server expires {name}")
