"""A real S3 server for the demo, for as long as the demo lasts: Ceph RGW where it is installed, else moto.

The server is the tests' own (`python -m tests.servers`), in a process that ends with its input: however the demo ends,
no server is left.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Final

PROJECT: Final = Path(__file__).resolve().parent.parent
START_S_MAX: Final = 120
STOP_S_MAX: Final = 30


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Serve a bucket on this machine, for the block.

    Credentials and endpoint go where every process of the demo finds them by the standard chain, the environment:
    neither the URL nor anything that Spark sends to its workers has them.

    Args:
        directory: What the server keeps is below it; it is made.

    Yields:
        The URL of a repository to be.

    Raises:
        SystemExit: The server did not start.
    """
    directory.mkdir(parents=True)
    # A session of its own, so that Ctrl-C reaches the demo alone, which then stops the server in order.
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.servers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=PROJECT,
        env=os.environ | {"TMPDIR": str(directory), "PYTHONPATH": str(PROJECT)},
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            kind, bucket_url, environment = _read_answer(process)
            print(f"{kind} serves {bucket_url} at {environment['AWS_ENDPOINT_URL_S3']}, for this demo alone")
            with _environment(environment):
                yield f"{bucket_url}/flights"
        finally:
            _stop(process)


def _read_answer(process: "subprocess.Popen[str]") -> tuple[str, str, dict[str, str]]:
    """Read what the server prints once it serves: its kind, a bucket's URL, and the environment that leads there."""
    assert process.stdout is not None  # noqa: S101  # it was asked for
    notes: list[str] = []
    environment: dict[str, str] = {}
    watch = Timer(START_S_MAX, process.kill)
    watch.start()
    try:
        for line in map(str.strip, process.stdout):
            if not line:
                kind, bucket_url = notes
                return kind, bucket_url, environment
            if line.startswith("# "):
                notes.append(line.removeprefix("# "))
            else:
                name, _, value = line.partition("=")
                environment[name] = value
    finally:
        watch.cancel()
    raise SystemExit("the S3 server did not start; try `python -m tests.servers`")


@contextlib.contextmanager
def _environment(environment: dict[str, str]) -> Iterator[None]:
    """Give this process and its children the server's credentials and endpoint, and nothing of the user's own."""
    before = dict(os.environ)
    for name in [name for name in before if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(environment)
    os.environ.update(dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull))
    os.environ["no_proxy"] = "127.0.0.1"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _stop(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None  # noqa: S101  # it was asked for
    process.stdin.close()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
