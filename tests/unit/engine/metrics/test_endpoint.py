"""The server of `/metrics`: what it answers, and to how many for how long."""

import contextlib
import socket
import time
import urllib.request
from collections.abc import Iterator

import pytest

from engine.metrics import endpoint
from engine.metrics.endpoint import Endpoint
from engine.metrics.samples import Samples


@contextlib.contextmanager
def serving(host: str) -> Iterator[tuple[str, int]]:
    """An endpoint at some port of an address."""
    samples = Samples()
    samples.add("repository_up", 1)
    served = Endpoint(lambda: samples, host=host, port=0)
    try:
        yield host, served.port
    finally:
        served.close()


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """Of an endpoint."""
    with serving("127.0.0.1") as address:
        yield address


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


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"])
def test_who_says_nothing_is_cut_off(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endpoint, "CONNECTION_S_MAX", 0.1)
    with socket.create_connection(address, timeout=30) as idle:
        idle.sendall(said)
        # The server's end comes, and not our own timeout.
        assert idle.recv(1) == b""
    assert capfd.readouterr().err == ""


def test_connections_are_bounded_and_come_free_again(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "CONNECTIONS_MAX", 2)
    idle = [socket.create_connection(address, timeout=30) for _ in range(2)]
    with socket.create_connection(address, timeout=30) as one_more:
        assert one_more.recv(1) == b""
    for connection in idle:
        connection.close()
    until_s = time.monotonic() + 30
    while True:
        try:
            assert "repository_up" in fetch(address)
        except OSError:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        else:
            break
