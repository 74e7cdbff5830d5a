"""The data sources, and how a session comes to know them."""

from typing import Final

from pyspark.sql import SparkSession

from engine.spark.sources.diff import DiffSource, PushingDiffSource
from engine.spark.sources.files import FilesSource
from engine.spark.sources.state import PushingStateSource, StateSource

_PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"


def register_sources(spark: SparkSession, *, push_filters: bool = False) -> None:
    """Let a session read `tidemark_state`, `tidemark_state_diff` and `tidemark_files`.

    Which stores are read is best said by the options `operator`, `partition` and `store`.

    Args:
        spark: The session; others of the same application do not know them.
        push_filters: Let Spark push filters on operator, partition, store and version of state down, which is a setting
            of the session for all sources written in Python. Spark up to 4.3 reads *every* use of a DataFrame with the
            filters of whichever use was planned last: then make a DataFrame anew, with `load`, for each filter.
    """
    sources = (StateSource, DiffSource, FilesSource)
    if push_filters:
        sources = (PushingStateSource, PushingDiffSource, FilesSource)
        spark.conf.set(_PUSHDOWN, "true")
    for source in sources:
        spark.dataSource.register(source)
