"""Back up, commit, restore and collect: the use cases. Begin with `Repository`; programs import it of `tidemark`.

The packages, from the bottom up, are in design/architecture.md; each imports only those above it there, and
import-linter keeps that. The file named like its package is where to begin: `engine/backup/backup.py`. A module that
one other module imports, and that hides nothing, belongs into that other one. Results are frozen structs: their fields
are for programs, their `repr` and, in a notebook, their table are for people.
"""

import importlib
import logging
from typing import TYPE_CHECKING

from typing_extensions import override

# First of all, as tasks on Spark begin here: it finds our own `index` where a file of that name lies beside a script.
import tidemark.errors  # noqa: F401

if TYPE_CHECKING:
    from engine.backup.backup import BackupOptions as BackupOptions
    from engine.backup.backup import BackupResult as BackupResult
    from engine.backup.live import LiveRocksDb as LiveRocksDb
    from engine.checkpoint.backup import BackupChoice as BackupChoice
    from engine.checkpoint.backup import backup_checkpoint as backup_checkpoint
    from engine.checkpoint.check import check_checkpoint as check_checkpoint
    from engine.checkpoint.convert import ConvertChoice as ConvertChoice
    from engine.checkpoint.convert import convert_checkpoint as convert_checkpoint
    from engine.checkpoint.restore import RestoreChoice as RestoreChoice
    from engine.checkpoint.restore import restore_checkpoint as restore_checkpoint
    from engine.collect.report import CollectReport as CollectReport
    from engine.inspect.history import History as History
    from engine.inspect.verify import VerifyReport as VerifyReport
    from engine.repository.repository import Repository as Repository
    from engine.repository.repository import SyncRepository as SyncRepository
    from engine.restore.restore import Restored as Restored
    from engine.restore.restore import RestoredAll as RestoredAll
    from engine.restore.restore import RestoreOptions as RestoreOptions
    from engine.restore.restore import RestoreResult as RestoreResult
    from engine.state.query import StreamingCheckpoint as StreamingCheckpoint
    from engine.state.restore import StateRestoreOptions as StateRestoreOptions
    from engine.state.settings import StateStoreSettings as StateStoreSettings
    from engine.state.store import StateStore as StateStore
    from engine.state.store import SyncStateStore as SyncStateStore
    from engine.state.store import open_query_state as open_query_state
    from index.plan.commits import Commit as Commit
    from index.snapshot.delta import IndexDifference as IndexDifference

# Where each name is defined: it is imported when somebody asks for it (PEP 562), so that a use of one loads no other.
_NAMES = {
    "engine.backup.backup": "BackupOptions BackupResult",
    "engine.backup.live": "LiveRocksDb",
    "engine.checkpoint.backup": "BackupChoice backup_checkpoint",
    "engine.checkpoint.check": "check_checkpoint",
    "engine.checkpoint.convert": "ConvertChoice convert_checkpoint",
    "engine.checkpoint.restore": "RestoreChoice restore_checkpoint",
    "engine.collect.report": "CollectReport",
    "engine.inspect.history": "History",
    "engine.inspect.verify": "VerifyReport",
    "engine.repository.repository": "Repository SyncRepository",
    "engine.restore.restore": "Restored RestoredAll RestoreOptions RestoreResult",
    "engine.state.query": "StreamingCheckpoint",
    "engine.state.restore": "StateRestoreOptions",
    "engine.state.settings": "StateStoreSettings",
    "engine.state.store": "StateStore SyncStateStore open_query_state",
    "index.plan.commits": "Commit",
    "index.snapshot.delta": "IndexDifference",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULES)


class _Quiet(logging.NullHandler):
    """Lets nothing be seen where nobody has configured logging, but for errors, which Python shows.

    An error is logged only where nobody is there to raise it to, such as in the thread of a listener.
    """

    @override
    def handle(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR and not self._is_shown(record) and logging.lastResort is not None:
            logging.lastResort.handle(record)
        return True

    def _is_shown(self, record: logging.LogRecord) -> bool:
        """Return whether a record also comes to a handler that somebody has configured."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


logging.getLogger(__name__).addHandler(_Quiet())


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
