"""A condition that is read anew now and then."""

from engine.metrics.samples import Samples
from engine.metrics.watching import Watched


class World:
    """A clock, and a repository that can be out of reach."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.readings = 0
        self.is_down = False
        self.told: list[str] = []
        self.watched = Watched(
            self.read, lambda: self.now_s, every_s=60, tell=lambda error: self.told.append(str(error))
        )

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


def test_it_is_read_when_somebody_asks_and_not_more_often_than_said() -> None:
    world = World()
    assert world.readings == 0
    assert world.values() == {"repository_up": 1, "repository_bytes": 1}
    world.now_s = 59.9
    assert world.values()["repository_bytes"] == 1
    world.now_s = 60
    assert world.values()["repository_bytes"] == 2
    assert world.readings == 2


def test_a_reading_that_fails_leaves_the_last_one_and_says_so() -> None:
    world = World()
    world.values()
    world.is_down, world.now_s = True, 60
    assert world.values() == {"repository_up": 0, "repository_bytes": 1}
    world.now_s = 100
    world.values()
    assert (world.readings, world.told) == (2, ["no route"])
    world.is_down, world.now_s = False, 120
    assert world.values() == {"repository_up": 1, "repository_bytes": 3}


def test_one_that_never_went_well_says_that_alone() -> None:
    world = World()
    world.is_down = True
    assert world.values() == {"repository_up": 0}
