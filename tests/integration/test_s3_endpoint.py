"""Mistakes in the endpoint of an S3 server: reported at once, and not as a busy server."""

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.integration.conftest import Shell

KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_REGION": "us-east-1"}


@pytest.fixture
def plain_port() -> Iterator[int]:
    """The port of a server that speaks HTTP without TLS."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
    return port


def refuse(shell: Shell, endpoint_url: str, why: str) -> None:
    words = ("list", "-r", "s3://bucket/prefix", "--endpoint-url", endpoint_url, "--s3-allow-http", "true")
    result = shell.run(*words, code=2, **KEYS)
    assert why in result.stderr
    # As many attempts as fit into a second, of those that a busy server gets.
    assert "attempt 6 of at most 6" not in result.stderr
    assert f"repository: s3://bucket/prefix, endpoint {endpoint_url}" in result.stderr
    assert "hint: check scheme, host and port" in result.stderr


def test_a_host_that_nobody_knows(shell: Shell) -> None:
    refuse(shell, "http://tidemark-test.invalid:9000", "no such host")


def test_a_port_where_nothing_listens(shell: Shell, closed_port: int) -> None:
    refuse(shell, f"http://127.0.0.1:{closed_port}", "nothing listens there")


def test_a_server_without_tls(shell: Shell, plain_port: int) -> None:
    refuse(shell, f"https://127.0.0.1:{plain_port}", "speaks no TLS")


def test_a_directory_that_is_no_repository_is_named(shell: Shell) -> None:
    assert shell.refused("list", code=7)["repository"] == shell.environment["TIDEMARK_REPOSITORY"]
    assert f"repository: {shell.directory}/other" in shell.run("list", "-r", "other", code=7).stderr
