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
@pytest.mark.timeout(7200)
def test_nothing_that_is_needed_is_taken(seeds: range) -> None:
    failures, taken = campaign(seeds)
    assert failures == []
    assert taken["lost attempt"] > len(seeds)
    assert taken["dead operator"] > len(seeds) // 100
    assert set(taken) == {"lost attempt", "dead operator"}


def test_orphans_of_a_running_query_would_be_missed() -> None:
    """Why X4 asks that the query is stopped."""
    failures, _ = campaign(range(300), **{"orphans while it runs": True})
    assert failures
