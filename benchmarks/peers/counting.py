"""The tests' proxy in front of the server, in a thread: to count requests, or to let some of them hang.

Nothing is timed against the clock while requests are only counted, so that it may be as slow as it is.
"""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.fault_proxy import FaultProxy
from tests.fault_rules import Rule

CREATE = "PutObject if absent"


class Proxy:
    """One proxy, seen from another thread."""

    def __init__(self, proxy: FaultProxy) -> None:
        self._proxy = proxy
        self.endpoint_url = proxy.endpoint_url

    def counted(self) -> Counter[str]:
        """Requests since the last look, by S3's names; a PUT that creates only what is absent apart from others."""
        found = Counter(
            CREATE if exchange.operation == "PutObject" and exchange.header("If-None-Match") else exchange.operation
            for exchange in self._proxy.exchanges
        )
        self._proxy.clear_log()
        return found

    @property
    def struck(self) -> int:
        """How many requests a rule has struck."""
        return sum(rule.struck for rule in self._proxy.rules)


@contextlib.contextmanager
def open_proxy(upstream: str, rules: Sequence[Rule] = ()) -> Iterator[Proxy]:
    """A proxy for as long as the context lasts."""
    ready = threading.Event()
    made: list[Proxy] = []
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        async with FaultProxy(upstream) as proxy:
            for rule in rules:
                proxy.add(rule)
            made.append(Proxy(proxy))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="proxy", daemon=True)
    thread.start()
    try:
        ready.wait(30)
        yield made[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
