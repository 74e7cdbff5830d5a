"""Which requests go wrong, and how: at random from a seed, as armed one-shots, or held at a gate (design 0007, S3)."""

import asyncio
import enum
from collections.abc import Callable, Mapping
from random import Random
from typing import Final

import msgspec


class Fault(enum.Enum):
    """What becomes of a request."""

    NONE = "none"
    # Carried out, and nobody learns of it: the connection breaks, or a 500 comes.
    LOST = "lost"
    LOST_500 = "lost 500"
    # Not carried out.
    ERROR_500 = "500"
    SLOW_DOWN = "503"
    RESET = "reset"
    NO_CONNECTION = "no connection"
    # Silence, which the client's connection ends after a while. Carried out, or not.
    HANG = "hang"
    HANG_DONE = "hang, done"
    # No answer for ever, on a connection that seems to live: only who asks can give it up.
    NEVER = "never"
    NEVER_DONE = "never, done"
    # Given up by its client, and carried out much later; or when `SimServer.land` is called.
    LATE = "late"
    ADRIFT = "adrift"
    # The first of many in a row of which none is carried out: more than anybody tries.
    BURST = "burst"
    # A batch delete that leaves some of its keys, and says which.
    PARTIAL = "partial"
    # Takes some seconds.
    SLOW = "slow"
    # A create beside another one under way, or taken for one.
    CONFLICT = "409"
    # Of a body, on its way to the server or from it.
    CUT = "cut"
    FLIPPED = "flipped"


_OF_MUTATIONS: Final = frozenset(
    {Fault.LATE, Fault.ADRIFT, Fault.LOST, Fault.LOST_500, Fault.HANG_DONE, Fault.NEVER_DONE}
)
# What a burst consists of.
_OF_BURSTS: Final = (Fault.ERROR_500, Fault.SLOW_DOWN, Fault.RESET, Fault.NO_CONNECTION)
OF_BODIES: Final = frozenset({Fault.CUT, Fault.FLIPPED})


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the server is about to get it."""

    process: str
    # As the SDK calls it: put_object, list_objects_v2, ...
    method: str
    # Without the prefix of the repository; several of a batch with blanks between.
    key: str
    mutates: bool
    # A create-if-absent.
    creates: bool = False
    has_body: bool = False


Match = Callable[[Request], bool]


def matching(method: str = "", key: str = "", process: str = "") -> Match:
    """Requests whose method, key and process hold these texts."""

    def match(request: Request) -> bool:
        return method in request.method and key in request.key and process in request.process

    return match


class Gate:
    """Holds one request that matches, before or after it is carried out, until it is opened.

    Attributes:
        reached: Set when the request has come.
    """

    def __init__(self, match: Match, *, after: bool) -> None:
        self.match = match
        self.after = after
        self.reached = asyncio.Event()
        self._go_on: Callable[[], None] | None = None
        self._is_open = False

    def hold(self, go_on: Callable[[], None]) -> None:
        """The request has come; `go_on` lets it pass."""
        if self._is_open:
            go_on()
        else:
            self._go_on = go_on
        self.reached.set()

    def open(self) -> None:
        """Let the request pass, now or when it comes."""
        self._is_open = True
        if self._go_on is not None:
            go_on, self._go_on = self._go_on, None
            go_on()


class FaultPlan:
    """Decides on each request.

    Args:
        seed: Of the rng.
        rates: How probable each fault is; what is not named does not happen at random.
        kept: Requests that random faults leave alone.

    Attributes:
        rates: May be changed at any time.
        late_s: The shortest and the longest time by which a late request is late.
        burst: The fewest and the most requests of a burst.
        counts: How often each fault has happened.
    """

    def __init__(
        self, seed: object, rates: Mapping[Fault, float] | None = None, *, exempt: Match | None = None
    ) -> None:
        self._rng = Random(f"faults {seed}")
        self.rates = dict(rates or {})
        self.late_s = (1.0, 3 * 86_400.0)
        self.burst = (4, 40)
        self.counts: dict[Fault, int] = {}
        self._exempt = exempt
        self._armed: list[tuple[Fault, Match]] = []
        # How many are left of each, and which these are.
        self._bursts: list[tuple[int, Match]] = []
        self._gates: list[Gate] = []

    def arm(self, fault: Fault, match: Match) -> None:
        """Let the next request that matches end so; of a burst, all of its requests match."""
        self._armed.append((fault, match))

    def hold(self, match: Match, *, after: bool = False) -> Gate:
        """Hold the next request that matches, before it is carried out or after."""
        gate = Gate(match, after=after)
        self._gates.append(gate)
        return gate

    def gate(self, request: Request, *, after: bool) -> Gate | None:
        """The gate at which a request stops; each holds one."""
        if not self._gates:
            return None
        for gate in self._gates:
            if gate.after == after and gate.match(request):
                self._gates.remove(gate)
                return gate
        return None

    def choose(self, request: Request) -> Fault:
        """What becomes of a request."""
        if not self._armed and not self._bursts and not self.rates:
            return Fault.NONE
        fault, match = self._choose(request)
        if fault is Fault.BURST:
            self._count(fault)
            self._bursts.append((self._rng.randint(*self.burst), match))
        for at, (left, its) in enumerate(self._bursts):
            if its(request):
                self._bursts[at : at + 1] = [(left - 1, its)] if left > 1 else []
                return self._count(self._rng.choice(_OF_BURSTS))
        return fault

    def end_bursts(self) -> None:
        """Whatever did not come through does so from now on."""
        self._bursts.clear()

    def _choose(self, request: Request) -> tuple[Fault, Match]:
        """What becomes of a request by itself, and to which others the same happens."""
        for item in self._armed:
            if item[1](request):
                self._armed.remove(item)
                if item[0] is not Fault.BURST:
                    self._count(item[0])
                return item
        if not self.rates or (self._exempt is not None and self._exempt(request)):
            return Fault.NONE, request.__eq__
        dice = self._rng.random()
        if dice >= sum(self.rates.values()):
            return Fault.NONE, request.__eq__
        own = matching(process=request.process)
        for fault, rate in self.rates.items():
            dice -= rate
            if dice < 0 and _fits(fault, request):
                return fault if fault is Fault.BURST else self._count(fault), own
            if dice < 0:
                break
        return Fault.NONE, own

    def late_by_s(self) -> float:
        """How late a request is: as often seconds as hours or days."""
        shortest_s, longest_s = self.late_s
        return float(shortest_s * (longest_s / shortest_s) ** self._rng.random())

    def between(self, low: float, high: float) -> float:
        """A number at random."""
        return self._rng.uniform(low, high)

    def _count(self, fault: Fault) -> Fault:
        self.counts[fault] = self.counts.get(fault, 0) + 1
        return fault


def _fits(fault: Fault, request: Request) -> bool:
    if fault is Fault.CONFLICT:
        return request.creates
    if fault is Fault.PARTIAL:
        return request.method == "delete_objects"
    if fault in _OF_MUTATIONS:
        return request.mutates
    return request.has_body if fault in OF_BODIES else True
