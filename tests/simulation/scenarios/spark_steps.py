"""Spark's own steps at one checkpoint, in any order that can be, beside a collection (design 0014).

One operator with two partitions, and a second one that comes and goes. A model of files by name and time: what Spark
writes, in its order, and what its maintenance deletes. Each action is a generator; between any two of its steps others
take theirs. Beside the files is a shadow, from which no collection takes: what can be loaded there has to be here.
"""

import uuid
from collections.abc import Generator, Mapping
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from index.snapshot.model import UniqueId
from index.spark.waste import Collectable, Look, confirm_collectable, find_collectable

HOUR_MS: Final = 3_600_000
AGE_MS: Final = 24 * HOUR_MS
# Versions that maintenance keeps, and commits that are not purged.
RETAINED: Final = 4
COMMITS: Final = 5
STEPS: Final = 90

R = TypeVar("R")
# Others may take steps wherever it yields.
Steps = Generator[None, None, R]


class Action(NamedTuple):
    """Something under way."""

    name: str
    steps: Steps[Any]


class File(msgspec.Struct, frozen=True):
    """A file of the model."""

    path: str
    modified_at_ms: int
    # Of a snapshot: what it names.
    names: frozenset[str] = frozenset()
    size_bytes: int = 1


class State(msgspec.Struct, frozen=True):
    """A version of one store, by an attempt."""

    version: int
    id: str
    parent: "State | None"

    def descends(self, other: "State | None") -> bool:
        state: State | None = self
        while state is not None and state is not other:
            state = state.parent
        return state is not None

    def path(self, store: str, kind: str) -> str:
        return f"{store}/{self.version}_{self.id}.{kind}"


class Schedule:
    """One seed's schedule; `run` returns what was lost, and how much was taken."""

    def __init__(self, seed: int, *, rules: Mapping[str, bool] | None = None) -> None:
        self.rng = Random(f"spark {seed}")
        # What is broken on purpose.
        self.rules = rules or {}
        self.now_ms = 1_000 * HOUR_MS
        self.files: dict[str, File] = {}
        self.shadow: dict[str, File] = {}
        # By batch: the version of each store that it committed.
        self.committed: dict[int, dict[str, State]] = {}
        self.commits: dict[int, dict[int, tuple[tuple[UniqueId, ...], ...]]] = {}
        self.stores = ["state/0/0", "state/0/1"]
        # Of each store, the last snapshot that was uploaded, and what it names.
        self.mapped: dict[str, tuple[State, frozenset[str]]] = {}
        self.counter = 0
        self.taken: list[Collectable] = []
        self.busy: list[Action] = []

    # -------------------------------------------------------------- files

    def write(self, path: str, names: frozenset[str] = frozenset()) -> None:
        self.now_ms += 60_000
        self.files[path] = self.shadow[path] = File(path, self.now_ms, names)

    def remove(self, path: str) -> None:
        self.files.pop(path, None)
        self.shadow.pop(path, None)

    def id(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    # -------------------------------------------------------------- Spark

    def batch(self, *, is_lost: bool) -> Steps[None]:
        """Run a batch, or an attempt of it that fails before it is committed."""
        number = max(self.committed, default=-1) + 1
        made: dict[str, State] = {}
        for store in self.stores:
            made[store] = yield from self.task(store, number)
            if self.rng.randrange(6) == 0:
                # Another attempt of the task, by speculation or a retry, that loses.
                yield from self.task(store, number)
        if is_lost or number in self.committed:
            return
        yield
        if number in self.committed:
            return
        operators = sorted({int(store.split("/")[1]) for store in made})
        self.commits[number] = {
            operator: tuple(
                (UniqueId(made[store].id),) for store in sorted(made) if store.startswith(f"state/{operator}/")
            )
            for operator in operators
        }
        self.committed[number] = made
        for batch in sorted(self.commits)[:-COMMITS]:
            del self.commits[batch]

    def task(self, store: str, number: int) -> Steps[State]:
        before = self.committed.get(number - 1, {}).get(store)
        made = State(number + 1, self.id(), before)
        self.write(made.path(store, "changelog"))
        yield
        if self.rng.randrange(2):
            self.busy.append(Action("snapshot", self.snapshot(store, made)))
        return made

    def snapshot(self, store: str, of: State) -> Steps[None]:
        """Upload a snapshot: its new SSTs, then the zip; some are reused, some uploads break off."""
        # Spark takes over files along one lineage alone (0004, S1).
        before, names = self.mapped.get(store, (None, frozenset[str]()))
        reused = (
            frozenset(path for path in sorted(names) if self.rng.randrange(2)) if of.descends(before) else frozenset()
        )
        new = set()
        for _ in range(self.rng.randrange(3)):
            path = f"{store}/SSTs/{self.counter:06}-{self.id()}.sst"
            self.counter += 1
            self.write(path)
            new.add(path)
            yield
            if self.rng.randrange(8) == 0:
                return
        # Some stall before the zip, while batches and looks come and go.
        for _ in range(self.rng.choice((0, 0, 10, 40))):
            yield
        # What it reuses is of a snapshot that is still there.
        if not reused <= self.shadow.keys():
            return
        self.write(of.path(store, "zip"), reused | new)
        self.mapped[store] = of, reused | new
        yield

    def maintain(self) -> Steps[None]:
        """Delete old versions, and orphans by Spark's rule (0004, G1 and G3)."""
        for store in list(self.stores):
            zips = sorted(
                (int(path.removeprefix(f"{store}/").split("_")[0]), path)
                for path in self.shadow
                if path.startswith(f"{store}/") and path.endswith(".zip")
            )
            yield
            kept = [v for v, _ in zips if v <= max((v for v, _ in zips), default=0) - RETAINED + 1]
            if not kept:
                continue
            oldest = max(kept)
            for version, path in zips:
                if version < oldest:
                    self.remove(path)
                    yield
            named = {name for path in self.shadow if path.endswith(".zip") for name in self.shadow[path].names}
            times = [self.shadow[name].modified_at_ms for name in named if name in self.shadow]
            for path in [p for p in self.shadow if p.startswith(f"{store}/SSTs/") and p not in named]:
                if times and path in self.shadow and self.shadow[path].modified_at_ms < min(times):
                    self.remove(path)
            for path in [p for p in self.shadow if p.startswith(f"{store}/") and p.endswith(".changelog")]:
                if int(path.removeprefix(f"{store}/").split("_")[0]) < oldest:
                    self.remove(path)
            yield

    # -------------------------------------------------------------- collection

    def look(self) -> Steps[tuple[tuple[Collectable, ...], int]]:
        """Take a look in the order of X2, others at work between its steps."""
        ids = dict(self.commits)
        yield
        files = tuple(self.files.values())
        yield
        zips = [path for path in self.files if path.endswith(".zip")]
        named: dict[str, frozenset[str]] = {}
        unread: set[str] = set()
        for path in zips:
            if self.rng.randrange(3) == 0:
                yield
            store = path.rpartition("/")[0]
            if path not in self.files:
                unread.add(store)
                continue
            short = frozenset(name.removeprefix(f"{store}/") for name in self.files[path].names)
            named[store] = named.get(store, frozenset()) | short
        look = Look(ids=ids, files=files, named=named, unread=frozenset(unread))
        takes_orphans = bool(self.rules.get("orphans while it runs"))
        return find_collectable(look, older_than_ms=AGE_MS, is_stopped=takes_orphans), max(ids, default=-1)

    def collect(self) -> Steps[None]:
        first, at_first = yield from self.look()
        for _ in range(self.rng.randrange(1, 12)):
            yield
        second, at_second = yield from self.look()
        if at_second <= at_first:
            return
        for each in confirm_collectable(first, second):
            self.taken.append(each)
            self.files.pop(each.path, None)
            yield

    # -------------------------------------------------------------- running

    def change_plan(self) -> None:
        """The query is restarted with another operator, or without it; nothing of before goes on."""
        second = ["state/1/0"]
        self.stores = self.stores[:2] if len(self.stores) > 2 else self.stores + second
        self.busy = [action for action in self.busy if action.name in {"collect", "snapshot"}]

    def run(self) -> list[str]:
        """Take steps; return what was lost, nothing at best."""
        for _ in range(STEPS):
            self.begin()
            for action in self.rng.sample(self.busy, len(self.busy))[: self.rng.randrange(1, 6)]:
                if not _goes_on(action.steps):
                    self.busy.remove(action)
            if lost := self.lost():
                return lost
        return []

    def begin(self) -> None:
        """Begin another action, or let time pass."""
        choice = self.rng.randrange(10)
        is_idle = not any(action.name == "batch" for action in self.busy)
        if choice < 4 and is_idle:
            self.busy.append(Action("batch", self.batch(is_lost=self.rng.randrange(4) == 0)))
        elif choice == 4:
            self.busy.append(Action("maintain", self.maintain()))
        elif choice in {5, 6} and not any(action.name == "collect" for action in self.busy):
            self.busy.append(Action("collect", self.collect()))
        elif choice == 7 and is_idle and self.rng.randrange(2):
            self.change_plan()
        elif choice in {8, 9}:
            # Uploads that stall go on after it.
            self.now_ms += self.rng.choice((HOUR_MS, 5 * HOUR_MS, 30 * HOUR_MS))

    def lost(self) -> list[str]:
        """Say which committed versions can be loaded from the shadow, and not from what is there."""
        return [
            f"{state.path(store, 'version')} of batch {batch}"
            for batch in self.commits
            for store, state in self.committed[batch].items()
            if self.loads(store, state, self.shadow) and not self.loads(store, state, self.files)
        ]

    @staticmethod
    def loads(store: str, state: State | None, files: Mapping[str, File]) -> bool:
        """Whether a version can be loaded: by the newest snapshot on its way back, and all changelogs after it."""
        while state is not None:
            snapshot = files.get(state.path(store, "zip"))
            if snapshot is not None:
                return snapshot.names <= files.keys()
            if state.path(store, "changelog") not in files:
                return False
            state = state.parent
        return True


def _goes_on(action: Steps[Any]) -> bool:
    try:
        next(action)
    except StopIteration:
        return False
    return True
