"""What is sent of how a run ended: `--on-success` and `--on-failure`."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from click.testing import CliRunner
from typing_extensions import override

from engine.cli import tidemark
from tests.integration.conftest import Shell

SECRET = "0b1e-very-secret"


class Receiver(HTTPServer):
    """A web server that notes what it is sent, and answers with a status."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.delay_s = 200, 0.0
        self.received: list[tuple[str, dict[str, Any]]] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{SECRET}/{path}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        receiver = self.server
        assert isinstance(receiver, Receiver)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(receiver.delay_s)
        receiver.received.append((self.path.rpartition("/")[2], body))
        self.send_response(receiver.status)
        self.send_header("Location", receiver.url("elsewhere"))
        self.end_headers()

    @override
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def hooked(shell: Shell, receiver: Receiver) -> Shell:
    shell.run("init")
    shell.tree("source", {"CURRENT": b"MANIFEST-1\n"})
    shell.environment["TIDEMARK_ON_SUCCESS"] = receiver.url("good")
    shell.environment["TIDEMARK_ON_FAILURE"] = receiver.url("bad")
    return shell


def test_a_run_that_ended_well_is_sent_and_a_dry_run_is_not(hooked: Shell, receiver: Receiver) -> None:
    source = str(hooked.directory / "source")
    hooked.run("backup", source, "--dry-run")
    hooked.run("config", "show")
    assert receiver.received == []
    hooked.run("backup", source)
    [(where, notice)] = receiver.received
    assert where == "good"
    assert (notice["verb"], notice["job"], notice["code"], notice["error"]) == ("backup", "flights", 0, "")
    assert notice["text"] == "tidemark backup of flights ended well"
    assert notice["repository"] == hooked.environment["TIDEMARK_REPOSITORY"]


@pytest.mark.parametrize("url", ["s3:/KEY:{}@bucket/x", "s3://KEY:{}/x@bucket", "//KEY:{}@bucket/x", "KEY:{}@bucket"])
def test_of_a_repository_that_is_refused_nothing_is_sent(hooked: Shell, receiver: Receiver, url: str) -> None:
    hooked.refused("backup", str(hooked.directory / "source"), "-r", url.format(SECRET), code=7 if url[0] == "/" else 2)
    [(_, notice)] = receiver.received
    assert SECRET not in json.dumps(notice)


@pytest.mark.parametrize(
    "words, code, error",
    [
        (("restore", "target", "--number", "9"), 7, "NotFoundError"),
        (("restore",), 2, "UsageError"),
        (("collect",), 2, "UsageError"),
    ],
)
def test_one_that_did_not_is_sent_with_its_error(
    hooked: Shell, receiver: Receiver, words: tuple[str, ...], code: int, error: str
) -> None:
    hooked.run("backup", str(hooked.directory / "source"))
    receiver.received.clear()
    result = hooked.run(*words, code=code)
    [(where, notice)] = receiver.received
    assert (where, notice["code"], notice["error"]) == ("bad", code, error)
    assert f"ended with {code}: {notice['message']}" in notice["text"]
    assert notice["hint"]
    assert SECRET not in result.output


def test_what_is_wrong_with_stored_data_is_sent(hooked: Shell, receiver: Receiver) -> None:
    hooked.run("backup", str(hooked.tree("large", {"a": bytes(200_000)})))
    for path in (hooked.directory / "repository" / "blobs").rglob("*"):
        if path.is_file():
            path.unlink()
    receiver.received.clear()
    hooked.run("verify", code=4)
    assert (
        receiver.received[0][1]["text"] == "tidemark verify of flights ended with 4: stored data is missing or altered"
    )


@pytest.mark.parametrize("status", [404, 500, 302])
def test_a_server_that_refuses_changes_nothing_of_the_run(hooked: Shell, receiver: Receiver, status: int) -> None:
    receiver.status = status
    result = hooked.run("backup", str(hooked.directory / "source"))
    assert f"/*** was not informed of how the run ended: it answered {status}" in result.stderr
    assert len(receiver.received) == 1
    assert SECRET not in result.output


def test_a_server_that_is_not_there_changes_nothing_of_the_run(hooked: Shell) -> None:
    result = hooked.run("backup", str(hooked.directory / "source"), "--on-success", f"http://127.0.0.1:1/{SECRET}")
    assert "was not informed of how the run ended: ConnectionRefusedError" in result.stderr
    assert SECRET not in result.output


def test_a_server_that_answers_for_ever_is_not_waited_for(
    hooked: Shell, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cli.notify.TIMEOUT_S", 0.2)
    receiver.delay_s = 1
    result = hooked.run("backup", str(hooked.directory / "source"))
    assert "was not informed of how the run ended: no answer within 0.2 s" in result.stderr


@pytest.mark.parametrize(
    "url",
    [
        f"ftp://host/{SECRET}",
        SECRET,
        f"http:///{SECRET}",
        f"http://h:x/{SECRET}",
        f"file:///{SECRET}",
        f"https://me:{SECRET}@host/x",
        f"http://x:0/{SECRET}",
    ],
)
def test_what_is_no_place_to_send_to_is_refused_and_not_repeated(hooked: Shell, url: str) -> None:
    result = hooked.run("backup", str(hooked.directory / "source"), "--on-failure", url, code=2)
    assert "write https://host/path" in result.stderr
    assert SECRET not in result.output
    hooked.environment["TIDEMARK_ON_FAILURE"] = url
    assert SECRET not in hooked.run("config", "show", code=2).output


def test_the_path_of_the_url_is_in_no_output(hooked: Shell) -> None:
    shown = hooked.run("config", "show").output
    assert "http://127.0.0.1:" in shown
    assert SECRET not in shown
    assert SECRET not in hooked.run("config", "show", "backup", "--json").output
    result = CliRunner().invoke(tidemark, ["restore", "x", "--debug"], env=hooked.environment)
    assert "Traceback" in result.output
    assert SECRET not in result.output
