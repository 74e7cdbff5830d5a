"""Credentials stay with the process that found them: they are searched for in everything that is said or sent."""

import base64
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec
import pytest
from typing_extensions import override

from tests.servers.moto_server import MotoServer
from tests.servers.s3_server import S3Server

pytestmark = [pytest.mark.spark, pytest.mark.s3]

ROOT = Path(__file__).resolve().parents[2]
CANARIES = {
    "AWS_ACCESS_KEY_ID": "CANARYKEYTHATSINGSTOO",
    "AWS_SECRET_ACCESS_KEY": "canary-secret-3f9c1d70b52e48a6",
    "AWS_SESSION_TOKEN": "canary-token-b81e07c24fd94d05",
}
Failing = dict[str, tuple[str, str]]


class QuotingServer(ThreadingHTTPServer):
    """Refuses everything, and quotes the request in its answer: its headers, and what was signed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Quoting)
        self.seen: list[str] = []

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Quoting(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        quoted = "\n".join(f"{name.lower()}:{value}" for name, value in self.headers.items())
        assert isinstance(self.server, QuotingServer)
        self.server.seen.append(quoted)
        # As AWS does it: the message is harmless, what is beside it is not. What Ceph and others do varies.
        code = ("SignatureDoesNotMatch", "AccessDenied", "InvalidRequest", "InternalError")[len(self.server.seen) % 4]
        message = quoted if code == "SignatureDoesNotMatch" else "The request was refused."
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{code}</Code><Message>{escape(message)}</Message>"
            f"<StringToSign>{escape(quoted)}</StringToSign><CanonicalRequest>{escape(quoted)}</CanonicalRequest>"
            f"<AWSAccessKeyId>{escape(quoted)}</AWSAccessKeyId><RequestId>1</RequestId></Error>"
        ).encode()
        self.send_response({"InvalidRequest": 400, "InternalError": 500}.get(code, 403))
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/xml")
        self.send_header("x-quoted", quoted.replace("\n", " "))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _refuse  # noqa: N815  # the names that the base class calls

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def quoting() -> Iterator[QuotingServer]:
    with QuotingServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def forms(secret: str) -> list[bytes]:
    """The ways in which a string may be in text and in bytes; base64 in its three positions."""
    plain = secret.encode()
    shifted = [base64.b64encode(b"-" * shift + plain)[4 if shift else 0 : -4] for shift in range(3)]
    return [plain, secret.encode("utf-16-le"), plain.hex().encode(), *shifted]


@pytest.fixture
def failing(moto_server: MotoServer, s3_server: S3Server, s3_bucket: str, quoting: QuotingServer) -> Failing:
    """URL and endpoint of repositories that cannot be used."""
    moto_server.client.create_bucket(Bucket="canaries")
    failing = {
        "no bucket": ("s3://no-such-bucket/state", moto_server.endpoint_url),
        "unreachable": ("s3://canaries/state", "http://127.0.0.1:1"),
        "quoted": ("s3://canaries/state", quoting.endpoint_url),
    }
    if s3_server.kind != moto_server.kind:
        # It knows neither the key nor the token.
        failing["denied"] = (f"s3://{s3_bucket}/state", s3_server.endpoint_url)
    return failing


@pytest.mark.timeout(900)
def test_credentials_are_in_nothing_that_is_logged_raised_pickled_or_planned(
    moto_server: MotoServer, failing: Failing, quoting: QuotingServer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    settings = {
        "out": str(out),
        "disk": str(tmp_path / "disk"),
        "endpoint_url": moto_server.endpoint_url,
        "bucket": "canaries",
        "failing": failing,
        "raising": ("quoted",),
    }
    (tmp_path / "settings").write_bytes(msgspec.json.encode(settings))
    environment = {name: value for name, value in os.environ.items() if name != "AWS_ENDPOINT_URL_S3"}
    environment |= CANARIES | {
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(tmp_path / "spark"),
    }
    with (out / "stdout").open("wb") as stdout, (out / "stderr").open("wb") as stderr:
        done = subprocess.run(
            [sys.executable, "-m", "tests.spark.canary_scenario", tmp_path / "settings"],
            env=environment,
            stdout=stdout,
            stderr=stderr,
            cwd=tmp_path,
            check=False,
            timeout=840,
        )
    assert done.returncode == 0, (out / "stderr").read_text(errors="replace")[-5000:]
    said = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    # The token was there to be quoted, and each scenario came to what it should.
    assert quoting.seen
    assert all(CANARIES["AWS_SESSION_TOKEN"] in headers for headers in quoting.seen)
    names = "\n".join(path.name for path in said)
    for name, error in (
        ("no bucket: the driver opens", "StoreMissingError"),
        ("unreachable: the driver opens", "StoreUnavailableError"),
        ("denied: the driver opens", "AccessDeniedError"),
    ):
        assert f"{name} {error}" in names or name.split(":")[0] not in failing
    for kind in ("closure", "plan of a read", "workers back up PythonException"):
        assert kind in names
    # Of a task's typed error the driver raises the same class: whichever the answer of the last attempt stands for.
    assert re.search("workers list (AccessDenied|InvalidRequest|StoreUnavailable)Error", names)
    for path, text in {"stderr": b"Running task", "events": b"SparkListenerEnvironmentUpdate"}.items():
        assert any(text in data for name, data in said.items() if path in name.parts or path == name.name)

    found = [
        f"{variable} in {path.relative_to(out)}"
        for path, data in said.items()
        for variable, secret in CANARIES.items()
        if any(form in data for form in forms(secret))
    ]
    assert found == []
