"""What can go wrong with a picture of a checkpoint beyond what `engine.errors` names."""

from engine.errors import EngineError


class QueryMovedOnError(EngineError):
    """The query deleted or overwrote what was being read, again and again (design 0005, P6)."""

    default_hint = "back up again, or let the query keep more (spark.sql.streaming.minBatchesToRetain)"
