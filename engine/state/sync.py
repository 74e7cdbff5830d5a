"""The state store for callers without an event loop: Spark workers, scripts, notebooks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

from engine.blocking import Blocking, Facade
from engine.clock import Runtime
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.families import DEFAULT_FAMILY
from engine.state.metrics import LoadMetrics, SaveMetrics
from engine.state.query import open_query_state
from engine.state.settings import StateStoreSettings
from engine.state.sources import StateFiles
from engine.state.store import StateStore
from index.snapshot.model import LineageItem, UniqueId
from index.spark.query_logs import DEFAULT_STORE


class SyncStateStore(Facade[StateStore]):
    """The methods of `StateStore`, blocking. Use it as a context manager, or call `close`.

    Rows are read and written in the calling thread; snapshots go on their way in a thread of the store's own.
    """

    @classmethod
    def open(
        cls,
        files: StateFiles | CheckpointDir | str | Path,
        directory: Path,
        settings: StateStoreSettings | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> Self:
        """As `StateStore.open`."""
        return cls._begin(StateStore.open(files, directory, settings, runtime=runtime))

    @classmethod
    def of_query(
        cls,
        location: str | Path,
        directory: Path,
        *,
        batch: int | None = None,
        operator: int = 0,
        partition: int = 0,
        store: str = DEFAULT_STORE,
    ) -> Self:
        """As `open_query_state`: one store of a query as a batch left it, loaded to be read."""
        opening = open_query_state(
            location, directory, batch=batch, operator=operator, partition=partition, store=store
        )
        return cls._begin(opening)

    load = Blocking(StateStore.load)
    commit = Blocking(StateStore.commit)
    abort = Blocking(StateStore.abort)
    maintain = Blocking(StateStore.maintain)

    @property
    def version(self) -> int | None:
        """As `StateStore.version`."""
        return self.asynchronous.version

    @property
    def unique_id(self) -> UniqueId | None:
        """As `StateStore.unique_id`."""
        return self.asynchronous.unique_id

    @property
    def lineage(self) -> tuple[LineageItem, ...]:
        """As `StateStore.lineage`."""
        return self.asynchronous.lineage

    @property
    def num_keys(self) -> int:
        """As `StateStore.num_keys`."""
        return self.asynchronous.num_keys

    @property
    def num_internal_keys(self) -> int:
        """As `StateStore.num_internal_keys`."""
        return self.asynchronous.num_internal_keys

    @property
    def families(self) -> tuple[str, ...]:
        """As `StateStore.families`."""
        return self.asynchronous.families

    @property
    def last_load(self) -> LoadMetrics | None:
        """As `StateStore.last_load`."""
        return self.asynchronous.last_load

    @property
    def last_save(self) -> SaveMetrics:
        """As `StateStore.last_save`."""
        return self.asynchronous.last_save

    def get(self, key: bytes, family: str = DEFAULT_FAMILY) -> bytes | None:
        """As `StateStore.get`."""
        return self.asynchronous.get(key, family)

    def items(
        self, prefix: bytes = b"", *, family: str = DEFAULT_FAMILY, start: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        """As `StateStore.items`."""
        return self.asynchronous.items(prefix, family=family, start=start)

    def put(self, key: bytes, value: bytes, family: str = DEFAULT_FAMILY) -> None:
        """As `StateStore.put`."""
        self.asynchronous.put(key, value, family)

    def merge(self, key: bytes, operand: bytes, family: str = DEFAULT_FAMILY) -> None:
        """As `StateStore.merge`."""
        self.asynchronous.merge(key, operand, family)

    def delete(self, key: bytes, family: str = DEFAULT_FAMILY) -> None:
        """As `StateStore.delete`."""
        self.asynchronous.delete(key, family)

    def add_family(self, name: str, *, internal: bool = False) -> bool:
        """As `StateStore.add_family`."""
        return self.asynchronous.add_family(name, internal=internal)

    def drop_family(self, name: str) -> bool:
        """As `StateStore.drop_family`."""
        return self.asynchronous.drop_family(name)
