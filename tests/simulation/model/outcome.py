"""The outcome of a schedule, and the repository that one may begin with."""

import msgspec

from tests.simulation.checks.history import RecordHistory
from tests.simulation.checks.judge import CallLog
from tests.simulation.model.s3 import SimObject


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a schedule."""

    violations: tuple[str, ...]
    # Mutating requests that the server carried out.
    effects: int
    # Changes that restores made to the file system.
    file_effects: int
    requests: int
    # Of every request as the server saw it, in order.
    digest: str
    history: tuple[str, ...] = ()


class Beginning(msgspec.Struct, frozen=True):
    """A repository as a schedule finds it: what it holds, and what is known of it."""

    objects: dict[str, SimObject]
    record_history: RecordHistory
    call_log: CallLog
