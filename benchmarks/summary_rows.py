"""The lines of the table that the project measures itself by: of each work the goal, our figure, the peers', a verdict.

What was not measured says so. Two contestants whose quartiles overlap are marked `=`: neither is ahead.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks import bench_replay
from benchmarks.peers.contestants import HASHING_REFERENCE, OURS, REFERENCE, S5CMD_HASHED
from benchmarks.peers.copying import DOWN, UP
from benchmarks.peers.figures import MIB, Key, Memory, Panel, Ratio, Sample, good, memory, percentile, quartiles, ratio
from benchmarks.peers.hanging import HANGING
from benchmarks.peers.hanging import STEP as HANGING_STEP
from benchmarks.peers.incremental import COUNTS, LOOK, REQUESTS_TIMES_MAX, SAMZA, changed
from benchmarks.peers.many_stores import COMMIT, is_as_wanted
from benchmarks.peers.outcome import Outcome
from benchmarks.peers.own_state import BARE, READ_MB, SPARK_LOAD, STARTS, STATESTORE, read_step
from benchmarks.peers.present import READING, TRUSTED, VERIFIED, step_of
from benchmarks.peers.spark import ONE, TWO
from benchmarks.peers.spark import STEPS as SPARK_STEPS
from benchmarks.peers.trees import SHAPES

REACHED, MISSED, NOT_MEASURED, NO_GOAL = "reached", "missed", "not measured", "shown"
LARGE = {"mid": "40 files of 32 MiB", "big": "one file of 1 GiB", "state": "RocksDB state of 4 GiB"}
# What the README shows: work and step, and how they are called there.
CHARTED = {
    ("small", UP): "upload 2,000 files of 64 KiB",
    ("small", DOWN): "restore 2,000 files of 64 KiB",
    ("big", DOWN): "restore one file of 1 GiB",
    ("state", DOWN): "restore a RocksDB of 4 GiB",
    ("incremental", changed(COUNTS[1])): f"back up 1 % of {COUNTS[1]:,} files",
    ("replay", bench_replay.label_of(200, 5)): "restore 256 MB, or replay it",
}
# Whole programs, of which people choose one; libraries are in the tables of each run.
PROGRAMS = ("s5cmd", "rclone", "restic", bench_replay.BATCHED, bench_replay.ONE)
# How many times faster than a full restore one onto 90 % is, by tree: trusted by stat, verified by hash. Above these,
# the new directory that is built beside the old one is the limit.
PRESENT_TIMES = {"small": ((TRUSTED, 2.0), (VERIFIED, 1.15)), "mid": ((TRUSTED, 8.0),)}
# Whole processes: who runs restic opens its repository each time.
INCREMENTAL_TIMES = dict(zip(COUNTS, ({"rclone": 4.0, "restic": 10.0}, {"rclone": 50.0, "restic": 8.0}), strict=True))
NO_CHANGE_MS = 40
P99_TIMES_MAX = 1.3
# Two cores that are shared with the server cannot be twice as fast as one that is not: what is ours is the CPU time.
SPARK_CPU_MS_MAX = 2.2
LOAD_TIMES = 3.1
READ_TIMES = dict(zip(READ_MB, (1.0, 1.2, 1.5), strict=True))
START_CPU_S_MAX = dict(zip(STARTS, (0.13, 0.18), strict=True))


class Row(NamedTuple):
    """One line: a work, one rival, and how many times longer that one took."""

    work: str
    goal: str
    ours: str = ""
    rival: str = ""
    ratio: str = ""
    verdict: str = NOT_MEASURED
    source: Outcome | None = None
    # The time of who does no more than the work needs, in the same run.
    bound: str = ""


class MemoryRow(NamedTuple):
    """What one step of ours held, beside the rule."""

    work: str
    step: str
    contestant: str
    held: Memory


# By work, or by work and target where trees go both to disk and to memory.
Newest = Mapping[tuple[str, str], Outcome]


def wall_s(sample: Sample) -> float:
    """Of the work itself."""
    return sample.work_s


def _process_s(sample: Sample) -> float:
    return sample.wall_s


def durable_s(sample: Sample) -> float:
    """With the sync."""
    return sample.durable_s


def cpu_s(sample: Sample) -> float:
    """Of the client; all have the same bytes."""
    return sample.cpu_s


def all_rows(newest: Newest) -> list[Row]:
    """Every line, in the order of the goals."""
    on_disk = (row for work in LARGE for row in _large_to_disk(work, newest.get((work, "disk"))))
    in_memory = (row for work in LARGE for row in _large_to_tmpfs(work, newest.get((work, "tmpfs"))))
    return [
        *on_disk,
        *in_memory,
        *_small(_any(newest, "small")),
        *_incremental(_any(newest, "incremental")),
        *_present(_any(newest, "present")),
        _stores(_any(newest, "stores")),
        _hanging(_any(newest, "hanging")),
        *_replay(_any(newest, "replay")),
        *_spark(_any(newest, "spark")),
        _load(_any(newest, "load")),
        *_read(_any(newest, "read")),
        *_start(_any(newest, "start")),
        _memory(newest),
    ]


def memory_rows(newest: Newest) -> list[MemoryRow]:
    """Of every step of ours that was measured."""
    rows = []
    for (work, _), outcome in sorted(newest.items()):
        for step in outcome.steps():
            for name in outcome.contestants:
                held = memory(outcome.of(step, name), outcome.in_flight_bytes) if name.startswith(OURS) else None
                if held is not None:
                    rows.append(MemoryRow(work, step, name, held))
    return rows


def charted(newest: Newest) -> list[Panel]:
    """Return what the README shows, as far as it was measured."""
    found = []
    for (work, step), label in CHARTED.items():
        outcome = newest.get((work, "tmpfs"))
        if outcome is None or not good(outcome.of(step, OURS)):
            continue
        # An increment is a process of its own each time.
        key = _process_s if work == "incremental" else wall_s
        ratios = {name: times(outcome, step, name, key) for name in PROGRAMS}
        texts = {name: _times_text(one) for name, one in ratios.items() if one is not None}
        took = {name: _median_s(outcome, step, name, key) for name in (OURS, *texts)}
        found.append(Panel(label, took, texts))
    return found


def _times_text(found: Ratio) -> str:
    """Say how many times as long as ours a rival took: "3.3x", with an "≈" where neither is ahead."""
    return f"{'≈ ' if found.equal else ''}{float(f'{found.quartiles.median:.2g}'):g}x"


def peers_of(outcome: Outcome, step: str) -> list[str]:
    """Everybody but ours and the limit."""
    names = dict.fromkeys(sample.contestant for sample in outcome.samples if sample.step == step)
    return [name for name in names if not name.startswith(OURS) and name != REFERENCE]


def times(outcome: Outcome, step: str, name: str, key: Key = wall_s, ours: str = OURS) -> Ratio | None:
    """How many times longer somebody took than we did."""
    return ratio(outcome.of(step, ours), outcome.of(step, name), key)


def _any(newest: Newest, work: str) -> Outcome | None:
    found = [outcome for (name, _), outcome in newest.items() if name == work]
    return max(found, key=lambda outcome: outcome.began_at, default=None)


def _median_s(outcome: Outcome, step: str, name: str, key: Key) -> float:
    return quartiles([key(sample) for sample in good(outcome.of(step, name))]).median


def _seconds(outcome: Outcome, step: str, name: str, key: Key = wall_s) -> str:
    return f"{_median_s(outcome, step, name, key):.3g} s" if good(outcome.of(step, name)) else "failed"


def _text(found: Ratio | None) -> str:
    if found is None:
        return "failed"
    return f"{found.quartiles.median:.2f}{' =' if found.equal else ''}"


def _at_least(found: Sequence[Ratio | None], wanted: float) -> str:
    """All of those that ended well; with none there is nothing to say."""
    known = [one.quartiles.median for one in found if one is not None]
    if not known:
        return NOT_MEASURED
    return REACHED if min(known) >= wanted else MISSED


def _large_to_disk(work: str, outcome: Outcome | None) -> Iterator[Row]:
    label, goal = f"full restore to disk, {LARGE[work]}", "at least 0.9 of the reference copier"
    if outcome is None:
        yield Row(label, goal)
        return
    yield _row(outcome, DOWN, (label, goal), REFERENCE, 0.9)


def _large_to_tmpfs(work: str, outcome: Outcome | None) -> Iterator[Row]:
    label = f"full restore to tmpfs, {LARGE[work]}"
    rivals: tuple[tuple[str, str, Key, float], ...] = (
        ("at least 0.85 of the reference copier", REFERENCE, wall_s, 0.85),
        ("at least 1.2 times s5cmd and b3sum, wall time", S5CMD_HASHED, wall_s, 1.2),
        ("at least 1.2 times s5cmd and b3sum, client CPU", S5CMD_HASHED, cpu_s, 1.2),
        ("at least 0.95 of s5cmd alone, wall time", "s5cmd", wall_s, 0.95),
        ("within 10 % of the reference copier with the same hash", HASHING_REFERENCE, wall_s, 1 / 1.1),
    )
    for goal, rival, key, wanted in rivals:
        if outcome is None or not outcome.of(DOWN, rival):
            yield Row(label, goal)
        else:
            yield _row(outcome, DOWN, (label, goal), rival, wanted, key)


def _row(
    outcome: Outcome, step: str, work: tuple[str, str], rival: str, wanted: float, key: Key = wall_s, ours: str = OURS
) -> Row:
    """Hold ours against a rival in one step: `work` is the row's and its goal."""
    found = times(outcome, step, rival, key, ours)
    took = _seconds(outcome, step, ours, key)
    return Row(*work, took, rival, _text(found), _at_least([found], wanted), outcome, _bound(outcome, step, key))


def _bound(outcome: Outcome, step: str, key: Key) -> str:
    """Show the time of the contestant that does no more than a step needs: it hashes as we do, if one of them does."""
    limit = next((name for name in (HASHING_REFERENCE, REFERENCE, READING) if good(outcome.of(step, name))), None)
    return f"{_seconds(outcome, step, limit, key)}, {limit}" if limit else ""


def _small(outcome: Outcome | None) -> Iterator[Row]:
    for text, step, key, wanted in (
        ("upload", UP, wall_s, 2.0),
        ("restore", DOWN, wall_s, 1.5),
        ("restore with the sync", DOWN, durable_s, 1.5),
    ):
        label, goal = f"2,000 files of 64 KiB, {text}", f"at least {wanted:g} times the fastest peer"
        if outcome is None:
            yield Row(label, goal)
            continue
        found = {name: times(outcome, step, name, key) for name in peers_of(outcome, step)}
        known = {name: one.quartiles.median for name, one in found.items() if one is not None}
        if not known:
            yield Row(label, goal)
            continue
        row = _row(outcome, step, (label, goal), min(known, key=lambda name: known[name]), wanted, key)
        # The limits ask once for each file, which nobody has to.
        yield row._replace(bound="")


def _incremental(outcome: Outcome | None) -> Iterator[Row]:
    for count in COUNTS:
        step = changed(count)
        for rival, wanted in INCREMENTAL_TIMES[count].items():
            work = f"incremental, {step}", f"at least {wanted:g} times {rival}, a process each time"
            if outcome is None or not outcome.of(step, OURS) or not outcome.of(step, rival):
                yield Row(*work)
            else:
                yield _row(outcome, step, work, rival, wanted, _process_s)
    few, many = (outcome.requests_of(changed(count), OURS) if outcome else None for count in COUNTS)
    label = f"incremental, requests for {COUNTS[1]:,} files"
    goal = f"at most {REQUESTS_TIMES_MAX} times those for {COUNTS[0]:,}"
    if outcome is None or few is None or many is None:
        yield Row(label, goal)
    else:
        verdict = REACHED if many.total <= REQUESTS_TIMES_MAX * few.total else MISSED
        ratio_ = f"{many.total / few.total:.2f}"
        yield Row(label, goal, f"{many.total}", f"ours, {COUNTS[0]:,} files", ratio_, verdict, outcome)
    looks = good(outcome.of(LOOK, OURS)) if outcome else []
    label, goal = f"{LOOK}, warm", f"under {NO_CHANGE_MS} ms"
    if outcome is None or not looks:
        yield Row(label, goal)
        return
    took_ms = quartiles([sample.work_s for sample in looks]).median * 1000
    found = _text(times(outcome, LOOK, SAMZA))
    yield Row(label, goal, f"{took_ms:.0f} ms", SAMZA, found, REACHED if took_ms < NO_CHANGE_MS else MISSED, outcome)


def _present(outcome: Outcome | None) -> Iterator[Row]:
    for name, wanted in PRESENT_TIMES.items():
        step = step_of(SHAPES[name])
        for contestant, least in wanted:
            how = "trusted by stat" if contestant == TRUSTED else "verified by hash"
            work = f"restore onto 90 % present, {step}, {how}", f"at least {least:g} times a full one"
            if outcome is None or times(outcome, step, OURS, ours=contestant) is None:
                yield Row(*work)
                continue
            row = _row(outcome, step, work, OURS, least, ours=contestant)
            yield row._replace(rival="ours, a full one", bound=row.bound if contestant == VERIFIED else "")


def _stores(outcome: Outcome | None) -> Row:
    row = Row("commit of 256 stores", "one conditional PUT and one LIST after the index PUTs")
    asked = outcome.requests_of(COMMIT, OURS) if outcome else None
    if outcome is None or asked is None:
        return row
    verdict = REACHED if is_as_wanted(asked.counts) else MISSED
    return row._replace(ours=_seconds(outcome, COMMIT, OURS), verdict=verdict, source=outcome)


def _hanging(outcome: Outcome | None) -> Row:
    row = Row("1 % of requests hang for 2 s", f"p99 within {P99_TIMES_MAX} times the fault-free run")
    found = [good(outcome.of(HANGING_STEP, name)) if outcome else [] for name in (HANGING, OURS)]
    if outcome is None or not all(found):
        return row
    hanging_s, calm_s = (percentile([sample.work_s for sample in samples], 99) for samples in found)
    verdict = REACHED if hanging_s <= P99_TIMES_MAX * calm_s else MISSED
    rival, times_ = f"ours without, {len(found[0])} restores each", f"1 / {hanging_s / calm_s:.2f}"
    return row._replace(ours=f"p99 {hanging_s:.3g} s", rival=rival, ratio=times_, verdict=verdict, source=outcome)


def _replay(outcome: Outcome | None) -> Iterator[Row]:
    for value_bytes in bench_replay.VALUES_BYTES:
        for overwrites in bench_replay.OVERWRITES:
            step = bench_replay.label_of(value_bytes, overwrites)
            work = f"blob restore against replay, {step}", "the curve"
            if outcome is None or not outcome.of(step, OURS):
                yield Row(*work)
                continue
            for rival in (bench_replay.ONE, bench_replay.BATCHED):
                yield _row(outcome, step, work, rival, 0)._replace(verdict=NO_GOAL)


def _spark(outcome: Outcome | None) -> Iterator[Row]:
    for step in SPARK_STEPS:
        goal = f"client CPU at most {SPARK_CPU_MS_MAX} ms a file"
        row = Row(f"Spark, 64 stores, 20 ms per request, {step}", goal)
        samples = good(outcome.of(step, TWO)) if outcome else []
        if outcome is None or not samples:
            yield row
            continue
        took_ms = quartiles([s.cpu_s / s.files_count * 1000 for s in samples]).median
        yield row._replace(
            ours=f"{took_ms:.2f} ms a file, {_seconds(outcome, step, TWO)}",
            rival=ONE,
            ratio=_text(times(outcome, step, ONE, ours=TWO)),
            verdict=REACHED if took_ms <= SPARK_CPU_MS_MAX else MISSED,
            source=outcome,
        )


def _load(outcome: Outcome | None) -> Row:
    work = "Spark state of 1.2 GB, 10 changelogs, opened", f"at least {LOAD_TIMES:g} times {SPARK_LOAD}"
    return _row(outcome, "load", work, SPARK_LOAD, LOAD_TIMES) if outcome else Row(*work)


def _read(outcome: Outcome | None) -> Iterator[Row]:
    for state_mb, wanted in READ_TIMES.items():
        work = f"{read_step(state_mb)} as a DataFrame", f"at least {wanted:g} times {STATESTORE}"
        yield _row(outcome, read_step(state_mb), work, STATESTORE, wanted) if outcome else Row(*work)


def _start(outcome: Outcome | None) -> Iterator[Row]:
    for step, most_s in START_CPU_S_MAX.items():
        row = Row(f"`tidemark {step}`, a whole process", f"client CPU at most {most_s:g} s")
        samples = good(outcome.of(step, OURS)) if outcome else []
        if outcome is None or not samples:
            yield row
            continue
        took_s = quartiles([sample.cpu_s for sample in samples]).median
        yield row._replace(
            ours=f"{took_s:.3f} s",
            rival=BARE,
            ratio=_text(times(outcome, step, BARE, cpu_s)),
            verdict=REACHED if took_s <= most_s else MISSED,
            source=outcome,
            bound=f"{_seconds(outcome, step, BARE, cpu_s)}, {BARE}",
        )


def _memory(newest: Newest) -> Row:
    row = Row("memory over idle, in all of these", "128 MiB, the bytes in flight, 3 KiB for each file")
    held = memory_rows(newest)
    if not held:
        return row
    worst = max(held, key=lambda one: one.held.over_idle_bytes / one.held.allowed_bytes)
    over_idle, allowed, _ = memory_text(worst.held)
    verdict = REACHED if all(memory_text(one.held)[2] == REACHED for one in held) else MISSED
    return row._replace(ours=f"{over_idle} MiB, {worst.work}", verdict=verdict, bound=f"{allowed} MiB")


def memory_text(held: Memory) -> tuple[str, str, str]:
    """Over idle, allowed, and whether it is within."""
    verdict = REACHED if held.over_idle_bytes <= held.allowed_bytes else MISSED
    return f"{held.over_idle_bytes / MIB:.0f}", f"{held.allowed_bytes / MIB:.0f}", verdict
