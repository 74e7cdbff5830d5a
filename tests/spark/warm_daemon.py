"""Spark's daemon of Python workers, with the large outside libraries imported before the first worker is forked.

Tests that fail a task lose a worker, and each new one would import them again, which takes it a second. Ours are
imported in the worker, as they are with users; `test_canary` runs with Spark's own daemon.
"""

import pandas as pd  # noqa: F401
import pyarrow as pa  # noqa: F401
from pyspark import daemon, worker  # noqa: F401

if __name__ == "__main__":
    daemon.manager()
