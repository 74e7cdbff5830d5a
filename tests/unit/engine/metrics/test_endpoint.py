"""The server of `/metrics`."""

import contextlib
import socket
import urllib.request
from collections.abc import Iterator

import pytest

from engine.metrics.exposition import close, serve
from engine.metrics.samples import Samples


@contextlib.contextmanager
def serving(host: str) -> Iterator[tuple[str, int]]:
    """An endpoint at some port of an address."""
    samples = Samples()
    samples.add("repository_up", 1)
    server = serve(lambda: samples, host=host, port=0)
    try:
        yield host, server.server_port
    finally:
        close(server)


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
