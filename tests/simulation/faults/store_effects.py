"""Stop every use case before and after each of its effects in the store; lose or delay the answer; judge.

An effect is a request that changes the bucket; of a restore also each call that would run in a thread, because those
change files (what happens within one is what `crash_runner` shows, in real processes). Effects are numbered in the
order of one seeded run, and the same seed gives the same run up to the chosen effect (design 0007, S5).

What happens to effect k of a use case (`Variant`): its process is killed just before it, or just after; the answer
is lost, and the process has to come to its end all the same; a server error refuses it once, likewise; it is never
answered, likewise; some keys of a batch are not deleted, likewise; the store is out from there on, until the process
ends with an error of it; the process is killed and the request lands after a minute, or after the TTL. Then other
processes do the use case again, go on, and everything is judged.

`run_pairs` kills the one that does it again, too, at each of its effects.

Run as `python -m tests.simulation.faults.store_effects [CASE ...]` for a table.
"""

import asyncio
import contextlib
import enum
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import msgspec

from blobstore.errors import StoreError
from engine.errors import CommitUnknownError, NotFoundError, UnsafeStoreError
from engine.inspect.verify import Level
from engine.restore.restore import RestoreOptions
from index.plan.commits import Retention
from tests.simulation.faults.request_faults import Fault, Request, matching
from tests.simulation.model.processes import EPOCH_S, KilledError, Kind, SimProcess, watched_locks
from tests.simulation.model.virtual_loop import run_virtual
from tests.simulation.scenarios.small_trees import check_keys, read_tree, small_deltas, tree
from tests.simulation.scenarios.use_cases import CASES, DAY_S, FORK, JOB, SEED, Snapshot, UseCase, World, commit_tree

MINUTE_S: Final = 60.0
EFFECTS_MAX: Final = 500
KINDS: Final[tuple[Kind, ...]] = ("s3", "direct", "parts")
IN_PARTS: Final = ("backup",)

T = TypeVar("T")


class Variant(enum.Enum):
    """What happens at the chosen effect."""

    BEFORE = "killed before"
    AFTER = "killed after"
    LOST = "answer lost"
    REFUSED = "refused once"
    NEVER = "never answered"
    PARTIAL = "done in part"
    OUTAGE = "store out from there on"
    LATE = "killed, lands after a minute"
    VERY_LATE = "killed, lands after the TTL"


KILLING: Final = frozenset({Variant.BEFORE, Variant.AFTER, Variant.LATE, Variant.VERY_LATE})
# What happens to the request, and the process goes on.
_FAULTS: Final = {
    Variant.LOST: Fault.LOST,
    Variant.REFUSED: Fault.ERROR_500,
    Variant.NEVER: Fault.NEVER_DONE,
    Variant.PARTIAL: Fault.PARTIAL,
}
# More than anybody tries.
_OUTAGE: Final = (1_000_000, 1_000_000)
_LATE_BY_S: Final = {Variant.LATE: MINUTE_S, Variant.VERY_LATE: 12 * DAY_S}


# ---------------------------------------------------------------------------------------------- stopping


class Striker:
    """Counts the effects of one process, and lets something happen at one of them.

    Args:
        world: Where.
        process: Whose effects.
        case: Which effects count.
        strike_at: Which one, from 1; 0 counts alone.
        variant: What happens.

    Attributes:
        effects: What was counted, in order.
        has_struck: It came to the chosen one.
    """

    def __init__(self, world: World, process: SimProcess, case: UseCase, strike_at: int, variant: Variant) -> None:
        self._world = world
        self._process = process
        self._strike_at = strike_at
        self._variant = variant
        self._struck: Request | str | None = None
        self.effects: list[str] = []
        world.server.on_effect = self._on_request
        if case.changes_files:
            process.on_blocking = self._on_blocking

    @property
    def has_struck(self) -> bool:
        return self._struck is not None

    def _on_request(self, phase: str, request: Request) -> bool:
        if request.process != self._process.name or not self._process.is_alive:
            return True
        if phase == "after":
            if request is self._struck and self._variant is Variant.AFTER:
                self._process.kill()
            return True
        self.effects.append(f"{request.method} {request.key}")
        if len(self.effects) != self._strike_at:
            return True
        self._struck = request
        faults = self._world.server.faults
        match self._variant:
            case Variant.BEFORE:
                self._process.kill()
                return False
            case Variant.LOST | Variant.REFUSED | Variant.NEVER | Variant.PARTIAL:
                faults.arm(_FAULTS[self._variant], lambda other: other is request)
            case Variant.OUTAGE:
                faults.burst = _OUTAGE
                faults.arm(Fault.BURST, matching(process=self._process.name))
            case Variant.LATE | Variant.VERY_LATE:
                late_s = _LATE_BY_S[self._variant]
                faults.late_s = (late_s, late_s)
                faults.arm(Fault.LATE, lambda other: other is request)
                self._process.kill()
        return True

    def _on_blocking(self, phase: str, name: str) -> None:
        if not self._process.is_alive:
            return
        if phase == "after":
            if self._struck == name and len(self.effects) == self._strike_at and self._variant is Variant.AFTER:
                self._process.kill()
            return
        self.effects.append(f"calls {name}")
        # Of a call there is neither an answer to be lost nor one that is late.
        if len(self.effects) == self._strike_at and self._variant in {Variant.BEFORE, Variant.AFTER}:
            self._struck = name
            if self._variant is Variant.BEFORE:
                self._process.kill()


async def act(world: World, case: UseCase, name: str, strike_at: int, variant: Variant, *, again: bool) -> Striker:
    """Do a use case in a process of its own, with something happening at one of its effects.

    Raises:
        StoreError: It failed, and it was not killed, the store was not out, and it was not done before.
        EngineError: As `StoreError`.
    """
    process = world.process(name)
    striker = Striker(world, process, case, strike_at, variant)
    try:
        await case.do(world, process)
    except KilledError:
        assert striker.has_struck, "killed by nobody"
    except case.done_errors:
        if not again:
            raise
        world.said += filter(None, [case.done_says])
    except (StoreError, CommitUnknownError, UnsafeStoreError):
        if variant is not Variant.OUTAGE or not striker.has_struck:
            raise
    world.server.faults.end_bursts()
    world.server.on_effect = None
    return striker


# ---------------------------------------------------------------------------------------------- judging


async def judge(world: World, case: UseCase) -> None:
    """Anyone who comes next finds what was acknowledged, goes on, and two collections leave what the walker expects."""
    process = world.process("judge")
    for target in (world.directory / "target", world.directory / "fresh" / "target"):
        if target.exists():
            assert read_tree(target) in [tree("two"), tree("three")], f"{target} is neither absent nor complete"
    repository = await process.open()
    if case.is_forgotten:
        with contextlib.suppress(NotFoundError):
            commit = await process.run(repository.find(JOB))
            raise AssertionError(f"{commit.pointer} was not forgotten")
    elif case.allowed:
        allowed = set(world.said[-1:]) or case.allowed
        for number, path in enumerate(("judged", "target", "fresh/target")):
            if number == 0 or case.changes_files:
                await process.run(
                    repository.find_and_restore(JOB, world.directory / path, options=RestoreOptions(replace=number > 0))
                )
        found = (world.directory / "judged" / "CURRENT").read_text()
        assert found in allowed, f"restored {found}, allowed are {allowed}"
        assert read_tree(world.directory / "judged") == tree(found)
        left = [p.name for p in world.directory.rglob("*tidemark*")]
        assert left == [], f"left beside a target: {left}"
    if case.is_forked:
        await process.run(repository.find_and_restore(FORK, world.directory / "fork"))
        assert read_tree(world.directory / "fork") == tree("one")
    await commit_tree(world, process, repository, "five")
    await asyncio.sleep(10 * DAY_S)
    await process.run(repository.collect(Retention(keep_last=100), delete_share_max=1))
    await check_keys(world.server)
    # What was very late has come by now.
    await asyncio.sleep(10 * DAY_S)
    for _ in range(2):
        await process.run(repository.collect(Retention(keep_last=1), delete_share_max=1))
    await check_keys(world.server)
    report = await process.run(repository.verify(level=Level.CONTENT))
    assert report.problems == (), report.problems
    await process.run(repository.find_and_restore(JOB, world.directory / "after"))
    assert read_tree(world.directory / "after") == tree("five")
    assert world.server.uploads == {}, "multipart uploads are left"


# ---------------------------------------------------------------------------------------------- running


class Stage:
    """Where use cases run again and again, each time from what `prepare` left.

    Args:
        case: The name of one of `CASES`.
        directory: For local files; in memory is best.
        kind: Of the stores.
    """

    def __init__(self, case: str, directory: Path, kind: Kind) -> None:
        self.case = CASES[case]
        self._kind = kind
        self._base = directory / "base"
        self._directories = (directory / f"run-{n}" for n in itertools.count())
        self.snapshot = self._prepare()

    def _prepare(self) -> Snapshot:
        async def make() -> Snapshot:
            world = World(self._base, self._base, None, self._kind)
            await self.case.prepare(world, world.process("prepare"))
            return Snapshot(world.server.objects, asyncio.get_running_loop().time() + MINUTE_S, world.results)

        return self._run(make(), EPOCH_S)

    def strike(self, *points: tuple[int, Variant]) -> list[Striker]:
        """Do the use case once for each point and once more to its end, and judge; the strikers of the points."""

        async def live() -> list[Striker]:
            directory = next(self._directories)
            directory.mkdir(parents=True)
            try:
                world = World(self._base, directory, self.snapshot, self._kind)
                strikers = [
                    await act(world, self.case, f"p{turn}", at, variant, again=turn > 0)
                    for turn, (at, variant) in enumerate(points)
                ]
                # The first one does the same in every run, up to there.
                assert strikers[0].has_struck or not points[0][0], "it did not come to that effect"
                await act(world, self.case, "again", 0, Variant.BEFORE, again=True)
                await judge(world, self.case)
                return strikers
            finally:
                shutil.rmtree(directory, ignore_errors=True)

        return self._run(live(), self.snapshot.at_s)

    def _run(self, work: Coroutine[Any, Any, T], start_s: float) -> T:
        with watched_locks(), small_deltas():
            return run_virtual(work, seed=SEED, start_s=start_s)


class Outcome(msgspec.Struct):
    """What came of one use case."""

    case: str
    kind: Kind
    effects: int
    points: int = 0
    failures: list[str] = []


def run_singles(
    case: str, directory: Path, kind: Kind, *, share: int = 1, variants: Sequence[Variant] = tuple(Variant)
) -> Outcome:
    """Every effect, in every variant; with a share of n, one in n of these, at random."""
    stage = Stage(case, directory, kind)
    effects = stage.strike((0, Variant.BEFORE))[0].effects
    outcome = Outcome(case, kind, len(effects))
    rng = Random(f"{case} {kind} {share}")
    for at, variant in itertools.product(range(1, len(effects) + 1), variants):
        if not _fits(effects[at - 1], variant):
            continue
        if rng.randrange(share):
            continue
        _note(outcome, stage, effects[at - 1], (at, variant))
    return outcome


def _fits(effect: str, variant: Variant) -> bool:
    """Whether that can happen to an effect."""
    if effect.startswith("calls "):
        return variant in {Variant.BEFORE, Variant.AFTER}
    return variant is not Variant.PARTIAL or effect.startswith("delete_objects ")


def run_pairs(case: str, directory: Path, kind: Kind, *, share: int = 1) -> Outcome:
    """Killed at every effect, and who does it again killed at every one of his, or left without an answer."""
    stage = Stage(case, directory, kind)
    effects = stage.strike((0, Variant.BEFORE))[0].effects
    outcome = Outcome(case, kind, len(effects))
    rng = Random(f"{case} {kind} {share} pairs")
    firsts = [(at, variant) for at in range(1, len(effects) + 1) for variant in (Variant.BEFORE, Variant.LATE)]
    for first in firsts:
        if not _fits(effects[first[0] - 1], first[1]):
            continue
        for at in range(1, EFFECTS_MAX):
            has_struck = True
            for variant in (Variant.BEFORE, Variant.LOST):
                if share == 1 or rng.randrange(share) == 0:
                    strikers = _note(outcome, stage, effects[first[0] - 1], first, (at, variant))
                    has_struck = strikers is None or len(strikers[1].effects) >= at
            if not has_struck or (share > 1 and at > len(effects) + 2):
                break
    return outcome


def _note(outcome: Outcome, stage: Stage, effect: str, *points: tuple[int, Variant]) -> list[Striker] | None:
    outcome.points += 1
    try:
        return stage.strike(*points)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported with its point
        shown = ", then ".join(f"effect {at} {variant.value}" for at, variant in points)
        outcome.failures.append(f"{outcome.case} ({outcome.kind}): {shown} [{effect}]: {type(error).__name__}: {error}")
        return None


def main(names: Sequence[str]) -> int:
    """Print a table of all use cases, or of those named."""
    failed = 0
    for case in names or CASES:
        for kind in KINDS:
            for run, what in ((run_singles, "single"), (run_pairs, "pairs")):
                # A restore makes two requests that change anything; in parts go only the uploads of a backup, many.
                if kind == "parts" and (case not in IN_PARTS or what == "pairs"):
                    continue
                if what == "pairs" and CASES[case].changes_files:
                    continue
                base = "/dev/shm" if Path("/dev/shm").is_dir() else None
                began_s = time.perf_counter()
                with tempfile.TemporaryDirectory(prefix="tidemark-", dir=base) as directory:
                    outcome = run(case, Path(directory), kind)
                failed += len(outcome.failures)
                sys.stdout.write(
                    f"{case:8} {kind:7} {what:7} {outcome.effects:4} effects {outcome.points:6} points "
                    f"{time.perf_counter() - began_s:6.1f} s {len(outcome.failures)} failures\n"
                )
                sys.stdout.write("".join(f"  {failure}\n" for failure in outcome.failures[:5]))
                sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
