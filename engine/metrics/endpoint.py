"""The server of `/metrics`: small, and no burden on the machine whoever connects to it."""

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from typing_extensions import override

from engine.clock import SystemAmbient
from engine.metrics.exposition import wsgi_app
from engine.metrics.model import Sample

# Prometheus has one, or two that stand in for each other; what comes beyond that is closed unheard.
CONNECTIONS_MAX: Final = 16
# From the first byte to the last, both ways. Prometheus itself waits no longer.
CONNECTION_S_MAX: Final = 10.0


class Endpoint:
    """`/metrics` on a port of this machine, until it is closed.

    Args:
        look: What is told; called in a thread for each time that somebody asks.
        host: Address to listen on.
        port: 0: any that is free.

    Attributes:
        port: Where it listens.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(self, look: Callable[[], Iterable[Sample]], *, host: str, port: int) -> None:
        server = _Server6 if ":" in host else _Server
        self._server = server((host, port), _Handler)
        self._server.set_app(wsgi_app(look))
        self._thread = threading.Thread(target=self._server.serve_forever, name="tidemark endpoint", daemon=True)
        self._thread.start()
        self.port: int = self._server.server_port

    def wait(self) -> None:
        """Wait for an interrupt."""
        threading.Event().wait()

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Not a line for each time that somebody asks."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which there are few, and none for long."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:  # noqa: ANN401  (the base class has them)
        self._monotonic_s = SystemAmbient().monotonic_s
        self._lock = threading.Lock()
        self._since_s: dict[socket.socket, float] = {}
        super().__init__(*args)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_welcome = len(self._since_s) < CONNECTIONS_MAX
            if is_welcome:
                self._since_s[request] = self._monotonic_s()
        if is_welcome:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    @override
    def shutdown_request(self, request: Any) -> None:
        # However it ended, also where no thread could be started.
        with self._lock:
            self._since_s.pop(request, None)
        super().shutdown_request(request)

    @override
    def service_actions(self) -> None:
        # Called twice a second. A limit on single reads would leave time without end to who sends a byte now and then.
        now_s = self._monotonic_s()
        with self._lock:
            for request, since_s in self._since_s.items():
                if now_s - since_s > CONNECTION_S_MAX:
                    _cut_off(request)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who breaks off is no news."""


class _Server6(_Server):
    address_family: int = socket.AF_INET6


def _cut_off(request: socket.socket) -> None:
    """Have the thread that waits for it go on, and find nobody there."""
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
