"""Several awaitables at once: what a failure, a cancellation and a deadline around them leave (Python 3.11)."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from blobstore.concurrency import both, run_all

Work = Callable[[int], Awaitable[None]]


async def of_run_all(work: Work) -> None:
    await run_all(work, [0, 1])


async def of_both(work: Work) -> None:
    await both(work(0), work(1))


ways = pytest.mark.parametrize("call", [of_run_all, of_both])


@ways
async def test_a_cancellation_while_one_fails_is_a_cancellation(call: Callable[[Work], Awaitable[Any]]) -> None:
    is_ending = asyncio.Event()

    async def work(number: int) -> None:
        if number == 0:
            await asyncio.sleep(0)
            raise OSError("full")
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await asyncio.sleep(0.01)

    task = asyncio.ensure_future(call(work))
    await is_ending.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


@ways
async def test_a_deadline_after_a_failure_is_a_deadline(call: Callable[[Work], Awaitable[Any]]) -> None:
    async def work(number: int) -> None:
        await asyncio.sleep(0)
        raise OSError(number)

    async def bounded() -> None:
        async with asyncio.timeout(0.01):
            with pytest.raises(OSError, match="0"):
                await call(work)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await bounded()


@ways
async def test_work_that_ends_as_cancelled_is_not_done(call: Callable[[Work], Awaitable[Any]]) -> None:
    async def work(number: int) -> None:
        if number == 1:
            raise asyncio.CancelledError
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await call(work)


@ways
async def test_an_error_of_cleaning_up_does_not_hide_a_cancellation(call: Callable[[Work], Awaitable[Any]]) -> None:
    async def work(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError(number)

    task = asyncio.ensure_future(call(work))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
