"""The server of `/metrics`, and the last reading that it serves."""

import contextlib
import socket
import urllib.request
from collections.abc import Iterator

import pytest

from engine.metrics.exposition import LastReading, serve
from engine.metrics.names import Samples


@contextlib.contextmanager
def serving(host: str) -> Iterator[tuple[str, int]]:
    """An endpoint at some port of an address."""
    samples = Samples()
    samples.add("repository_up", 1)
    server = serve(samples, host=host, port=0)
    try:
        yield host, server.server_port
    finally:
        server.shutdown()
        server.server_close()


def fetch(address: tuple[str, int]) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    with urllib.request.urlopen(f"http://{host}:{address[1]}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
        return text


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_answers(host: str) -> None:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine has no such address")
    with serving(host) as address:
        assert "\ntidemark_repository_up 1.0\n" in fetch(address)


class World:
    """A repository that can be out of reach."""

    def __init__(self) -> None:
        self.readings = 0
        self.is_down = False
        self.last = LastReading()

    def read(self) -> Samples:
        self.readings += 1
        if self.is_down:
            raise ConnectionError("no route")
        samples = Samples()
        samples.add("repository_up", 1)
        samples.add("repository_bytes", self.readings)
        return samples

    def values(self) -> dict[str, float]:
        return {sample.name.removeprefix("tidemark_"): sample.value for sample in self.last}


def test_a_caller_gets_the_last_reading_and_causes_none() -> None:
    world = World()
    assert (world.values(), world.readings) == ({"repository_up": 0}, 0)
    world.last.refresh(world.read)
    assert world.values() == world.values() == {"repository_up": 1, "repository_bytes": 1}
    world.last.refresh(world.read)
    assert (world.values()["repository_bytes"], world.readings) == (2, 2)


def test_a_reading_that_fails_leaves_the_last_one_and_is_raised() -> None:
    world = World()
    world.last.refresh(world.read)
    world.is_down = True
    with pytest.raises(ConnectionError, match="no route"):
        world.last.refresh(world.read)
    assert world.values() == {"repository_up": 0, "repository_bytes": 1}
    world.is_down = False
    world.last.refresh(world.read)
    assert world.values() == {"repository_up": 1, "repository_bytes": 3}


def test_one_that_never_went_well_says_that_alone() -> None:
    world = World()
    world.is_down = True
    with pytest.raises(ConnectionError, match="no route"):
        world.last.refresh(world.read)
    assert world.values() == {"repository_up": 0}
