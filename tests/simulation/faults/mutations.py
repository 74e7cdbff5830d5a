"""Remove each rule of design 0002 or turn it round, and show what catches it.

A mutation is a patch of the engine. It is caught by an interleaving (`scenarios/interleavings.py`) that ends as it
should with the real code and with the mutated one in the error that the mutation names; the seed is that of the first
run that shows it. Beside that is the first schedule of the campaign (`scenarios/random_schedules.py`) that does, where
one of the first two hundred does.

Run as `python -m tests.simulation.faults.mutations [NAME ...]` for the table of design 0007.
"""

import functools
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.simulation.faults import mutations_of_collection, mutations_of_commits, mutations_of_files
from tests.simulation.faults.mutation import MUTATIONS
from tests.simulation.scenarios.interleavings import run_interleaving
from tests.simulation.scenarios.random_schedules import make_schedule
from tests.simulation.simulate import simulate

__all__ = [
    "MUTATIONS",
    "catch",
    "catch_by_schedules",
    "mutations_of_collection",
    "mutations_of_commits",
    "mutations_of_files",
    "place",
]

SEEDS: Final = range(20)
# This many schedules of the campaign are tried for the table.
SCHEDULES: Final = range(200)
# The rules' families in the order of design 0002.
_FAMILIES: Final = "KCTDPISU"


class Caught(msgspec.Struct, frozen=True, kw_only=True):
    """How a mutation showed."""

    seed: int
    error: str


def catch(name: str, directory: Path, *, seeds: Iterable[int] = SEEDS) -> Caught | None:
    """The first seed with which its interleaving shows a mutation; None if none does.

    Raises:
        AssertionError: It ends with another error: the code that is patched has changed, or the interleaving.
    """
    shown = MUTATIONS[name]
    with shown.patch():
        for seed in seeds:
            try:
                run_interleaving(shown.interleaving, seed, directory / f"{shown.interleaving}-{seed}")
            except Exception as error:
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                if shown.shows not in text:
                    raise AssertionError(f"{name} does not show {shown.shows!r} but {text!r}") from error
                return Caught(seed=seed, error=text)
    return None


def catch_by_schedules(name: str, *, seeds: Iterable[int] = SCHEDULES) -> Caught | None:
    """The first schedule of the campaign that shows a mutation; None if none does."""
    for seed in seeds:
        # With the real code first: what a schedule begins with is built once, and not by a mutation.
        if not _ends_well(seed):
            continue
        with MUTATIONS[name].patch():
            found = simulate(make_schedule(seed)).violations
        if found:
            return Caught(seed=seed, error=found[0].partition("\n")[0])
    return None


@functools.cache
def _ends_well(seed: int) -> bool:
    return not simulate(make_schedule(seed)).violations


def place(name: str) -> tuple[int, int]:
    """The place of a mutation in the table: that of its rule in design 0002."""
    rule = MUTATIONS[name].rule
    return _FAMILIES.index(rule[0]), int(rule[1:])


def main(names: Sequence[str]) -> int:
    """Print the table, for all mutations or for those named."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    sys.stdout.write("| rule | mutation | caught by | seed | schedule |\n|---|---|---|---|---|\n")
    missed = 0
    for name in names or sorted(MUTATIONS, key=place):
        shown = MUTATIONS[name]
        with tempfile.TemporaryDirectory(prefix="tidemark-", dir=base) as directory:
            caught = catch(name, Path(directory))
        scheduled = catch_by_schedules(name)
        missed += caught is None
        sys.stdout.write(
            f"| {shown.rule} | {shown.what} | {shown.interleaving.replace('_', ' ')} | "
            f"{caught.seed if caught else 'NOT CAUGHT'} | {scheduled.seed if scheduled else '-'} |\n"
        )
        if names:
            sys.stdout.write(f"  {caught and caught.error[:300]}\n  {scheduled and scheduled.error[:300]}\n")
        sys.stdout.flush()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
