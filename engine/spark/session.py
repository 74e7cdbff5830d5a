"""The Spark session of a program that is not a Spark job itself, such as the command line."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.sql import SparkSession

from engine.errors import UsageError

__all__ = ["SparkSession", "open_session"]

_NO_JAVA: Final = "JAVA_GATEWAY_EXITED"
# What Spark logs for as long as nobody has said what it is to log: log4j 2 looks for its settings by this variable.
_LOG_SETTINGS: Final = "LOG4J_CONFIGURATION_FILE"
_QUIET: Final = Path(__file__).with_name("log4j2.properties")
_PYTHON: Final = "PYSPARK_PYTHON"
# A Spark Connect server; what follows the first `;` may have a token.
_REMOTE: Final = "SPARK_REMOTE"


@contextlib.contextmanager
def open_session() -> Iterator[SparkSession]:
    """The session that is active, or a new one that is stopped after the block.

    A new one is of the Spark Connect server that `SPARK_REMOTE` names, if it names one. Else it leaves the terminal to
    the verb: no bars, and no log but of errors, unless Spark's own configuration says otherwise. Its workers are this
    very Python's where they run on this machine and nobody has chosen another.

    Raises:
        UsageError: Spark does not start here.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    try:
        with _quiet():
            builder = SparkSession.builder.appName("tidemark")
            if _REMOTE not in os.environ:
                # A server's own settings are nobody's to change.
                builder = builder.config("spark.ui.showConsoleProgress", "false")
            session = builder.getOrCreate()
    except (PySparkException, OSError) as error:
        raise UsageError(_told(error), operation="spark", hint=_hint(error)) from error
    context = getattr(session, "sparkContext", None)
    if context is not None and context.master.startswith("local") and not os.environ.get(_PYTHON):
        context.pythonExec = session.conf.get("spark.pyspark.python", None) or sys.executable
    try:
        yield session
    finally:
        session.stop()


def _told(error: Exception) -> str:
    return "Spark does not start here" if _lacks_java(error) else f"Spark does not start here: {error}"


def _hint(error: Exception) -> str:
    if server := os.environ.get(_REMOTE):
        return f"see whether the Spark Connect server of {_REMOTE}={server.partition(';')[0]} runs, or unset {_REMOTE}"
    if _lacks_java(error):
        return "set JAVA_HOME to a Java 17 or newer, or leave --on-spark out"
    return "see what Spark says of its settings, or leave --on-spark out"


def _lacks_java(error: Exception) -> bool:
    return isinstance(error, OSError) or (isinstance(error, PySparkRuntimeError) and error.getCondition() == _NO_JAVA)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A JVM that starts in the block logs errors only, unless it was told what to log."""
    homes = [os.environ.get("SPARK_CONF_DIR"), os.environ.get("SPARK_HOME") and f"{os.environ['SPARK_HOME']}/conf"]
    if _LOG_SETTINGS in os.environ or any(home and Path(home, _QUIET.name).exists() for home in homes):
        yield
        return
    os.environ[_LOG_SETTINGS] = str(_QUIET)
    try:
        yield
    finally:
        del os.environ[_LOG_SETTINGS]
