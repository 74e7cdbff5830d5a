"""What a run on Spark can end with, beside the engine's own errors."""

from pyspark.errors import PySparkException

from engine.errors import ConflictError, EngineError


class TaskFailedError(EngineError):
    """Spark gave up on a task after its last attempt. Nothing was committed."""

    default_hint = "nothing was committed: mend the cause and run again with the same version; its traceback is below"


class PartitioningError(EngineError):
    """Spark ran a task's rows in several partitions, or several tasks' rows in one. Nothing was committed."""

    default_hint = "this is a bug, or the DataFrame was repartitioned behind the job's back; nothing was committed"


class RunEndedError(ConflictError):
    """Another collection that worked on the same run was first to end it (design 0006, R4 and R6)."""

    default_hint = "nothing is wrong: run it again if the other collection has not done what you asked for"


def last_error(error: PySparkException) -> str:
    """Return the line of a worker's traceback that names the error; else the first line of the message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = (line for line in reversed(lines) if "Error" in line.split(":")[0] and " " not in line.split(":")[0])
    return next(named, lines[0] if lines else type(error).__name__)
