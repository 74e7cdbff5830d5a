"""What can go wrong with a backup of a checkpoint beyond what `engine.errors` names."""

from pathlib import Path
from typing import Final

from engine.errors import DamagedError, EngineError, TargetError
from engine.local.scan import LACKING

LACKING_HINT: Final = "see to permissions, room, memory and open files on this machine; nothing is known of the file"


class QueryMovedOnError(EngineError):
    """The query deleted or overwrote what was being read, again and again (design 0005, P6)."""

    default_hint = "back up again, or let the query keep more (spark.sql.streaming.minBatchesToRetain)"


def unreadable(path: Path, error: OSError, hint: str) -> EngineError:
    """What to raise for a file that cannot be read: damage, unless it is this machine that lacks something."""
    if error.errno in LACKING:
        return TargetError(
            f"cannot be read here: {error.strerror}", operation="check", subject=str(path), hint=LACKING_HINT
        )
    return DamagedError(f"cannot be read: {error.strerror}", operation="check", subject=str(path), hint=hint)


def lacks(error: BaseException | None) -> bool:
    """Whether it comes of what this machine lacks, not of what a file says."""
    while error is not None:
        if isinstance(error, TargetError) or (isinstance(error, OSError) and error.errno in LACKING):
            return True
        error = error.__cause__
    return False
