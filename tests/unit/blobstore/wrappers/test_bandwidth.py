"""A number of bytes per second, by a clock that the test moves."""

import asyncio

import pytest

from blobstore.wrappers.forwarding import BURST_S, PIECE_BYTES, Bandwidth, shared_bandwidth
from tests.simulation.model.virtual_loop import run_jumping

MIB = 1024 * 1024


def test_who_asks_first_is_let_through_first() -> None:
    line = Bandwidth(1000)
    assert line.reserve(1250, now_s=10.0) == pytest.approx(1.25 - BURST_S)
    assert line.reserve(500, now_s=10.0) == pytest.approx(1.75 - BURST_S)
    assert line.reserve(500, now_s=11.0) == pytest.approx(1.25 - BURST_S)


def test_time_in_which_nothing_was_moved_is_not_saved_up() -> None:
    line = Bandwidth(1000)
    line.reserve(1000, now_s=0.0)
    assert line.reserve(1000, now_s=1000.0) == pytest.approx(1.0 - BURST_S)


@pytest.mark.parametrize("readers", [1, 7])
def test_many_together_move_no_more_than_one(readers: int) -> None:
    async def move() -> float:
        line, clock = Bandwidth(MIB), asyncio.get_running_loop().time
        began_s = clock()
        await asyncio.gather(*(line.pass_through(28 * MIB // readers) for _ in range(readers)))
        return clock() - began_s

    assert run_jumping(move())[0] == pytest.approx(28 - BURST_S, abs=0.1)


def test_few_bytes_do_not_wait_behind_many_of_another() -> None:
    async def move() -> float:
        line, clock = Bandwidth(MIB), asyncio.get_running_loop().time
        many = asyncio.create_task(line.pass_through(60 * MIB))
        await asyncio.sleep(1)
        began_s = clock()
        await line.pass_through(1)
        waited_s = clock() - began_s
        many.cancel()
        return waited_s

    assert run_jumping(move())[0] < 0.2


def test_pieces_add_up() -> None:
    line = Bandwidth(PIECE_BYTES)
    assert list(line.waits_s(0, lambda: 0.0)) == []
    waits_s = [*line.waits_s(2 * PIECE_BYTES + 1, lambda: 0.0)]
    assert waits_s == pytest.approx([1 - BURST_S, 2 - BURST_S, 2 + 1 / PIECE_BYTES - BURST_S])


def test_a_process_has_one_line_for_one_limit() -> None:
    assert shared_bandwidth(123_456) is shared_bandwidth(123_456)
    assert shared_bandwidth(123_456) is not shared_bandwidth(123_457)
