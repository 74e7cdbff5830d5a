"""Run seeded schedules on all cores and count the rare moments they met: `make simulate SEED=1 RUNS=100000`.

```
python -m tests.simulation.campaign --seed 1 --runs 100000 --processes 2     a campaign: seeds 1 to 100000
python -m tests.simulation.campaign --seed 4711 --runs 1 --history           one schedule, and its history
python -m tests.simulation.campaign --replay FILE                            a schedule that was written down
```

Ends with 1 after a violation, which it reports with its seed and the shortest schedule that still fails; with 2 if a
schedule has too few effects, or one of the moments was met less often than was asked for.
"""

import argparse
import gc
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

import msgspec

from tests.simulation.checks.coverage import Coverage
from tests.simulation.model.outcome import Outcome
from tests.simulation.scenarios.random_schedules import EFFECTS_MIN, make_schedule
from tests.simulation.scenarios.schedule import Schedule, decode_schedule, encode_schedule, show_schedule
from tests.simulation.shrink import code_of, shrink
from tests.simulation.simulate import simulate

BATCH: Final = 100
# Schedules after which garbage is collected.
COLLECTED_EVERY: Final = 5
# Enough to see what is wrong.
FAILURES_MAX: Final = 5


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What some schedules have come to."""

    runs: int
    moments: dict[str, int]
    effects: int
    effects_min: int
    # Seeds of schedules that have fewer effects than they should.
    too_short: tuple[int, ...]
    requests: int
    cpu_s: float
    # Seed, and what is wrong.
    failures: tuple[tuple[int, tuple[str, ...]], ...]


class Figures(msgspec.Struct, kw_only=True):
    """What a campaign has come to."""

    runs: int = 0
    effects: int = 0
    effects_min: int = sys.maxsize
    too_short: list[int] = []
    requests: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    failures: list[tuple[int, tuple[str, ...]]] = []

    def add(self, batch: Batch) -> None:
        """Add some schedules."""
        self.runs += batch.runs
        self.effects += batch.effects
        self.effects_min = min(self.effects_min, batch.effects_min)
        self.too_short += batch.too_short
        self.requests += batch.requests
        self.cpu_s += batch.cpu_s
        self.failures += batch.failures

    def line(self) -> str:
        """The figures in one line."""
        return (
            f"{self.runs:,} schedules, {self.effects / max(1, self.runs):.0f} effects each (at least "
            f"{self.effects_min}), {self.requests:,} requests, {self.wall_s:.0f} s, "
            f"{self.cpu_s * 1000 / max(1, self.runs):.1f} ms of CPU each, {len(self.failures)} violations"
        )


def run_batch(seeds: range) -> Batch:
    """Simulate the schedules of some seeds, one after the other."""
    coverage = Coverage()
    effects: dict[int, int] = {}
    requests = 0
    failures: list[tuple[int, tuple[str, ...]]] = []
    began_s = time.process_time()
    # Collected between schedules alone: the moment at which a cycle goes depends on nothing but the seed.
    gc.disable()
    for at, seed in enumerate(seeds):
        if at % COLLECTED_EVERY == 0:
            gc.collect()
            # What is left are things remembered, which go by themselves: nobody looks at them again.
            gc.freeze()
        outcome = simulate(make_schedule(seed), coverage)
        effects[seed] = outcome.effects + outcome.file_effects
        requests += outcome.requests
        if outcome.violations:
            failures.append((seed, outcome.violations))
    gc.enable()
    gc.unfreeze()
    return Batch(
        runs=len(seeds),
        moments={str(moment): count for moment, count in coverage.counts.items()},
        effects=sum(effects.values()),
        effects_min=min(effects.values()),
        too_short=tuple(seed for seed, count in effects.items() if count < EFFECTS_MIN),
        requests=requests,
        cpu_s=time.process_time() - began_s,
        failures=tuple(failures),
    )


def run_campaign(seed: int, runs: int, *, processes: int, out: TextIO) -> tuple[Figures, Coverage]:
    """Simulate the schedules of `runs` seeds from `seed` on."""
    figures, coverage = Figures(), Coverage()
    seeds = [range(first, min(first + BATCH, seed + runs)) for first in range(seed, seed + runs, BATCH)]
    began_s = shown_at_s = time.monotonic()
    for batch in _batches(seeds, processes):
        figures.add(batch)
        coverage.add(batch.moments)
        figures.wall_s = time.monotonic() - began_s
        if time.monotonic() - shown_at_s > 30:
            shown_at_s = time.monotonic()
            print(figures.line(), file=out, flush=True)
        if len(figures.failures) >= FAILURES_MAX:
            break
    return figures, coverage


def _batches(seeds: list[range], processes: int) -> Iterator[Batch]:
    if processes == 1:
        yield from map(run_batch, seeds)
        return
    # Each begins afresh: nothing of this process, such as an event loop, comes along.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(run_batch, seeds)


def print_failure(schedule: Schedule, outcome: Outcome, out: TextIO) -> None:
    """Print what is wrong, and the shortest schedule that still is."""
    print(f"\nVIOLATION, seed {schedule.seed}:", *outcome.violations[:5], sep="\n  ", file=out)
    code = code_of(outcome.violations[0]) if outcome.violations else ""

    def fails(shorter: Schedule) -> bool:
        return any(code_of(violation) == code for violation in simulate(shorter).violations)

    if not fails(schedule):
        print("it does not fail once more by itself: run the seeds before it too, in one process", file=out)
        return
    shortest = shrink(schedule, fails)
    again = simulate(shortest, keep_history=True)
    print("\nthe shortest schedule found:", show_schedule(shortest), sep="\n", file=out)
    print(*again.violations[:5], sep="\n  ", file=out)
    print("\nits history:", *again.history, sep="\n  ", file=out)
    print(f"\nto run it again: --replay FILE, with this line in it:\n{encode_schedule(shortest)}", file=out)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description="Simulate schedules and judge them (design 0007).")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--at-least", type=int, default=0, help="how often each moment has to be met")
    parser.add_argument("--history", action="store_true", help="print the history of the first schedule")
    parser.add_argument("--replay", type=Path, help="a file with a schedule, one line of JSON")
    options = parser.parse_args(arguments)
    out = sys.stdout
    if options.replay is not None or options.history:
        text = options.replay.read_text() if options.replay is not None else ""
        schedule = decode_schedule(text) if text else make_schedule(options.seed)
        outcome = simulate(schedule, keep_history=True)
        print(show_schedule(schedule), *outcome.history, *outcome.violations, sep="\n", file=out)
        return 1 if outcome.violations else 0
    figures, coverage = run_campaign(options.seed, options.runs, processes=options.processes, out=out)
    print(figures.line(), coverage.table(), sep="\n", file=out)
    if figures.failures:
        for seed, _ in sorted(figures.failures)[:1]:
            schedule = make_schedule(seed)
            print_failure(schedule, simulate(schedule), out)
        print("\nseeds that fail:", *(seed for seed, _ in sorted(figures.failures)), file=out)
        return 1
    if figures.too_short:
        print(f"seeds with less than {EFFECTS_MIN} effects:", *sorted(figures.too_short)[:20], file=out)
        return 2
    missing = coverage.missing(options.at_least)
    if missing:
        print(f"met less than {options.at_least} times:", *missing, sep="\n  ", file=out)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
