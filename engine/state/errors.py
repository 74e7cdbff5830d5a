"""What can go wrong with a state store beyond what `engine.errors` names, sorted by what the caller does next.

```
EngineError
├── SnapshotUploadError        commits stand, a snapshot of one of them does not: the next commit makes another
├── DamagedError
│   └── SnapshotRepairError    no snapshot opens that is near enough: take the state from a backup
└── UsageError
    └── NotLoadedError         load a version first
```
"""

from engine.errors import DamagedError, EngineError, UsageError


class SnapshotUploadError(EngineError):
    """A snapshot could not be uploaded in the background (design 0004, C7)."""

    default_hint = "no commit is lost: its changelog stands, and the next commit makes another snapshot"


class SnapshotRepairError(DamagedError):
    """Neither the newest snapshot opens nor an older one that is near enough (design 0004, R7)."""

    default_hint = "raise `changes_replayed_max`, load another version, or take the directory from a backup"


class NotLoadedError(UsageError):
    """Nothing is loaded: not yet, or an abort, a failure or `close` has undone it (design 0004, C5)."""

    default_hint = "call `load` first: after an abort and after every failure too"
