"""A verb's Spark session: PySpark and a JVM are started only for who asked for them."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.spark.session import SparkSession


@contextlib.contextmanager
def spark_session() -> Iterator["SparkSession"]:
    """The session that runs here, or a new one that ends with the block.

    How it is set is Spark's own business: `spark-defaults.conf`, `spark-submit`, and the variables of the environment.

    Raises:
        UsageError: There is no Java that it could start with, or what is set is wrong.
    """
    # PySpark takes a second to import, which the verbs that do without it need not wait for.
    from engine.spark.session import open_session  # noqa: PLC0415

    with open_session() as session:
        yield session
