"""Each interleaving ends as it should, and otherwise where its rule of design 0002 is broken."""

from pathlib import Path

import pytest

from tests.simulation.faults.mutations import MUTATIONS, catch, place
from tests.simulation.scenarios.interleavings import INTERLEAVINGS, run_interleaving

# Every rule of the protocol that something can be done to.
RULES = "K2 K3 C1 C2 C3 C4 C5 C7 T1 T2 T3 T4 D1 D2 D3 D4 D5 D8 D9 D11 D12 P1 P2 I1 I2 I3 I4 S1 S2 U2 U3 U4 U5"
SEEDS = [pytest.param(range(1), id="one"), pytest.param(range(20), id="many", marks=pytest.mark.soak)]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
def test_an_interleaving_ends_well(interleaving: str, seeds: range, fast_directory: Path) -> None:
    for seed in seeds:
        run_interleaving(interleaving, seed, fast_directory / str(seed))


def test_an_interleaving_is_the_same_for_the_same_seed(fast_directory: Path) -> None:
    name = "a_fork_between_the_two_readings_is_kept"
    first, again, other = (run_interleaving(name, seed, fast_directory / "run") for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_caught(name: str, fast_directory: Path) -> None:
    assert catch(name, fast_directory) is not None


def test_every_rule_is_broken_somehow() -> None:
    in_order = (MUTATIONS[name].rule for name in sorted(MUTATIONS, key=place))
    assert list(dict.fromkeys(in_order)) == RULES.split()
