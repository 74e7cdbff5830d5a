"""Carries out the steps of one schedule in a world of its own, and has a judge look at it."""

import asyncio
import contextlib
import hashlib
from pathlib import Path
from typing import Final

import msgspec

from blobstore.base import BlobStore, BytesBody, Created
from blobstore.errors import StoreError
from engine.errors import EngineError
from engine.repository import Repository
from engine.transfer_settings import TransferSettings
from index.codec import encode_record
from index.keys import REPOSITORY
from index.model import RepositoryRecord
from index.retention import Retention
from tests.simulation.actors import Actions, Actor, Member
from tests.simulation.chronicle import Chronicle
from tests.simulation.coverage import Coverage, Moment
from tests.simulation.direct_store import DirectStore
from tests.simulation.faults import Fault, FaultPlan
from tests.simulation.judge import JUDGE, REST_S, Judge, Ledger
from tests.simulation.plot import DAY_MS, ENFORCED_TTL_MS, MARGIN_MS, TTL_MS
from tests.simulation.processes import PREFIX, KilledError, Kind, plain_store
from tests.simulation.schedule import Advance, Control, Do, Land, Schedule, Settle, Step, StoreKind, Trap
from tests.simulation.sim_s3 import SimObject
from tests.simulation.sim_s3_client import SimS3Store
from tests.simulation.sim_world import ROOT, TrappedStore, WatchedServer, outside
from tests.simulation.themes import PROCESSES_IN_USE
from tests.simulation.virtual_loop import VirtualLoop

SETTINGS: Final = TransferSettings(
    in_flight_max=4,
    chunk_bytes=4096,
    blob_bytes_max=4096,
    pack_bytes_max=2048,
    pack_file_bytes_max=512,
    inline_file_bytes_max=64,
    inline_bytes_max=512,
    range_bytes=8192,
    memory_bytes_max=32_768,
)
_KINDS: Final[dict[StoreKind, Kind]] = {"s3": "s3", "memory": "direct", "expiring": "enforcing", "stale": "stale"}
# No action takes longer, whatever goes wrong: six attempts at each of a few dozen requests, a minute each.
ACTION_S_MAX: Final = 4 * 3600.0
# Once in a collection period.
HOUSEKEEPING_S: Final = DAY_MS / 1000
QUIET_DAYS_MAX: Final = 1
EVERYTHING: Final = 1_000_000
_CHANCE_FAULTS: Final = tuple(fault for fault in Fault if fault is not Fault.NONE)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a schedule."""

    violations: tuple[str, ...]
    # Requests that changed something.
    effects: int
    # Calls that would have run in a thread: work on files.
    file_effects: int
    requests: int
    # Of every request as the server saw it, in order.
    digest: str
    history: tuple[str, ...] = ()


class Beginning(msgspec.Struct, frozen=True):
    """A repository as a schedule finds it: what stands there, and what is known of it."""

    objects: dict[str, SimObject]
    chronicle: Chronicle
    ledger: Ledger


class World:
    """One run of one schedule.

    Args:
        schedule: What happens.
        directory: For files; of this run alone.
        coverage: Where moments are counted.
        beginning: What is there at first; an empty repository if not given.

    Attributes:
        server: The bucket, once the world has begun.
        ledger: What callers asked for and were told.
        members: The processes.
    """

    def __init__(
        self, schedule: Schedule, directory: Path, coverage: Coverage, *, beginning: Beginning | None = None
    ) -> None:
        self._schedule = schedule
        self._beginning = beginning
        self._directory = directory
        self._coverage = coverage
        self.ledger = Ledger()
        self.members = [Member(number, directory) for number in range(PROCESSES_IN_USE)]
        self._adrift: list[tuple[str, str, bytes, int | None]] = []
        self._acting: list[asyncio.Task[None]] = []
        self._quiet_days = 0
        self._effects_seen = 0

    async def live(self, *, keep_history: bool = False) -> Outcome:
        """From the first step to the verdict."""
        self.begin()
        await self.run(self._schedule.steps)
        return await self.finish(keep_history=keep_history)

    def begin(self) -> None:
        """Make the bucket, with the repository in it."""
        schedule = self._schedule
        loop = asyncio.get_running_loop()
        self.server = WatchedServer(
            self._coverage,
            whole_seconds=schedule.store == "s3",
            seed=schedule.seed,
            clock=loop.time,
            faults=FaultPlan(schedule.seed),
            dates_by_start=schedule.seed % 3 == 0,
            expiry_ms=0 if schedule.store == "expiring" else None,
        )
        if self._beginning is None:
            self._make_repository()
        else:
            self._begin_with(self._beginning)
        share = schedule.faults_per_mille / 1000 / len(_CHANCE_FAULTS)
        self.server.faults.rates = dict.fromkeys(_CHANCE_FAULTS, share) if share else {}
        self._actions = Actions(self.server, self.ledger, self._coverage, stale=schedule.store == "stale")
        self._actions.join(self.members)

    def judge(self) -> Judge:
        """Who judges this world; nothing is judged yet."""
        return Judge(self.server, self.server.chronicle, self.ledger, self._directory)

    async def finish(self, *, keep_history: bool = False) -> Outcome:
        """Let everything come to rest, and have it judged."""
        server = self.server
        await self._come_to_rest()
        judge = self.judge()
        effects, requests = server.effects, len(server.history)
        server.faults.rates = {}
        if server.in_flight_max > SETTINGS.in_flight_max:
            judge.violations.append(f"8: {server.in_flight_max} requests at once")
        judge.check_now()
        if not judge.violations and self._schedule.is_judged:
            await self._advance(REST_S)
            server._expire()
            server.actor = JUDGE
            await judge.check_at_rest()
            judge.violations += server.chronicle.violations
        self._count()
        history = tuple(server.history)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return Outcome(
            violations=tuple(judge.violations),
            effects=effects,
            file_effects=loop.blocking_calls,
            requests=requests,
            digest=hashlib.sha256("\n".join(history).encode()).hexdigest(),
            history=history if keep_history else (),
        )

    async def build(self) -> Beginning:
        """Carry out the steps, and stop there: a repository for others to begin with."""
        await self.live()
        return Beginning(self.server.objects, self.server.chronicle, self.ledger)

    def _begin_with(self, beginning: Beginning) -> None:
        self.server.restore(beginning.objects)
        self.server.chronicle = beginning.chronicle.copy(self.server.objects)
        self.ledger = beginning.ledger.copy()

    # ------------------------------------------------------------------ steps

    async def run(self, steps: tuple[Step, ...]) -> None:
        """Carry out steps, one after the other."""
        for step in steps:
            match step:
                case Do():
                    await self._do(step)
                case Trap():
                    self.members[step.process].traps.append(step)
                case Control():
                    self._control(step)
                case Advance(ms=ms):
                    await self._advance(ms / 1000)
                case Land():
                    await self._land()
                case Settle():
                    await self._settle()

    async def _advance(self, seconds: float) -> None:
        """Time passes; where the store deletes by itself, a collector that keeps everything runs as T3 demands."""
        if self._schedule.store == "expiring":
            while seconds > HOUSEKEEPING_S:
                await self._keep_house()
                await asyncio.sleep(HOUSEKEEPING_S)
                seconds -= HOUSEKEEPING_S
        await asyncio.sleep(seconds)

    async def _keep_house(self) -> None:
        # Once nobody has done anything since two of them, a further one would find what they left.
        self._quiet_days = self._quiet_days + 1 if self.server.effects == self._effects_seen else 0
        self._effects_seen = self.server.effects
        if self._quiet_days > QUIET_DAYS_MAX:
            return
        self.server.actor = JUDGE
        repository = await Repository.open(plain_store(self.server))
        await repository.collect(Retention(keep_last=EVERYTHING), delete_share_max=1)
        self.server.actor = ""

    async def _do(self, step: Do) -> None:
        member = self.members[step.process]
        await self._until_idle(member)
        if member.is_busy or member.stopped_at_s is not None:
            return  # it stands still
        member.was_held = False
        member.verb = step.verb
        member.halted.clear()
        member.work = outside(self._perform(member, step))
        if step.wait:
            await self._until_idle(member)

    async def _perform(self, member: Member, step: Do) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            process = await self._alive(member)
            assert process.repository is not None
            await process.run(self._actions.perform(member, process.repository, step))
        except (KilledError, StoreError, EngineError):
            return  # it is dead, or its repository could not be opened
        except Exception as error:  # noqa: BLE001 - what is no error of ours is what is looked for
            self.ledger.errors.append(f"7: p{member.number} {step.verb} ends with {error!r}")
        if loop.time() - began_s > ACTION_S_MAX and not member.was_held:
            self.ledger.errors.append(f"7: p{member.number} {step.verb} took {loop.time() - began_s:.0f} s")

    async def _alive(self, member: Member) -> Actor:
        process = member.process
        if process is not None and process.is_alive and process.repository is not None:
            return process
        member.generation += 1
        process = Actor(
            self.server,
            f"p{member.number}.{member.generation}",
            seed=self._schedule.seed,
            skew_s=member.skew_s,
            kind=_KINDS[self._schedule.store],
            settings=SETTINGS,
        )
        process.member, process.server = member, self.server
        process.store = TrappedStore(
            process.store,
            process,
            self.server,
            act=self._act,
            drift=lambda key, data, ttl_ms: self._adrift.append((process.name, key, data, ttl_ms)),
            traps=member.traps,
            sprung=lambda trap, key: self._sprung(member, trap, key),
        )
        member.process = process
        member.forget()
        await process.open()
        return process

    def _act(self, steps: tuple[Step, ...]) -> asyncio.Task[None]:
        task = outside(self.run(steps))
        self._acting.append(task)
        return task

    def _sprung(self, member: Member, trap: Trap, key: str) -> None:
        member.was_held = True
        met = self._coverage.met
        if trap.operation == "remove_ttl":
            met(Moment.INTERRUPTED_TTL_REMOVAL, int(trap.effect in {"kill", "stop"}))
        if trap.effect == "outage" and trap.phase == "after":
            met(Moment.LOST_ANSWER_AT_COMMIT, int(key.endswith(".commit")))
            met(Moment.LOST_ANSWER_AT_BOUNDARY, int(key.endswith(".boundary")))

    def _control(self, step: Control) -> None:
        member = self.members[step.process]
        process = member.process
        if step.what == "skew":
            skew_s = step.skew_ms / 1000
            self._coverage.met(Moment.CLOCK_BACKWARDS, int(skew_s < member.skew_s))
            member.skew_s = skew_s
            if process is not None:
                process.ambient.skew_s = skew_s
        elif process is None or not process.is_alive:
            return
        elif step.what == "kill":
            process.kill()
        elif step.what == "stop":
            process.stop()
        elif member.stopped_at_s is not None:
            process.wake()

    async def _until_idle(self, member: Member) -> None:
        """Until its action has ended, or stands still."""
        if member.work is None or member.work.done() or member.halted.is_set():
            return
        halting = outside(_wait(member.halted))
        await asyncio.wait({member.work, halting}, return_when=asyncio.FIRST_COMPLETED)
        halting.cancel()

    async def _settle(self) -> None:
        for member in self.members:
            await self._until_idle(member)

    async def _land(self) -> None:
        adrift, self._adrift = self._adrift, []
        for name, key, data, ttl_ms in adrift:
            store: BlobStore
            if self._schedule.store == "s3":
                store = SimS3Store(self.server, name, PREFIX)
            else:
                store = DirectStore(self.server, name, PREFIX)
            self._coverage.met(Moment.LATE_PUT)
            with contextlib.suppress(StoreError):
                outcome = await store.put_if_absent(key, BytesBody(data), ttl_ms=ttl_ms)
                self._coverage.met(Moment.LATE_PUT_CREATED, int(isinstance(outcome, Created)))

    async def _come_to_rest(self) -> None:
        """Everything that is under way arrives; who stands still wakes, or dies; everybody comes to an end."""
        await self._land()
        for member in self.members:
            if member.stopped_at_s is not None:
                is_woken = (self._schedule.seed + member.number) % 4
                self._control(Control(process=member.number, what="wake" if is_woken else "kill"))
        await self._settle()
        while self._acting:
            await asyncio.wait({self._acting.pop()})
        await self._settle()
        for member in self.members:
            if member.process is not None:
                member.process.kill()

    # ------------------------------------------------------------------ the rest

    def tamper(self, choice: int) -> bool:
        """Take a blob or an index away behind everybody's back; False if there is none."""
        names = [n for n in self.server.objects if n.removeprefix(ROOT).startswith(("blobs/", "indexes/"))]
        if not names:
            return False
        name = names[choice % len(names)]
        self.ledger.tampered = True
        self.server.chronicle.tampered.add(name.removeprefix(ROOT))
        self.server.delete(name)
        return True

    def _make_repository(self) -> None:
        is_enforced = self._schedule.store == "expiring"
        record = RepositoryRecord(
            id="00000000-0000-4000-8000-000000000000",
            ttl_ms=ENFORCED_TTL_MS if is_enforced else TTL_MS,
            margin_ms=MARGIN_MS,
            collection_period_ms=DAY_MS if is_enforced else TTL_MS,
        )
        data = encode_record(record)
        stored = SimObject(data=data, created_ms=self.server.now_ms(), metadata={})
        self.server.put(f"{ROOT}{REPOSITORY}", stored, if_absent=True)

    def _count(self) -> None:
        chronicle = self.server.chronicle
        written = [w for scope in chronicle.records.values() for w in scope.values()]
        self._coverage.met(Moment.VOID_RECORD, sum(w.created_at_ms > w.record.valid_until_ms for w in written))
        self._coverage.met(Moment.DELTA, chronicle.deltas)
        self.server.count_faults()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
