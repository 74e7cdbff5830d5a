"""Stateful jobs, streaming checkpoints and collections on Spark: `from tidemark.spark import StatefulJob`.

All that `engine.spark` has, whose `MissingExtraError` says what to install where PySpark is not.
"""

from engine.spark import *  # noqa: F403  (its `__all__`)
from engine.spark import __all__ as __all__  # noqa: PLC0414
