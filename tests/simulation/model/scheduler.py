"""Run the steps of one schedule in a world of its own, and have the judge check it."""

import asyncio
import hashlib
from pathlib import Path
from typing import Final

import msgspec

from blobstore.errors import StoreError
from blobstore.wrappers.retry import HedgeSettings
from engine.errors import EngineError
from engine.records.journal import UploadJournals
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from index.errors import FormatError
from index.plan.commits import Retention
from index.snapshot.model import Scope
from tests.simulation.checks.coverage import Coverage, Moment
from tests.simulation.checks.final_state import rest_s
from tests.simulation.checks.judge import JUDGE, CallLog, Judge
from tests.simulation.faults.file_effects import FileChanges
from tests.simulation.faults.request_faults import Fault, FaultPlan
from tests.simulation.model.outcome import Beginning, Outcome
from tests.simulation.model.participants import Actor, Member
from tests.simulation.model.processes import KilledError, Kind, plain_store
from tests.simulation.model.s3 import PAGES
from tests.simulation.model.world import ROOT, TrappedStore, WatchedServer, make_repository, outside
from tests.simulation.scenarios.actions import Actions
from tests.simulation.scenarios.builder import ENFORCED, PROCESSES_IN_USE, USUAL, backstop_ms
from tests.simulation.scenarios.last_writer import push_everywhere
from tests.simulation.scenarios.schedule import (
    TASK_SCOPE,
    Advance,
    Control,
    Do,
    Happen,
    Land,
    Schedule,
    Settle,
    Step,
    StoreKind,
    Trap,
    Verb,
)

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
_KINDS: Final[dict[StoreKind, Kind]] = {"s3": "s3", "memory": "direct", "expiring": "direct", "stale": "stale"}
QUIET_DAYS_MAX: Final = 1
EVERYTHING: Final = 1_000_000
# Steps that may be added to a schedule with too few effects; each adds six or more.
LENGTHENING_MAX: Final = 24
_RANDOM_FAULTS: Final = tuple(fault for fault in Fault if fault is not Fault.NONE)


class World:
    """One run of one schedule.

    Args:
        schedule: What happens.
        directory: For files; of this run alone.
        coverage: Where moments are counted.
        beginning: What is there at first; an empty repository if not given.
        changes: Counts those to files.

    Attributes:
        server: The bucket, once the world has begun.
        call_log: What callers asked for and were shown.
        members: The processes.
    """

    def __init__(
        self,
        schedule: Schedule,
        directory: Path,
        coverage: Coverage,
        *,
        beginning: Beginning | None = None,
        changes: FileChanges | None = None,
    ) -> None:
        self._schedule = schedule
        self._times = schedule.times or (ENFORCED if schedule.store == "expiring" else USUAL)
        self._beginning = beginning
        self._changes = FileChanges() if changes is None else changes
        self._directory = directory
        self._coverage = coverage
        self.call_log = CallLog()
        self.members = [Member(number, directory) for number in range(PROCESSES_IN_USE)]
        for member in self.members:
            member.is_stale = schedule.store == "stale" or member.number in schedule.stale
        self._acting: list[asyncio.Task[None]] = []
        # Whose request waits until others have done something.
        self._waiting: list[Member] = []
        self._quiet_days = 0
        # When the next collection of a store that deletes by itself is due.
        self._upkeep_s = 0.0
        self._effects_seen = 0

    async def live(self, *, keep_history: bool = False) -> Outcome:
        """From the first step to the verdict."""
        self.begin()
        await self.run(self._schedule.steps)
        await self._lengthen()
        return await self.finish(keep_history=keep_history)

    async def _lengthen(self) -> None:
        """Add steps until there are as many effects as there have to be."""
        verbs: tuple[Verb, Verb] = ("restore", "push") if self._schedule.seed % 4 else ("push", "restore")
        for at in range(LENGTHENING_MAX):
            if self.server.effects + self._changes.count >= self._schedule.effects_min:
                return
            # Some may be paused, and some stores be gone. A job whose log has rotted takes no push: another does.
            scope = 1 if at >= LENGTHENING_MAX // 2 else TASK_SCOPE if self._schedule.is_of_task else 0
            step = Do(process=at % PROCESSES_IN_USE, verb=verbs[at % 2], scope=scope)
            await self.run((step,))

    def begin(self) -> None:
        """Make the bucket, with the repository in it."""
        schedule = self._schedule
        loop = asyncio.get_running_loop()
        self._upkeep_s = loop.time()
        self.server = WatchedServer(
            self._coverage,
            whole_seconds=schedule.store == "s3",
            seed=schedule.seed,
            clock=loop.time,
            faults=FaultPlan(schedule.seed),
            dates_by_start=schedule.seed % 3 == 0,
            expiry_ms=backstop_ms(self._times) if schedule.store == "expiring" else None,
            page_max=schedule.page_max,
        )
        if self._beginning is None:
            make_repository(self.server, self._times)
        else:
            self._begin_with(self._beginning)
        self.server.record_history.ttl_ms = self._times.ttl_ms
        share = schedule.faults_per_mille / 1000 / len(_RANDOM_FAULTS)
        self.server.faults.rates = dict.fromkeys(_RANDOM_FAULTS, share) if share else {}
        self._actions = Actions(self.server, self.call_log, self._coverage, times=self._times)
        self._actions.join(self.members)

    def judge(self) -> Judge:
        """Who judges this world; nothing is judged yet."""
        return Judge(self.server, self.server.record_history, self.call_log, self._directory)

    async def finish(self, *, keep_history: bool = False) -> Outcome:
        """Let everything come to rest, and have it judged."""
        server = self.server
        await self._come_to_rest()
        judge = self.judge()
        effects, file_effects, requests = server.effects, self._changes.count, server.requests
        self._quieten()
        judge.violations += self._actions.causes.check_refused()
        # What is late is asked for once more beside the limit (0008, H3).
        if server.in_flight_max > SETTINGS.in_flight_max + HedgeSettings().extra_in_reserve:
            judge.violations.append(f"8: {server.in_flight_max} requests at once")
        judge.check_now()
        if not judge.violations and self._schedule.is_judged:
            await self._advance(rest_s(self._times))
            server._expire()
            server.actor = JUDGE
            is_written_to = await judge.check_at_rest()
            if is_written_to and not judge.violations and not self.call_log.tampered:
                judge.violations += await push_everywhere(server, self.call_log, self.members[0])
            judge.violations += server.record_history.violations
        self._count()
        # Made only if somebody wants it: it takes as long as a request in ten.
        history = tuple(server.history) if keep_history else ()
        return Outcome(
            violations=tuple(judge.violations),
            effects=effects,
            file_effects=file_effects,
            requests=requests,
            digest=hashlib.sha256("\n".join(history).encode()).hexdigest() if keep_history else "",
            history=history,
        )

    def _quieten(self) -> None:
        """Nothing goes wrong any more, and lists are whole: for who judges."""
        self.server.faults.rates = {}
        self.server.is_full = False
        self.server.faults.end_bursts()
        self.server.page_max = PAGES[-1]

    async def build(self) -> Beginning:
        """Carry out the steps, and stop there: a repository for others to begin with."""
        await self.live()
        return Beginning(self.server.objects, self.server.record_history, self.call_log)

    def _begin_with(self, beginning: Beginning) -> None:
        self.server.restore(beginning.objects)
        self.server.record_history = beginning.record_history.copy(self.server.objects, self.server.now_ms)
        self.call_log = beginning.call_log.copy()

    # ------------------------------------------------------------------ steps

    async def run(self, steps: tuple[Step, ...], *, beside: bool = False) -> None:
        """Carry out steps, one after the other."""
        for step in steps:
            match step:
                case Do():
                    if not beside or self.members[step.process] not in self._waiting:
                        await self._do(step)
                case Trap():
                    self.members[step.process].traps.append(step)
                case Control():
                    self._control(step)
                case Advance(ms=ms):
                    await self._advance(ms / 1000)
                case Happen():
                    await self._happen(step)
                case Land():
                    self.server.land()
                case Settle():
                    await self._settle()

    async def _advance(self, seconds: float) -> None:
        """Time passes; where the store deletes by itself, a collector that keeps everything runs as T3 demands."""
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + seconds
        while self._schedule.store == "expiring" and self._upkeep_s <= until_s:
            await asyncio.sleep(self._upkeep_s - now_s())
            self._upkeep_s = now_s() + self._times.period_ms / 1000
            await self._do_upkeep()
        await asyncio.sleep(until_s - now_s())

    async def _do_upkeep(self) -> None:
        # Once nobody has done anything since two of them, a further one would find what they left.
        self._quiet_days = self._quiet_days + 1 if self.server.effects == self._effects_seen else 0
        self._effects_seen = self.server.effects
        if self._quiet_days > QUIET_DAYS_MAX:
            return
        page_max, self.server.page_max, self.server.actor = self.server.page_max, PAGES[-1], JUDGE
        try:
            repository = await Repository.open(plain_store(self.server))
            await repository.collect(Retention(keep_last=EVERYTHING), delete_share_max=1)
        except (EngineError, FormatError) as error:
            if not self.call_log.tampered:
                self.call_log.errors.append(f"4: a daily collection fails: {error!r}")
        finally:
            self.server.page_max, self.server.actor = page_max, ""

    async def _do(self, step: Do) -> None:
        member = self.members[step.process]
        await self._until_idle(member)
        if member.is_busy or member.stopped_at_s is not None:
            return  # it is paused
        member.verb = step.verb
        member.halted.clear()
        member.work = outside(self._perform(member, step))
        member.work.add_done_callback(member.ended)
        if step.wait:
            await self._until_idle(member)

    async def _perform(self, member: Member, step: Do) -> None:
        try:
            process = await self._alive(member)
            if process is None or process.repository is None:
                return
            self._coverage.met(Moment.CLOCK_BACKWARDS, int(member.clock_fell))
            member.clock_fell = False
            await process.run(self._actions.perform(member, process.repository, step))
        except KilledError:
            return
        except Exception as error:  # noqa: BLE001 - what is not an error of ours is what is looked for
            self.call_log.errors.append(f"7: p{member.number} {step.verb} ends with {error!r}")

    async def _alive(self, member: Member) -> Actor | None:
        """Its process, a new one if there is none; None if that cannot open the repository, for a cause."""
        process = member.process
        if process is not None and process.is_alive and process.repository is not None:
            return process
        member.generation += 1
        process = Actor(
            self.server,
            f"p{member.number}.{member.generation}",
            seed=self._schedule.seed,
            skew_s=member.skew_s,
            kind="stale" if member.is_stale else _KINDS[self._schedule.store],
            settings=SETTINGS,
        )
        process.member, process.server = member, self.server
        process.store = TrappedStore(
            process.store,
            process,
            self.server,
            act=lambda trap: self._act(member, trap),
            traps=member.traps,
            sprung=self._sprung,
        )
        member.process = process
        asked = self._actions.causes.begin(member, None, Scope(""), asyncio.get_running_loop().time())
        try:
            await process.open()
        except (EngineError, FormatError, StoreError) as error:
            if not self._actions.causes.explains(asked, member, error):
                self.call_log.errors.append(f"7: p{member.number} cannot open the repository: {error!r}")
            return None
        if self._schedule.journals and process.repository is not None:
            opened = process.repository.opened
            journals = UploadJournals(member.directory.parent / "journals")
            process.repository.opened = msgspec.structs.replace(opened, journals=journals)
        return process

    def _act(self, member: Member, trap: Trap) -> asyncio.Task[None]:
        task = outside(self._run_beside(member, trap))
        self._acting.append(task)
        return task

    async def _run_beside(self, member: Member, trap: Trap) -> None:
        """What others do while a request of somebody waits; none of them waits for another that waits."""
        waits, began_s = trap.effect == "none", asyncio.get_running_loop().time()
        self._waiting += [member] * waits
        await self.run(trap.then, beside=True)
        if waits:
            self._waiting.remove(member)
            member.stood_s += asyncio.get_running_loop().time() - began_s

    def _sprung(self, trap: Trap, key: str) -> None:
        met = self._coverage.met
        # What is interrupted otherwise is acknowledged, and counted then.
        met(Moment.INTERRUPTED_TTL_REMOVAL, int(trap.operation == "remove_ttl" and trap.effect == "kill"))
        if trap.effect == "outage" and trap.phase == "after":
            met(Moment.LOST_ANSWER_AT_COMMIT, int(key.endswith(".commit")))
            met(Moment.LOST_ANSWER_AT_BOUNDARY, int(key.endswith(".boundary")))

    def _control(self, step: Control) -> None:
        member = self.members[step.process]
        process = member.process
        if step.what == "skew":
            skew_s = step.skew_ms / 1000
            member.clock_fell = skew_s < member.skew_s
            member.skew_s = skew_s
            if process is not None:
                process.runtime.skew_s = skew_s
        elif process is None or not process.is_alive:
            return
        elif step.what == "kill":
            process.kill()
        elif step.what == "stop":
            process.stop()
        elif member.stopped_at_s is not None:
            process.wake()

    async def _happen(self, step: Happen) -> None:
        server, met = self.server, self._coverage.met
        match step.what:
            case "fill" | "empty":
                met(Moment.FULL, int(server.refused_full.total() > 0 and step.what == "empty"))
                server.is_full = step.what == "fill"
            case "step":
                server.ahead_ms += step.ms
                server.ahead_ms_max = max(server.ahead_ms_max, server.ahead_ms)
                met(Moment.SERVER_CLOCK_BACKWARDS, int(step.ms < 0))
            case "copy":
                # Those at work go on at the old place, which nobody looks at any more.
                await self._settle()
                for member in self.members:
                    if member.process is not None:
                        member.process.kill()
                        member.traps.clear()
                await self._settle()
                server.copy()
                server.record_history.copied()
                met(Moment.COPIED)
            case "flip":
                met(Moment.FLIPPED_AT_REST, int(self.flip(step.choice, step.prefix)))

    async def _until_idle(self, member: Member) -> None:
        """Until its action has ended, or is paused."""
        if member.work is None or member.work.done() or member.halted.is_set():
            return
        await member.halted.wait()

    async def _settle(self) -> None:
        for member in self.members:
            await self._until_idle(member)

    async def _come_to_rest(self) -> None:
        """Everything that is under way arrives; who is paused wakes, or dies; everybody comes to an end."""
        self.server.land()
        for member in self.members:
            if member.stopped_at_s is not None:
                is_woken = (self._schedule.seed + member.number) % 4
                self._control(Control(process=member.number, what="wake" if is_woken else "kill"))
        await self._settle()
        while self._acting:
            await self._acting.pop()
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
        self.call_log.tampered = True
        self.server.record_history.tampered.add(name.removeprefix(ROOT))
        self.server.delete(name)
        return True

    def flip(self, choice: int, prefix: str = "") -> bool:
        """Let a byte of an object outside `blobs/` rot, below the prefix if one is there; False if there is none."""
        names = [n for n in self.server.objects if n.startswith(ROOT) and not n.startswith(f"{ROOT}blobs/")]
        names = [n for n in names if n.startswith(ROOT + prefix)] or names
        if not names:
            return False
        name = names[choice % len(names)]
        self.call_log.tampered = True
        data = self.server.rot(name, choice)
        self.server.record_history.rotten.setdefault(name.removeprefix(ROOT), data)
        return True

    def _count(self) -> None:
        record_history = self.server.record_history
        written = [w for scope in record_history.records.values() for w in scope.values()]
        self._coverage.met(Moment.VOID_RECORD, sum(w.created_at_ms > w.record.valid_until_ms for w in written))
        self._coverage.met(Moment.DELTA, record_history.deltas)
        self._coverage.met(Moment.DELTA_CHAIN, record_history.delta_chains)
        self.server.count_faults()
