"""Back up, commit, restore and collect: the use cases. Begin with `from engine import Repository`.

How the package is laid out, from the bottom up; a package imports only packages above it in this list, and
import-linter keeps that:

    errors, clock, progress, text, settings, blocking    what every package needs
    local                  files of this machine, and bytes between them and a store
    rocksdb                RocksDB directories, opened in raw mode only
    records                what a repository stores beside blobs: log, indexes, names, pins
    backup, commit         a directory becomes references; references become a commit
    restore                a commit becomes a directory
    collect                what nothing reaches is deleted
    inspect, doctor        verify, history, explain, browse; what a store really does
    state                  Spark's RocksDB state store
    repository             the public API over all of these
    checkpoint             a streaming query's checkpoint as a whole
    spark                  the same work on executors, and data sources
    metrics, drill, report what Prometheus reads; how long a restore takes; one page
    cli                    `tidemark`; each verb is cli/cmd/<verb>.py

The file named like its package is where to begin: `engine/backup/backup.py`. A module that one other module imports,
and that hides nothing, belongs into that other one. Results are frozen structs: their fields are for programs, their
`repr` and, in a notebook, their table are for people.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.backup.backup import BackupOptions, BackupResult
    from engine.checkpoint.backup import BackupChoice, backup_checkpoint
    from engine.checkpoint.check.check import check_checkpoint
    from engine.checkpoint.restore import RestoreChoice, restore_checkpoint
    from engine.collect.report import CollectReport
    from engine.inspect.history import History
    from engine.inspect.verify import VerifyReport
    from engine.repository.repository import Repository
    from engine.repository.sync import SyncRepository
    from engine.restore.restore import Restored, RestoreOptions, RestoreResult
    from engine.state.query import StreamingCheckpoint, open_query_state
    from engine.state.restore import StateRestoreOptions
    from engine.state.settings import StateStoreSettings
    from engine.state.store import StateStore
    from engine.state.sync import SyncStateStore
    from index.plan.commits import Commit
    from index.snapshot.delta import IndexDifference

__all__ = [
    "BackupChoice",
    "BackupOptions",
    "BackupResult",
    "CollectReport",
    "Commit",
    "History",
    "IndexDifference",
    "Repository",
    "RestoreChoice",
    "RestoreOptions",
    "RestoreResult",
    "Restored",
    "StateRestoreOptions",
    "StateStore",
    "StateStoreSettings",
    "StreamingCheckpoint",
    "SyncRepository",
    "SyncStateStore",
    "VerifyReport",
    "backup_checkpoint",
    "check_checkpoint",
    "open_query_state",
    "restore_checkpoint",
]

# Where each name is defined: it is imported when somebody asks for it (PEP 562), so that a use of one loads no other.
_MODULES = {
    "BackupOptions": "engine.backup.backup",
    "BackupChoice": "engine.checkpoint.backup",
    "BackupResult": "engine.backup.backup",
    "CollectReport": "engine.collect.report",
    "Commit": "index.plan.commits",
    "History": "engine.inspect.history",
    "IndexDifference": "index.snapshot.delta",
    "Repository": "engine.repository.repository",
    "RestoreOptions": "engine.restore.restore",
    "RestoreChoice": "engine.checkpoint.restore",
    "RestoreResult": "engine.restore.restore",
    "Restored": "engine.restore.restore",
    "StateRestoreOptions": "engine.state.restore",
    "StateStore": "engine.state.store",
    "StateStoreSettings": "engine.state.settings",
    "StreamingCheckpoint": "engine.state.query",
    "SyncRepository": "engine.repository.sync",
    "SyncStateStore": "engine.state.sync",
    "VerifyReport": "engine.inspect.verify",
    "backup_checkpoint": "engine.checkpoint.backup",
    "check_checkpoint": "engine.checkpoint.check.check",
    "open_query_state": "engine.state.query",
    "restore_checkpoint": "engine.checkpoint.restore",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
