"""The participants of a schedule: processes one after another under one number, and what they hold in memory."""

import asyncio
import os
from pathlib import Path
from typing import Final

from typing_extensions import override

from engine.backup.backup import BackupResult
from engine.commit.record import LayoutChange
from index.snapshot.model import PIN_DURATION_MS, CommitPointer, Scope
from tests.simulation.checks.coverage import Moment
from tests.simulation.checks.history import StoreName, Tree
from tests.simulation.model.processes import SimProcess
from tests.simulation.model.world import WatchedServer
from tests.simulation.scenarios.schedule import Trap, Verb

# When files were changed, whatever the real clock says: it is in indexes.
_MODIFIED_NS: Final = 1_600_000_000_000_000_000
WRITING: Final[frozenset[Verb]] = frozenset({"push", "commit", "drop", "rescale", "fork", "rewind", "name"})

Results = dict[StoreName, BackupResult]
# What a request for a commit brings, which stores it drops, and which layout it makes on top of which commit.
Wanted = tuple[str, Results, frozenset[StoreName], tuple[LayoutChange, CommitPointer] | None]


class Member:
    """One process after another, under one number: what it is at, and what it holds in memory.

    Attributes:
        traps: Set for whatever its process asks next.
        work: The action under way; done if there is none.
        verb: Of that action.
        halted: Set while its process is stopped, and once the action has ended.
    """

    def __init__(self, number: int, directory: Path) -> None:
        self.number = number
        self.directory = directory / f"p{number}"
        self.process: Actor | None = None
        self.generation = 0
        self.skew_s = 0.0
        self.traps: list[Trap] = []
        self.work: asyncio.Task[None] | None = None
        self.verb: Verb | None = None
        self.halted = asyncio.Event()
        self.stopped_at_s: float | None = None
        self.closings_when_stopped = 0
        self.forgettings_when_stopped = 0
        # How long it has been paused, or waited for others at a trap, in all.
        self.stood_s = 0.0
        # Its clock went backwards, and it has done nothing since.
        self.clock_fell = False
        # Its lists may be old, and its store says so.
        self.is_stale = False
        self.results: dict[Scope, Results] = {}
        # Requests without an answer: to be asked for again with the same words.
        self.unanswered: dict[Scope, Wanted] = {}
        # What it has committed last: a driver may have it in a file, which outlives its process.
        self.committed: dict[Scope, Results] = {}
        self._files: Tree = {}

    @property
    def is_busy(self) -> bool:
        """Whether an action is under way, or is paused."""
        return self.work is not None and not self.work.done()

    def write(self, files: Tree) -> Path:
        """Let its directory hold exactly these files."""
        root = self.directory / "state"
        if not self._files:
            (root / "sub").mkdir(parents=True, exist_ok=True)
        for gone in self._files.keys() - files.keys():
            (root / gone).unlink()
        for name, data in files.items():
            if self._files.get(name) != data:
                path = f"{root}/{name}"
                with open(path, "wb") as file:  # noqa: PTH123 - pathlib takes longer than the write
                    file.write(data)
                os.utime(path, ns=(_MODIFIED_NS, _MODIFIED_NS))
        self._files = files
        return root

    def ended(self, work: asyncio.Task[None]) -> None:
        """An action has come to its end; a later one may be under way."""
        if work is self.work:
            self.halted.set()

    def forget(self) -> None:
        """What was in the memory of a process that is no more."""
        self.results, self.unanswered = {}, {}


class Actor(SimProcess):
    """A process that notifies its member when it is paused, dies and wakes."""

    member: Member
    server: WatchedServer

    @override
    def stop(self) -> None:
        member = self.member
        if member.stopped_at_s is not None:
            return  # it sleeps already, and has since then
        super().stop()
        member.stopped_at_s = asyncio.get_running_loop().time()
        member.closings_when_stopped = self.server.record_history.closings
        member.forgettings_when_stopped = self.server.record_history.forgettings
        member.halted.set()

    @override
    def wake(self) -> None:
        member, met = self.member, self.server.coverage.met
        if member.stopped_at_s is not None and member.is_busy:
            slept_s = asyncio.get_running_loop().time() - member.stopped_at_s
            member.stood_s += slept_s
            closed = self.server.record_history.closings > member.closings_when_stopped
            met(Moment.ZOMBIE_AFTER_BOUNDARY, int(member.verb in WRITING and closed))
            forgotten = self.server.record_history.forgettings > member.forgettings_when_stopped
            met(Moment.ZOMBIE_AFTER_FORGETTING, int(member.verb in WRITING and forgotten))
            met(Moment.PIN_LAPSED, int(member.verb == "restore" and slept_s * 1000 > PIN_DURATION_MS))
        member.stopped_at_s = None
        member.halted.clear()
        super().wake()

    @override
    def kill(self) -> None:
        member, met = self.member, self.server.coverage.met
        if member.is_busy:
            met(Moment.KILLED_WRITER, int(member.verb in WRITING))
            met(Moment.KILLED_COLLECTOR, int(member.verb == "collect"))
            met(Moment.KILLED_READER, int(member.verb == "restore"))
            met(Moment.KILLED_FOLLOWER, int(member.verb == "follow"))
        member.forget()
        member.stopped_at_s = None
        super().kill()
