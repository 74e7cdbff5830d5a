"""Nothing that Spark needs is collected, in whatever order it does its steps (design 0014)."""

from collections import Counter

import pytest

from tests.simulation.scenarios.spark_steps import Schedule


def campaign(seeds: range, **rules: bool) -> tuple[list[tuple[int, list[str]]], Counter[str]]:
    failures, taken = [], Counter[str]()
    for seed in seeds:
        schedule = Schedule(seed, rules=rules)
        if lost := schedule.run():
            failures.append((seed, lost))
        taken.update(each.reason for each in schedule.taken)
    return failures, taken


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(100_000), marks=pytest.mark.soak)])
def test_nothing_that_is_needed_is_taken(seeds: range) -> None:
    failures, taken = campaign(seeds)
    assert failures == []
    assert all(taken[reason] > len(seeds) // 20 for reason in ("lost attempt", "orphan", "dead operator")), taken


def test_what_is_assumed_is_needed() -> None:
    """An upload that takes longer than the age is what an orphan is taken for (proof 2)."""
    failures, _ = campaign(range(200), **{"uploads take days": True})
    assert failures


@pytest.mark.soak
def test_a_rule_that_is_broken_is_found() -> None:
    failures, _ = campaign(range(3_000), **{"no age": True})
    assert failures
