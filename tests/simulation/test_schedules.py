"""Seeded schedules of everything at once, judged by the eight invariants of design 0007."""

import msgspec
import pytest

from tests.simulation.campaign import main, run_batch
from tests.simulation.checks.coverage import Coverage, Moment
from tests.simulation.faults.mutations import MUTATIONS
from tests.simulation.scenarios.builder import COLLECTOR, KEEPER, OTHER, READER, TTL_MS, WRITER
from tests.simulation.scenarios.random_schedules import make_schedule
from tests.simulation.scenarios.schedule import (
    Advance,
    Do,
    Schedule,
    Settle,
    Trap,
    decode_schedule,
    encode_schedule,
    show_schedule,
)
from tests.simulation.shrink import shrink
from tests.simulation.simulate import simulate

EMPTY = Schedule(seed=1, store="memory", beginning=0, faults_per_mille=0, deltas=False, themes=(), steps=())


def test_schedules_of_all_kinds_leave_nothing_to_complain_of() -> None:
    batch = run_batch(range(1, 101))
    assert batch.failures == ()
    # A rule of the project: at least 40 effects each.
    assert batch.effects_min >= 40


@pytest.mark.parametrize("seed", [3, 7, 11, 19])
def test_the_same_seed_gives_the_same_history_byte_for_byte(seed: int) -> None:
    schedule = make_schedule(seed)
    assert make_schedule(seed) == schedule
    first, second = simulate(schedule, keep_history=True), simulate(schedule, keep_history=True)
    assert first.history == second.history
    assert first.digest == second.digest


def test_a_schedule_can_be_written_down_and_read_again() -> None:
    for seed in range(50):
        schedule = make_schedule(seed)
        assert decode_schedule(encode_schedule(schedule)) == schedule
        assert len(show_schedule(schedule).splitlines()) == schedule.size + 1


def test_every_schedule_has_three_actors() -> None:
    def actors(schedule: Schedule) -> set[int]:
        return {s.process for s in all_steps(schedule) if isinstance(s, Do)}

    assert min(len(actors(make_schedule(seed))) for seed in range(200)) >= 3


def all_steps(schedule: Schedule) -> list[object]:
    found: list[object] = []
    left: list[object] = list(schedule.steps)
    while left:
        step = left.pop(0)
        found.append(step)
        left += step.then if isinstance(step, Trap) else ()
    return found


def test_a_trap_leads_to_the_moment_that_it_is_set_for() -> None:
    collection = Do(process=COLLECTOR, verb="collect")
    steps = (
        Do(process=WRITER, verb="push"),
        Do(process=WRITER, verb="push"),
        Trap(process=WRITER, operation="put_if_absent", prefix="log/", suffix=".commit", then=(collection,)),
        Do(process=WRITER, verb="push"),
        Trap(process=OTHER, operation="put_if_absent", prefix="log/", phase="before", effect="stop"),
        Do(process=OTHER, verb="push"),
        Do(process=WRITER, verb="push"),
        Do(process=COLLECTOR, verb="collect"),
        Settle(),
    )
    coverage = Coverage()
    outcome = simulate(msgspec.structs.replace(EMPTY, steps=steps), coverage)
    assert outcome.violations == ()
    assert coverage.counts[Moment.COLLECTION_BEFORE_CHECK] == 1
    # Anyone who is still there at the end is woken.
    assert coverage.counts[Moment.ZOMBIE_AFTER_BOUNDARY] == 1


def test_what_a_name_stood_for_that_is_released_between_two_readings_is_kept() -> None:
    """D5: schedules that use no commit by its name did not find that a collection took it."""
    give = Do(process=KEEPER, verb="name", choice=1)
    hold = Trap(process=READER, operation="put_if_absent", phase="before", effect="stop")
    use = Do(process=READER, verb="rewind", choice=1, by_name=True)
    release = Do(process=OTHER, verb="release", choice=1)
    again = Trap(process=COLLECTOR, operation="list_page", prefix="names/", phase="before", then=(hold, use, release))
    steps = (
        Do(process=WRITER, verb="push"),
        Do(process=WRITER, verb="push"),
        Advance(ms=TTL_MS),
        Trap(process=COLLECTOR, operation="put_if_absent", prefix="log/", phase="before", then=(give, again)),
        Do(process=COLLECTOR, verb="collect"),
    )
    schedule = msgspec.structs.replace(EMPTY, steps=steps)
    coverage = Coverage()
    assert simulate(schedule, coverage).violations == ()
    assert coverage.counts[Moment.RELEASED_IN_USE] == 1
    assert coverage.counts[Moment.NAMED_WITHIN_COLLECT] == 1
    with MUTATIONS["released_names_keep_nothing"].patch():
        assert simulate(schedule).violations[0].startswith("D5: ")


@pytest.mark.parametrize("store", ["s3", "memory"])
def test_bytes_that_are_altered_on_their_way_are_fetched_again(store: str) -> None:
    flip = Trap(process=READER, operation="get", prefix="blobs/", phase="before", effect="flip")
    steps = (Do(process=WRITER, verb="push"), flip, Do(process=READER, verb="restore"))
    outcome = simulate(msgspec.structs.replace(EMPTY, store=store, steps=steps), keep_history=True)
    assert outcome.violations == ()
    flipped = [line.split()[3] for line in outcome.history if line.endswith(" flipped")]
    assert len(flipped) == 1
    assert sum(f" {flipped[0]} " in line and " get" in line for line in outcome.history) == 2


def test_what_breaks_a_rule_is_reported_with_the_shortest_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that keeps nothing of what it found reachable (D2)."""

    async def nothing(*_: object, **__: object) -> frozenset[str]:
        return frozenset()

    monkeypatch.setattr("engine.collect.backend.reachable_keys", nothing)
    steps = (
        Do(process=WRITER, verb="push"),
        Do(process=READER, verb="restore"),
        Do(process=WRITER, verb="push"),
        Do(process=COLLECTOR, verb="collect"),
        Do(process=OTHER, verb="push"),
    )
    schedule = msgspec.structs.replace(EMPTY, steps=steps)
    outcome = simulate(schedule)
    assert any("which a valid commit or a name needs" in violation for violation in outcome.violations)
    shortest = shrink(schedule, lambda shorter: bool(simulate(shorter).violations))
    # The judge's own collection at the end is enough.
    assert [step.verb for step in shortest.steps if isinstance(step, Do)] == ["push"]


def test_the_command_line_replays_what_was_written_down(
    tmp_path: object, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue("tmp_path") / "schedule.json"
    path.write_text(encode_schedule(make_schedule(5)))
    assert main(["--replay", str(path)]) == 0
    history = capsys.readouterr().out
    assert main(["--seed", "5", "--history"]) == 0
    assert capsys.readouterr().out == history
    assert "put_object log/" in history


def test_a_record_whose_bytes_come_altered_twice_may_be_reported_as_damage() -> None:
    """Anyone who opens the repository sees that too; seed 7001825 was a false alarm of the judge."""
    assert simulate(make_schedule(7001825)).violations == ()
    flips = tuple(Trap(process=READER, operation="get", prefix=p, phase="before", effect="flip") for p in ("log/",) * 2)
    steps = (Do(process=WRITER, verb="push"), Do(process=READER, verb="backup", store=1), *flips)
    outcome = simulate(msgspec.structs.replace(EMPTY, steps=(*steps, Do(process=READER, verb="collect"))))
    assert outcome.violations == ()


@pytest.mark.parametrize("seed", [903, 4184, 6992])
def test_what_the_judge_once_took_for_a_fault_is_none(seed: int) -> None:
    """A drop asked again, a rotten repository record, and a rotten commit."""
    assert simulate(make_schedule(seed)).violations == ()


def test_a_fork_that_comes_too_late_is_forgotten_before_all_is_judged() -> None:
    trap = Trap(process=KEEPER, operation="put_if_absent", prefix="log/fork", phase="before", effect="stop")
    steps = (*(Do(process=WRITER, verb="push") for _ in range(2)), trap, Do(process=KEEPER, verb="fork", choice=1))
    # With another seed the process dies and does not wake.
    schedule = msgspec.structs.replace(EMPTY, seed=2, steps=(*steps, Advance(ms=90 * 60 * 1000)))
    assert simulate(schedule).violations == ()
