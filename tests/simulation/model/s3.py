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
from http import HTTPStatus
from random import Random
from typing import Final, TypeVar, TypeVarTuple

import msgspec

from blobstore.errors import StoreError
from blobstore.s3.errors import BrokenError, Refusal, RefusedError
from tests.simulation.faults.request_faults import OF_BODIES, Fault, FaultPlan, Request
from tests.simulation.model.pending import FOR_EVER_S, REFUSALS, UNHEARD, UNTOLD, Pending
from tests.simulation.model.virtual_loop import VirtualLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Between client and server; and what a slow request takes.
_WAY_S: Final = (0.001, 0.02)
# This many requests take time to arrive, and can be overtaken; others are carried out as they are sent, and take time
# to be answered alone. One wait between any two requests of a task lets everybody else come in between.
_ON_THEIR_WAY: Final = 1 / 4
_SLOW_S: Final = (0.5, 8.0)
# How many keys a page of a list has, where the seed says it: real lists have more than one page.
PAGES: Final = (1, 2, 3, 7, 1000)

# Of a batch that fails in part, so much does.
_FAILED: Final = 0.3

# Called before a request is carried out, and after: "before", "after". False before it: it never arrives.
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


class SimServer:
    """One bucket.

    Args:
        seed: Of delays and, without a plan, of the faults.
        clock: Seconds since the epoch; the loop's `time` where that starts with such.
        faults: What goes wrong; nothing if not given.
        dates_by_start: An object is dated by the start of its PUT (design 0003, C3).
        expiry_ms: Objects with a TTL are deleted by the server itself after so long: a lifecycle rule. None: never.
        page_max: Keys in a page of a list; see `page_max_of`.

    Attributes:
        objects: By name; the prefix of a repository included.
        requests: How many requests it has seen, each as often as it was heard of.
        effects: Requests carried out that change something.
        expired: Objects that the server itself has deleted.
        page_max: May be changed at any time.
        is_full: No object is stored any more; those that are there can be read and deleted.
        ahead_ms: How far its clock is ahead of everybody's.
        ahead_ms_max: How far it ever was.
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
        # When, who, what, of which object, and what came of it: made a line of when somebody asks.
        self._noted: list[tuple[int, str, str, str, str]] = []
        self.effects = 0
        self.expired = 0
        self.page_max = page_max
        self.is_full = False
        self.ahead_ms = 0
        self.ahead_ms_max = 0
        self.on_effect: EffectHook | None = None
        self._names: list[str] = []
        self._storing: dict[str, int] = {}
        self._expiring: list[tuple[int, str]] = []
        # Requests go on whatever becomes of the process that sent them.
        self._context = contextvars.Context()
        self._adrift: list[Pending] = []
        # Whether the batch that is carried out leaves some of its keys.
        self._is_partial = False
        self._delay = Random(f"delays {seed}").random

    @property
    def history(self) -> list[str]:
        """One line for each request, as the server saw it."""
        return [f"{now_ms} {who} {what} {key} {end}".rstrip() for now_ms, who, what, key, end in self._noted]

    @property
    def requests(self) -> int:
        """How many lines the history has."""
        return len(self._noted)

    def now_ms(self) -> int:
        """The server's clock."""
        return int(self._clock() * 1000) + self.ahead_ms

    def restore(self, objects: dict[str, SimObject]) -> None:
        """Let the bucket hold copies of these objects."""
        self.objects = {name: msgspec.structs.replace(stored) for name, stored in sorted(objects.items())}
        self._names = list(self.objects)
        self._expiring = []
        for name, stored in self.objects.items():
            self._watch_expiry(name, stored)

    # ---------------------------------------------------------------- requests

    async def request(
        self, request: Request, carry_out: Callable[[int], T], *, damage: Callable[[T, Fault], T] | None = None
    ) -> T:
        """Send a request and wait for its answer.

        Args:
            request: What it is.
            carry_out: Does it, with the time in ms at which a new object is created; raises `RefusedError`.
            damage: What becomes of an answer with a body on its way.

        Raises:
            RefusedError: The server said no.
            BrokenError: No answer came.
        """
        return await self._send(request, carry_out, damage)

    def _send(
        self, request: Request, carry_out: Callable[[int], T], damage: Callable[[T, Fault], T] | None
    ) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop) or loop.is_ending:
            raise BrokenError("the run is over", sent=False)
        answer: asyncio.Future[T] = asyncio.Future(loop=loop)
        pending = Pending(request, carry_out, damage, answer, loop)  # type: ignore[arg-type]  # what its carry_out gives
        if self._delay() < _ON_THEIR_WAY:
            loop.call_later(self._way_s(), self._arrive, pending, context=self._context)
        else:
            self._arrive(pending)
        return answer

    def _arrive(self, pending: Pending) -> None:
        gate = self.faults.gate(pending.request, after=False)
        if gate is None:
            self._decide(pending)
        else:
            self._note(pending, "held")
            gate.hold(lambda: self._later(0, self._decide, pending))

    def _decide(self, pending: Pending) -> None:
        request = pending.request
        if self.on_effect is not None and request.mutates and not self.on_effect("before", request):
            self._note(pending, "never arrives")
            return
        fault = self.faults.choose(request)
        if fault is Fault.NONE:
            self._finish(pending, fault)
            return
        refusal = self._refusal(fault, request)
        if refusal is not None:
            self._note(pending, str(refusal))
            self._answer(pending, refusal, self._way_s())
        elif fault is Fault.SLOW:
            self._store_slowly(pending)
        elif fault in UNHEARD:
            self._note(pending, "hangs")
            self._answer(pending, BrokenError("silence"), UNHEARD[fault])
            if fault is Fault.LATE:
                self._later(self.faults.late_by_s(), self._carry_out_late, pending)
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
        if fault in REFUSALS and (request.mutates or fault not in OF_BODIES):
            return self.refusal(*REFUSALS[fault])
        return None

    def copy(self) -> None:
        """Move everything to another place: its objects are all as young as the copy, and no late request comes."""
        self._adrift.clear()
        for stored in self.objects.values():
            stored.created_ms = self.now_ms()

    def rot(self, name: str, choice: int = 0) -> bytes:
        """Flip one bit of an object; returns what it held."""
        stored = self.objects[name]
        data, at = stored.data, choice % len(stored.data)
        stored.data = data[:at] + bytes([data[at] ^ 1 << choice % 8]) + data[at + 1 :]
        return data

    def land(self) -> int:
        """Carry out what is adrift: the requests as they were sent, write ids and all. Returns how many these were."""
        adrift, self._adrift = self._adrift, []
        for pending in adrift:
            self._carry_out_late(pending)
        return len(adrift)

    def _carry_out_late(self, pending: Pending) -> None:
        self._carry_out(pending, "late", self.now_ms())

    def _store_slowly(self, pending: Pending) -> None:
        key, began_ms = pending.request.key, self.now_ms()
        if pending.request.creates:
            self._storing[key] = self._storing.get(key, 0) + 1
        self._note(pending, "slow")

        def store() -> None:
            if pending.request.creates:
                self._storing[key] -= 1
            self._finish(pending, Fault.SLOW, began_ms if self.dates_by_start else self.now_ms())

        self._later(_SLOW_S[0] + (_SLOW_S[1] - _SLOW_S[0]) * self._delay(), store)

    def _finish(self, pending: Pending, fault: Fault, created_ms: int | None = None) -> None:
        request = pending.request
        if self._storing and request.creates and fault is not Fault.SLOW and self._storing.get(request.key):
            self._note(pending, "beside another")
            self._answer(pending, self.refusal(HTTPStatus.CONFLICT, "ConditionalRequestConflict"), self._way_s())
            return
        self._is_partial = fault is Fault.PARTIAL
        answer = self._carry_out(pending, fault._value_, self.now_ms() if created_ms is None else created_ms)
        self._is_partial = False
        wait_s = self._way_s()
        if fault is not Fault.NONE:
            answer, wait_s = self._spoilt(pending, answer, fault), UNTOLD.get(fault, wait_s)
        gate = self.faults.gate(request, after=True)
        if gate is None:
            self._answer(pending, answer, wait_s)
        else:
            gate.hold(lambda: self._answer(pending, answer, wait_s))

    def _spoilt(self, pending: Pending, answer: object, fault: Fault) -> object:
        """What is answered where something goes wrong after a request was carried out."""
        if fault is Fault.LOST:
            return BrokenError("the answer was lost")
        if fault in UNTOLD:
            return BrokenError("silence")
        if fault is Fault.LOST_500 and not isinstance(answer, RefusedError):
            return self.refusal(500, "InternalError")
        if fault in OF_BODIES and pending.damage is not None and not isinstance(answer, Exception):
            return pending.damage(answer, fault)
        return answer

    def _carry_out(self, pending: Pending, how: str, created_ms: int) -> object:
        self._expire()
        request = pending.request
        answer: object
        try:
            answer = pending.carry_out(created_ms)
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

    def _answer(self, pending: Pending, answer: object, wait_s: float) -> None:
        if wait_s != FOR_EVER_S:
            pending.loop.call_later(wait_s, self._deliver, pending, answer, context=self._context)

    def _deliver(self, pending: Pending, answer: object) -> None:
        if pending.answer.done():
            return
        if isinstance(answer, Exception):
            pending.answer.set_exception(answer)
        else:
            pending.answer.set_result(answer)

    def _later(self, wait_s: float, do: Callable[[*Ts], None], *args: *Ts) -> None:
        asyncio.get_running_loop().call_later(wait_s, do, *args, context=self._context)

    def _way_s(self) -> float:
        return _WAY_S[0] + (_WAY_S[1] - _WAY_S[0]) * self._delay()

    def _note(self, pending: Pending, what: str) -> None:
        request = pending.request
        self._noted.append((int(self._clock() * 1000), request.process, request.method, request.key, what))

    def refusal(self, status: int, code: str) -> RefusedError:
        """A refusal with the server's time."""
        return RefusedError(Refusal(status=status, code=code, date_ms=self.now_ms() // 1000 * 1000))

    # ---------------------------------------------------------------- what the bucket does

    def put(self, name: str, stored: SimObject, *, if_absent: bool) -> None:
        """Store an object.

        Raises:
            RefusedError: 412, it is there; 507, the store is full.
        """
        if self.is_full:
            raise self.refusal(507, "InsufficientCapacity")
        if name not in self.objects:
            insort(self._names, name)
        elif if_absent:
            raise self.refusal(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
        self.objects[name] = stored
        self._watch_expiry(name, stored)

    def find(self, name: str) -> SimObject:
        """An object.

        Raises:
            RefusedError: 404.
        """
        stored = self.objects.get(name)
        if stored is None:
            raise self.refusal(HTTPStatus.NOT_FOUND, "NoSuchKey")
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
        """Delete objects; those of which it fails, at random at least one where the request goes wrong so."""
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
        heapq.heappush(self._expiring, (stored.created_ms + self.expiry_ms, name))

    def _expire(self) -> None:
        if not self._expiring:
            return
        now_ms = self.now_ms()
        while self._expiring and self._expiring[0][0] <= now_ms:
            _, name = heapq.heappop(self._expiring)
            stored = self.objects.get(name)
            if stored is not None and stored.tag == "expiring":
                self.delete(name)
                self.expired += 1
                self._noted.append((now_ms, "server", "expires", name, ""))
