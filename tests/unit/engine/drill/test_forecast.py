import itertools

import pytest

from engine.drill.drill import EXECUTORS, SIZES, Forecast, forecast
from tests.unit.engine.drill.builders import MIB, drill


def _one(size: int, executors: int, **changes: object) -> Forecast:
    return forecast(drill(**changes), sizes=(size,), executors=(executors,))[0]


def test_the_same_size_on_one_executor_is_what_was_measured() -> None:
    made = _one(1, 1)
    assert made.best_s == made.worst_s == pytest.approx(12.6)


def test_restoring_and_opening_grow_with_the_size_and_finding_does_not() -> None:
    assert _one(10, 1).best_s == pytest.approx(0.1 + 10 * (12 + 0.5))


def test_executors_share_all_but_finding_the_commit() -> None:
    assert _one(1, 4).best_s == pytest.approx(0.1 + (12 + 0.5) / 4)


def test_a_shared_store_gives_all_executors_no_more_bytes_than_one() -> None:
    assert _one(1, 4).worst_s == pytest.approx(0.1 + 12 + 0.5 / 4)
    assert _one(2, 8).worst_s == pytest.approx(0.1 + 2 * 12 + 2 * 0.5 / 8)


def test_no_executor_has_less_to_do_than_the_largest_store() -> None:
    assert _one(1, 16).best_s == pytest.approx(0.1 + (12 + 0.5) / 8)
    whole = _one(1, 16, largest_store_bytes=1000 * MIB, stores_count=1)
    assert whole.best_s == pytest.approx(12.6)


def test_more_executors_are_never_slower_and_worst_is_never_before_best() -> None:
    made = forecast(drill())
    assert [(f.size, f.executors) for f in made] == [(size, count) for size in SIZES for count in EXECUTORS]
    assert all(f.best_s <= f.worst_s for f in made)
    for before, after in itertools.pairwise(made):
        if before.size == after.size:
            assert after.best_s <= before.best_s
            assert after.worst_s <= before.worst_s


def test_an_empty_commit_has_a_forecast_too() -> None:
    assert _one(10, 16, size_bytes=0, largest_store_bytes=0, stores_count=0, restore_s=0).best_s > 0
