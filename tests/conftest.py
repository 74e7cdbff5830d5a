"""The S3 servers of the tests: each starts when the first test of a process asks for it, and ends with the process.

And the order in which tests are handed to the workers (`tests.balance`).
"""

import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import botocore.hooks
import pytest

from tests.balance import schedule_units, slow_ones, sort_longest_first
from tests.servers import ceph_rgw
from tests.servers.ceph_rgw import CephRgw
from tests.servers.moto_server import MotoServer
from tests.servers.s3_server import S3Server

# Set where Ceph has to be there, so that tests which need it fail and do not skip.
REQUIRE_S3 = "TIDEMARK_REQUIRE_S3"


def pytest_configure() -> None:
    """Decide once whether there is Ceph: what is installed during a run changes nothing, in no worker."""
    if why := ceph_rgw.why_missing():
        os.environ[ceph_rgw.NO_CEPH] = why


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first, and marked where they are slow, before `-m` chooses."""
    slow = slow_ones(item.nodeid for item in items)
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    sort_longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`: files that share a JVM stay together too."""
    return schedule_units(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell's job in the background ignores an interrupt, and so would every process that a test starts there."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_account_of_this_machine() -> Iterator[None]:
    """Whatever a test signs with, and wherever it sends that, was set by the test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BOTO_CONFIG"):
            patch.setenv(name, os.devnull)
        # The servers are on this machine, however it reaches others.
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"])))
        yield


@pytest.fixture(scope="session", autouse=True)
def signatures_asked_once() -> Iterator[None]:
    """The SDK's same hundred handlers are not asked for their signatures by each of a thousand stores."""
    takes_keywords = functools.cache(botocore.hooks.accepts_kwargs)

    def remembered(handler: Callable[..., object]) -> bool:
        # Of a method, the function: the object it belongs to need not be remembered.
        return bool(takes_keywords(getattr(handler, "__func__", handler)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.hooks, "accepts_kwargs", remembered)
        yield


def ceph_or_skip() -> None:
    """Return where Ceph is installed.

    Raises:
        pytest.skip.Exception: It is not.
        pytest.fail.Exception: It is not, and has to be.
    """
    why = ceph_rgw.why_missing()
    if why and os.environ.get(REQUIRE_S3, "") not in {"", "0"}:
        pytest.fail(f"{REQUIRE_S3} is set, and {why}", pytrace=False)
    if why:
        pytest.skip(why)


@pytest.fixture(scope="session")
def ceph_server(tmp_path_factory: pytest.TempPathFactory, no_account_of_this_machine: None) -> Iterator[CephRgw]:
    """Also over TLS."""
    ceph_or_skip()
    with CephRgw(tmp_path_factory.mktemp("ceph"), tls=True) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(no_account_of_this_machine: None) -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="session")
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    """Ceph where it is installed or has to be, else moto."""
    is_moto = bool(ceph_rgw.why_missing()) and os.environ.get(REQUIRE_S3, "") in {"", "0"}
    server = request.getfixturevalue("moto_server" if is_moto else "ceph_server")
    assert isinstance(server, S3Server)
    return server


_buckets = itertools.count()


@pytest.fixture
def new_bucket(monkeypatch: pytest.MonkeyPatch) -> Callable[[S3Server], str]:
    """Makes an empty bucket on a server and lets the environment lead there. What is in it goes with the server."""

    def make(server: S3Server) -> str:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        bucket = f"test-{next(_buckets)}"
        server.client.create_bucket(Bucket=bucket)
        return bucket

    return make


@pytest.fixture
def s3_bucket(s3_server: S3Server, new_bucket: Callable[[S3Server], str]) -> str:
    """An empty bucket on `s3_server`."""
    return new_bucket(s3_server)
