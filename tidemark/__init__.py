"""Back up and restore the RocksDB state of jobs: `from tidemark import SyncRepository`. On Spark: `tidemark.spark`.

It has the names that programs need, and nothing of its own but the base of all errors.
Each is imported when somebody asks for it (PEP 562): `index` and `blobstore` import `tidemark.errors` from here.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from tidemark.errors import ShadowedError
from tidemark.errors import TidemarkError as TidemarkError

if TYPE_CHECKING:
    from blobstore import installed_release
    from blobstore.errors import AccessDeniedError as AccessDeniedError
    from blobstore.errors import StoreError as StoreError
    from blobstore.errors import StoreUnavailableError as StoreUnavailableError
    from blobstore.opening import StoreSettings as StoreSettings
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
    from engine.errors import CommitUnknownError as CommitUnknownError
    from engine.errors import ConflictError as ConflictError
    from engine.errors import DamagedError as DamagedError
    from engine.errors import EngineError as EngineError
    from engine.errors import IncompleteError as IncompleteError
    from engine.errors import LeaseExpiredError as LeaseExpiredError
    from engine.errors import NotFoundError as NotFoundError
    from engine.errors import ShrunkError as ShrunkError
    from engine.errors import StaleResultError as StaleResultError
    from engine.errors import TargetError as TargetError
    from engine.errors import TooMuchToDeleteError as TooMuchToDeleteError
    from engine.errors import UnsafeSourceError as UnsafeSourceError
    from engine.errors import UsageError as UsageError
    from engine.inspect.history import History as History
    from engine.inspect.verify import Level as Level
    from engine.inspect.verify import VerifyReport as VerifyReport
    from engine.repository.repository import Repository as Repository
    from engine.repository.repository import SyncRepository as SyncRepository
    from engine.restore.restore import Restored as Restored
    from engine.restore.restore import RestoredAll as RestoredAll
    from engine.restore.restore import RestoreOptions as RestoreOptions
    from engine.restore.restore import RestoreResult as RestoreResult
    from engine.settings import TransferSettings as TransferSettings
    from engine.state.query import StreamingCheckpoint as StreamingCheckpoint
    from engine.state.restore import StateRestoreOptions as StateRestoreOptions
    from engine.state.settings import StateStoreSettings as StateStoreSettings
    from engine.state.store import StateStore as StateStore
    from engine.state.store import SyncStateStore as SyncStateStore
    from engine.state.store import open_query_state as open_query_state
    from index.errors import FormatError as FormatError
    from index.plan.commits import Commit as Commit
    from index.plan.commits import Retention as Retention
    from index.plan.commits import RetentionPolicy as RetentionPolicy
    from index.snapshot.delta import IndexDifference as IndexDifference
    from index.snapshot.model import Scope as Scope

    __all__: list[str]
    __version__ = installed_release()

# By the module that defines them.
_NAMES = {
    "engine.backup.backup": "BackupOptions BackupResult",
    "engine.backup.live": "LiveRocksDb",
    "engine.checkpoint.backup": "BackupChoice backup_checkpoint",
    "engine.checkpoint.check": "check_checkpoint",
    "engine.checkpoint.convert": "ConvertChoice convert_checkpoint",
    "engine.checkpoint.restore": "RestoreChoice restore_checkpoint",
    "engine.collect.report": "CollectReport",
    "engine.inspect.history": "History",
    "engine.inspect.verify": "VerifyReport Level",
    "engine.repository.repository": "Repository SyncRepository",
    "engine.restore.restore": "Restored RestoredAll RestoreOptions RestoreResult",
    "engine.state.query": "StreamingCheckpoint",
    "engine.state.restore": "StateRestoreOptions",
    "engine.state.settings": "StateStoreSettings",
    "engine.state.store": "StateStore SyncStateStore open_query_state",
    "index.plan.commits": "Commit Retention RetentionPolicy",
    "index.snapshot.delta": "IndexDifference",
    "blobstore.errors": "AccessDeniedError StoreError StoreUnavailableError",
    "blobstore.opening": "StoreSettings",
    "engine.errors": "CommitUnknownError ConflictError DamagedError EngineError IncompleteError LeaseExpiredError "
    "NotFoundError ShrunkError StaleResultError TargetError TooMuchToDeleteError UnsafeSourceError UsageError",
    "engine.settings": "TransferSettings",
    "index.errors": "FormatError",
    "index.snapshot.model": "Scope",
    "tidemark.errors": "ShadowedError TidemarkError",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


_ROOT = Path(__file__).parents[1]


_PACKAGES = ("blobstore", "engine", "index")


class _OwnPackages:
    """Finds the packages of Tidemark before a file of such a name that lies beside a script (PEP 451)."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(_ROOT)]) if name in _PACKAGES else None


def _find_packages() -> None:
    """Import our own `index` from now on, not an `index.py` beside a script, which is first on Python's path.

    One that the script has imported already stays what it is, and is refused: a process has one module of a name.
    """
    for name in [name for name in _PACKAGES if name in sys.modules]:
        found = getattr(sys.modules[name], "__file__", None)
        if found is None or Path(found).parent != _ROOT / name:
            # Where an import fails people see the message alone.
            message = f"{found or name} was imported, and hides {_ROOT / name}: {ShadowedError.default_hint}"
            raise ShadowedError(message, operation="import", subject=name)
    sys.meta_path.insert(0, _OwnPackages())


_find_packages()


# Type checkers see the names above, and report any other.
if not TYPE_CHECKING:
    __all__ = list(_MODULES)

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return importlib.import_module("blobstore").installed_release()
        if name not in _MODULES:
            raise AttributeError(f"module 'tidemark' has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
