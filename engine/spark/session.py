"""The Spark session of a program that is not a Spark job itself, such as the command line."""

import contextlib
from collections.abc import Iterator
from typing import Final

from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.sql import SparkSession

from engine.errors import UsageError

__all__ = ["SparkSession", "open_session"]

_NO_JAVA: Final = "JAVA_GATEWAY_EXITED"


@contextlib.contextmanager
def open_session() -> Iterator[SparkSession]:
    """The session that is active, or a new one that is stopped after the block.

    Raises:
        UsageError: Spark does not start here.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    try:
        session = SparkSession.builder.appName("tidemark").getOrCreate()
    except (PySparkException, OSError) as error:
        no_java = isinstance(error, OSError) or (
            isinstance(error, PySparkRuntimeError) and error.getCondition() == _NO_JAVA
        )
        raise UsageError(
            "Spark does not start here" if no_java else f"Spark does not start here: {error}",
            operation="spark",
            hint="set JAVA_HOME to a Java 17 or newer, or leave --on-spark out"
            if no_java
            else "see what Spark says of its settings, or leave --on-spark out",
        ) from error
    try:
        yield session
    finally:
        session.stop()
