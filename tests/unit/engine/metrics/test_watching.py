"""A condition that is read anew now and then, while others ask for it."""

import threading

import pytest

from engine.metrics import watching
from engine.metrics.samples import Samples
from engine.metrics.watching import Watched


class World:
    """A repository that can be out of reach."""

    def __init__(self) -> None:
        self.readings = 0
        self.is_down = False
        self.told: list[str] = []
        self.watched = Watched(self.read, every_s=3600, tell=lambda error: self.told.append(str(error)))

    def read(self) -> Samples:
        self.readings += 1
        if self.is_down:
            raise ConnectionError("no route")
        samples = Samples()
        samples.add("repository_up", 1)
        samples.add("repository_bytes", self.readings)
        return samples

    def values(self) -> dict[str, float]:
        return {sample.name.removeprefix("tidemark_"): sample.value for sample in self.watched()}


def test_who_asks_gets_the_last_reading_and_causes_none() -> None:
    world = World()
    assert (world.values(), world.readings) == ({"repository_up": 0}, 0)
    world.watched.refresh()
    assert world.values() == world.values() == {"repository_up": 1, "repository_bytes": 1}
    world.watched.refresh()
    assert (world.values()["repository_bytes"], world.readings) == (2, 2)


def test_a_reading_that_fails_leaves_the_last_one_and_says_so() -> None:
    world = World()
    world.watched.refresh()
    world.is_down = True
    world.watched.refresh()
    assert world.values() == {"repository_up": 0, "repository_bytes": 1}
    assert world.told == ["no route"]
    world.is_down = False
    world.watched.refresh()
    assert world.values() == {"repository_up": 1, "repository_bytes": 3}


def test_one_that_never_went_well_says_that_alone() -> None:
    world = World()
    world.is_down = True
    world.watched.refresh()
    assert world.values() == {"repository_up": 0}


def test_a_reading_without_end_keeps_nobody_waiting() -> None:
    began, go_on = threading.Event(), threading.Event()

    def read() -> Samples:
        began.set()
        go_on.wait(30)
        return Samples()

    with Watched(read, every_s=3600, tell=lambda _: None) as watched:
        assert began.wait(30)
        assert [sample.value for sample in watched()] == [0]
        (thread,) = (thread for thread in threading.enumerate() if thread.name == watching.THREAD)
    assert thread.is_alive()
    go_on.set()
    thread.join(30)


def test_it_reads_by_itself_until_it_is_left_and_not_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watching.EVERY_S_MIN >= 1
    monkeypatch.setattr(watching, "EVERY_S_MIN", 0.001)
    read = threading.Semaphore(0)

    def reading() -> Samples:
        read.release()
        return Samples()

    with Watched(reading, every_s=0, tell=lambda _: None):
        assert all(read.acquire(timeout=30) for _ in range(3))
        (thread,) = (thread for thread in threading.enumerate() if thread.name == watching.THREAD)
    thread.join(30)
    assert not thread.is_alive()
