import pytest

from blobstore.wrappers.retry import RetryBudget


def test_the_reserve_is_there_at_first_and_no_more() -> None:
    budget = RetryBudget(3, 5)
    assert [budget.take() for _ in range(5)] == [True, True, True, False, False]


@pytest.mark.parametrize("successes,retries", [(0, 0), (4, 0), (5, 1), (9, 1), (10, 2), (1000, 3)])
def test_successes_pay_for_retries_up_to_the_reserve(successes: int, retries: int) -> None:
    budget = RetryBudget(3, 5)
    while budget.take():
        pass
    for _ in range(successes):
        budget.refill()
    assert [budget.take() for _ in range(retries + 1)] == [True] * retries + [False]


def test_without_a_reserve_there_are_no_retries() -> None:
    budget = RetryBudget(0, 5)
    for _ in range(100):
        budget.refill()
    assert not budget.take()
