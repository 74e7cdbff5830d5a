import asyncio
from random import Random

import pytest

from blobstore.errors import InvalidRequestError
from blobstore.wrappers.forwarding import InFlightLimit
from tests.simulation.model.virtual_loop import run_jumping


async def hold(limit: InFlightLimit, seconds_s: float = 1e6) -> None:
    async with limit.hold():
        await asyncio.sleep(seconds_s)


async def held(limit: InFlightLimit, count: int) -> list[asyncio.Task[None]]:
    """The number that hold a slot, or wait for one."""
    tasks = [asyncio.create_task(hold(limit)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_limit_lets_something_through() -> None:
    with pytest.raises(InvalidRequestError):
        InFlightLimit(0)


@pytest.mark.parametrize(
    "under_way,asks,allowed",
    [
        pytest.param(16, 1, 8, id="half"),
        pytest.param(16, 16, 8, id="all that are under way are one piece of news"),
        pytest.param(5, 1, 8, id="one of a few"),
        pytest.param(5, 5, 4, id="no further than below what is under way"),
        pytest.param(1, 5, 1, id="never below one"),
        pytest.param(16, 0, 16, id="nobody asked"),
    ],
)
async def test_the_limit_halves_once_for_all_that_are_refused_together(under_way: int, asks: int, allowed: int) -> None:
    limit = InFlightLimit(16)
    tasks = await held(limit, under_way)
    for _ in range(asks):
        limit.shrink()
    assert limit.allowed == allowed
    await cancel(*tasks)


async def test_it_halves_again_once_the_last_halving_is_in_force() -> None:
    limit = InFlightLimit(16)
    tasks = await held(limit, 16)
    seen = []
    for left in range(16, 0, -1):
        limit.shrink()
        seen.append(limit.allowed)
        await cancel(tasks[left - 1])
    assert seen == [8] * 8 + [4] * 4 + [2] * 2 + [1] * 2


async def test_as_many_successes_as_are_allowed_at_most_add_one() -> None:
    limit = InFlightLimit(4)
    tasks = await held(limit, 4)
    limit.shrink()
    await cancel(*tasks)
    assert limit.allowed == 2
    seen = []
    for _ in range(9):
        limit.grow()
        seen.append(limit.allowed)
    assert seen == [2, 2, 2, 3, 3, 3, 3, 4, 4]


async def test_what_was_sent_before_the_halving_does_not_undo_it() -> None:
    limit = InFlightLimit(16)
    tasks = await held(limit, 16)
    limit.shrink()
    for left in range(16, 8, -1):
        for _ in range(16):
            limit.grow()
        await cancel(tasks[left - 1])
    assert limit.allowed == 8
    await cancel(*tasks)


async def test_those_that_are_too_many_are_not_replaced() -> None:
    limit = InFlightLimit(4)
    tasks = await held(limit, 10)
    assert limit.under_way == 4
    limit.shrink()
    seen = []
    for task in tasks[:4]:
        await cancel(task)
        await asyncio.sleep(0)
        seen.append(limit.under_way)
    assert seen == [3, 2, 2, 2]
    await cancel(*tasks)
    assert limit.under_way == 0


async def test_who_waits_and_is_closed_takes_no_slot() -> None:
    limit = InFlightLimit(1)
    (task,) = await held(limit, 1)
    waiting = hold(limit)
    waiting.send(None)
    waiting.close()
    await cancel(task)
    await asyncio.wait_for(hold(limit, 0), 1)
    assert limit.under_way == 0


async def test_a_greater_limit_lets_in_who_waits() -> None:
    limit = InFlightLimit(2)
    tasks = await held(limit, 2)
    limit.shrink()
    await cancel(tasks[0])
    tasks += await held(limit, 2)
    assert limit.under_way == 1
    limit.grow()
    limit.grow()
    assert (limit.allowed, limit.under_way) == (2, 2)
    await cancel(*tasks)


async def test_slots_are_given_in_order() -> None:
    limit = InFlightLimit(1)
    order: list[int] = []

    async def enter(number: int) -> None:
        async with limit.hold():
            order.append(number)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(enter(number))
            await asyncio.sleep(0)
    assert order == list(range(10))


async def test_who_is_cancelled_in_the_queue_is_passed_over() -> None:
    limit = InFlightLimit(1)
    first, second, third = await held(limit, 3)
    await cancel(second)
    await cancel(first)
    assert limit.under_way == 1
    await cancel(third)
    assert limit.under_way == 0


@pytest.mark.parametrize("slot_first", [True, False])
async def test_a_slot_that_comes_together_with_a_cancellation_is_not_lost(slot_first: bool) -> None:
    limit = InFlightLimit(1)
    leaves = asyncio.Event()

    async def leave() -> None:
        async with limit.hold():
            await leaves.wait()

    holding = asyncio.create_task(leave())
    await asyncio.sleep(0)
    waiting, last = await held(limit, 2)
    leaves.set()
    if slot_first:
        await holding
        assert limit.under_way == 1  # it is waiting's, who does not know it yet
    waiting.cancel()
    await asyncio.wait([waiting, holding])
    assert waiting.cancelled()
    await asyncio.sleep(0)
    assert limit.under_way == 1
    await cancel(last)
    assert limit.under_way == 0


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_events_no_slot_is_lost_and_none_is_given_twice(seed: int) -> None:
    random = Random(seed)

    async def main() -> InFlightLimit:
        limit, inside = InFlightLimit(5), 0

        async def one() -> None:
            nonlocal inside
            async with limit.hold():
                inside += 1
                assert inside == limit.under_way or inside < limit.under_way <= 5
                try:
                    await asyncio.sleep(random.choice([0, 1, 2]))
                    random.choice([limit.shrink, limit.grow, limit.grow])()
                finally:
                    inside -= 1

        tasks = []
        for _ in range(300):
            tasks.append(asyncio.create_task(one()))
            if random.random() < 0.4:
                await asyncio.sleep(random.choice([0, 0, 1]))
            if random.random() < 0.4:
                random.choice(tasks).cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(answer) for answer in answers} <= {type(None), asyncio.CancelledError}
        assert sum(answer is None for answer in answers) > 100
        return limit

    limit, _ = run_jumping(main())
    assert limit.under_way == 0
