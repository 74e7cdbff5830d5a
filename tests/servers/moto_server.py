"""moto's S3 server in a process of its own: a mock that keeps what it gets in memory."""

import subprocess
import sys
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from threading import Lock, Thread, Timer
from typing import TYPE_CHECKING

from typing_extensions import override

from tests.servers.s3_server import START_TIMEOUT_S, S3Server, ServerStartError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_ROOT = Path(__file__).resolve().parents[2]


class MotoServer(S3Server):
    """moto, for as long as its context lasts. It believes every key and carries out no lifecycle rule."""

    kind = "moto"

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint_url = ""

    @override
    def start(self) -> None:
        # It ends with its input, so with this process, whatever way that ends.
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.moto_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=_ROOT,
        )
        assert process.stdout is not None
        watch = Timer(START_TIMEOUT_S, process.kill)
        watch.start()
        port = process.stdout.readline().decode().strip()
        watch.cancel()
        if not port:
            self.stop()
            raise ServerStartError("moto did not start; see `python -m tests.servers.moto_server`")
        self.endpoint_url = f"http://127.0.0.1:{port}"

    @override
    def stop(self) -> None:
        super().stop()
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._process = None


def main() -> None:
    """Serve until the input ends."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app  # noqa: PLC0415
    from werkzeug.serving import make_server  # noqa: PLC0415  # needed in the process of the server alone

    app = OneAtATime(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


class OneAtATime:
    """Lets one request through at a time, once it is there as a whole: moto looks and then writes, and has no locks."""

    def __init__(self, app: "WSGIApplication") -> None:
        self._app = app
        self._lock = Lock()

    def __call__(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if environ.get("CONTENT_LENGTH"):
            environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with self._lock:
            return list(self._app(environ, start_response))


if __name__ == "__main__":
    main()
