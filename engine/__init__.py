"""The engine: backs up, commits, restores and collects. `from engine import Repository` is where to begin.

`from engine import StateStore` is the state store of a Spark query, on its own directories, and `StreamingCheckpoint`
tells which of its versions are committed. `backup_checkpoint`, `restore_checkpoint` and `check_checkpoint` are for a
query's checkpoint as a whole. Results are frozen structs: their fields are for programs, their `repr` and, in a
notebook, their table are for people.
"""

from engine.backup.backup import BackupResult
from engine.checkpoint.backup import backup_checkpoint
from engine.checkpoint.check.check import check_checkpoint
from engine.checkpoint.restore import restore_checkpoint
from engine.collect.report import CollectReport
from engine.inspect.history import History
from engine.inspect.verify import VerifyReport
from engine.repository.repository import Repository
from engine.repository.restoring import Restored
from engine.repository.sync import SyncRepository
from engine.restore.restore import RestoreResult
from engine.state.settings import StateStoreSettings
from engine.state.store import StateStore
from engine.state.streaming_checkpoint import StreamingCheckpoint, open_query_state
from engine.state.sync_store import SyncStateStore
from index.plan.commits import Commit
from index.snapshot.index_diff import IndexDifference

__all__ = [
    "BackupResult",
    "CollectReport",
    "Commit",
    "History",
    "IndexDifference",
    "Repository",
    "RestoreResult",
    "Restored",
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
