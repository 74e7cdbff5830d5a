"""The Spark session of a program that is not a Spark job itself, such as the command line."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.sql import SparkSession

from engine.errors import UsageError

__all__ = ["SparkSession", "open_session"]

# What Spark logs for as long as nobody has said what it is to log: log4j 2 looks for its settings by this variable.
_LOG_SETTINGS: Final = "LOG4J_CONFIGURATION_FILE"
_QUIET: Final = Path(__file__).with_name("log4j2.properties")
# A Spark Connect server, or `local[N]`; what follows the server may have a token.
_REMOTE: Final = "SPARK_REMOTE"
_SERVER: Final = re.compile(r"(?P<begin>sc://|local)(?:[^/;?#]*@)?(?P<server>[^/;?#@]*)")
# How long a server may take to answer a connection.
CONNECT_S_MAX: Final = 15.0


@contextlib.contextmanager
def open_session() -> Iterator[SparkSession]:
    """Give the active session, or a new one that is stopped after the block.

    A new one is of the Spark Connect server that `SPARK_REMOTE` names, if it names one. Else it leaves the terminal to
    the verb: no bars, and no log but of errors, unless Spark's own configuration says otherwise. Its workers are this
    very Python's where they run on this machine and nobody has chosen another.

    Raises:
        UsageError: Spark does not start here, or the server does not answer.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    session = _connect(remote) if (remote := os.environ.get(_REMOTE)) else _start()
    context = getattr(session, "sparkContext", None)
    if context is not None and context.master.startswith("local") and not os.environ.get("PYSPARK_PYTHON"):
        context.pythonExec = session.conf.get("spark.pyspark.python", None) or sys.executable
    try:
        yield session
    finally:
        session.stop()


def _start() -> SparkSession:
    try:
        with _quiet():
            builder = SparkSession.builder.appName("tidemark").config("spark.ui.showConsoleProgress", "false")
            return builder.getOrCreate()
    except (PySparkException, OSError) as error:
        message, hint = f"Spark does not start here: {error}", "see what Spark says of its settings"
        is_gateway = isinstance(error, PySparkRuntimeError) and error.getCondition() == "JAVA_GATEWAY_EXITED"
        if is_gateway or isinstance(error, OSError):
            message, hint = "Spark does not start here", "set JAVA_HOME to a Java 17 or newer"
        raise UsageError(message, operation="spark", hint=f"{hint}, or leave --on-spark out") from error


def _connect(remote: str) -> SparkSession:
    """Connect to a Spark Connect server. No error has more of its URL than the server: the rest may be a token."""
    try:
        if remote.startswith("sc:"):
            _wait_for_server(remote)
        return SparkSession.builder.appName("tidemark").getOrCreate()
    except (PySparkException, OSError, ValueError) as error:
        found = _SERVER.match(remote)
        # Without user, path and parameters, which may be mistyped tokens.
        server = f"{found['begin']}{found['server']}" if found else "***"
        shown = str(error).replace(remote, server)
        # Of the URL, or with one that has parameters, its condition alone; Python refuses some URLs without one.
        if isinstance(error, ValueError) or (isinstance(error, PySparkException) and ";" in remote):
            condition = error.getCondition() if isinstance(error, PySparkException) else "INVALID_CONNECT_URL"
            shown = condition or type(error).__name__
        if isinstance(error, ImportError):
            hint = "in the checkout: pip install '.[connect]'"
        elif isinstance(error, ValueError):
            hint = f"write {_REMOTE} as sc://HOST:PORT/;token=TOKEN, with %3D for each = in the token"
        else:
            hint = f"see whether the server runs, or unset {_REMOTE}"
    # Not in the block above: Spark's error has parts of the URL, and would be the context of this one.
    raise UsageError(
        f"there is no session of Spark Connect: {shown}", operation="spark", subject=f"{_REMOTE}={server}", hint=hint
    )


def _wait_for_server(url: str) -> None:
    """Raise TimeoutError if nobody answers: Spark's own client would try for ten minutes, and say nothing."""
    # With gRPC, which only those have who use it.
    from pyspark.sql.connect.client import DefaultChannelBuilder  # noqa: PLC0415

    with DefaultChannelBuilder(url).toChannel() as channel:
        answered = threading.Event()

        def note(state: object) -> None:
            if getattr(state, "name", "") == "READY":
                answered.set()

        channel.subscribe(note, try_to_connect=True)
        if not answered.wait(CONNECT_S_MAX):
            raise TimeoutError(f"no answer in {CONNECT_S_MAX} s")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let a JVM that starts in the block log errors only, unless its logging is configured."""
    homes = [os.environ.get("SPARK_CONF_DIR"), os.environ.get("SPARK_HOME") and f"{os.environ['SPARK_HOME']}/conf"]
    if _LOG_SETTINGS in os.environ or any(home and Path(home, _QUIET.name).exists() for home in homes):
        yield
        return
    os.environ[_LOG_SETTINGS] = str(_QUIET)
    try:
        yield
    finally:
        del os.environ[_LOG_SETTINGS]
