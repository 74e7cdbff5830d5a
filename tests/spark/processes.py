"""Processes of a Spark driver as the kernel sees them, and requests that wait until a test has done what it wants."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from engine.blocking import LoopThread
from tests.fault_proxy import FaultProxy
from tests.fault_rules import Hang, Predicate, Request, Rule, Stage

GATE_TIMEOUT_S = 90.0
END_TIMEOUT_S = 60.0


def below(pid: int) -> list[int]:
    """Every process below one, parents before children."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name may have spaces and brackets; what follows its last bracket has not.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, at = [pid], 0
    while at < len(found):
        found += parents.get(found[at], [])
        at += 1
    return found[1:]


def workers_below(pid: int) -> list[int]:
    """The Python workers of a driver: what a daemon of Spark has forked."""
    return sorted({worker for child in below(pid) if is_daemon(child) for worker in below(child)})


def is_daemon(pid: int) -> bool:
    """Whether a process runs a module that forks workers; so do the workers, by their name."""
    words = command_of(pid).split(b"\0")
    return words[1:2] == [b"-m"] and words[2].endswith(b"daemon")


def command_of(pid: int) -> bytes:
    """How a process was started; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal processes of our own; those that are gone hear nothing."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_for_end(pids: Iterable[int]) -> None:
    """Return once none of them is alive; what hangs on is killed, and then it is an error."""
    left = set(pids)
    ends_at_s = time.monotonic() + END_TIMEOUT_S
    while left and time.monotonic() < ends_at_s:
        left = {pid for pid in left if command_of(pid)}
        time.sleep(0.05)
    send(left, signal.SIGKILL)
    assert not left, "processes outlive the driver that was killed"


class Gate:
    """A proxy in front of an S3 server that lets the first request of a kind wait until a test opens it."""

    def __init__(self, proxy: FaultProxy, loop: LoopThread) -> None:
        self.endpoint_url = proxy.endpoint_url
        self._proxy, self._loop = proxy, loop
        self._reached = threading.Event()
        self._opened: asyncio.Event | None = None
        self._at = Stage.REQUEST

    def close(self, when: Predicate, *, at: Stage = Stage.REQUEST) -> None:
        """Let the next such request wait: before the server has seen it, or with its answer."""
        self._reached.clear()
        self._at = at

        def reach(request: Request) -> bool:
            matches = when(request)
            if matches:
                self._reached.set()
            return matches

        async def add() -> None:
            self._opened = asyncio.Event()
            self._proxy._log.clear()
            self._proxy.rules.clear()
            self._proxy.add(Rule(fault=Hang(at=at, until=self._opened), when=reach))

        self._loop.run(add())

    def wait(self) -> None:
        """Return once a request waits; one that waits with its answer was carried out by then."""
        assert self._reached.wait(GATE_TIMEOUT_S), "nothing came to the gate"
        ends_at_s = time.monotonic() + GATE_TIMEOUT_S
        while self._at is Stage.ANSWER and not any(
            exchange.fault == "hang answer" and exchange.upstream_status for exchange in self._proxy.exchanges[-50:]
        ):
            assert time.monotonic() < ends_at_s, "the server did not answer"
            time.sleep(0.01)

    def open(self) -> None:
        """Let it go on, if its sender is still there."""

        async def let_go() -> None:
            assert self._opened is not None
            self._opened.set()
            self._proxy.rules.clear()

        self._loop.run(let_go())


@contextlib.contextmanager
def gated(server_url: str) -> Iterator[Gate]:
    """A gate in front of a server, in a thread of its own."""
    loop = LoopThread()
    proxy = FaultProxy(server_url, log_max=100)
    loop.run(proxy.__aenter__())
    try:
        yield Gate(proxy, loop)
    finally:
        loop.run(proxy.__aexit__(None, None, None))
        loop.stop()
