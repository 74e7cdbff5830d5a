"""The state store for callers without an event loop: Spark workers, scripts, notebooks."""

from collections.abc import Iterator

from engine.blocking import Blocking, Facade, Opening
from engine.state.loaded import DEFAULT_FAMILY
from engine.state.metrics import LoadMetrics, SaveMetrics
from engine.state.query import open_query_state
from engine.state.store import StateStore
from index.snapshot.model import LineageItem, UniqueId


class SyncStateStore(Facade[StateStore]):
    """The methods of `StateStore`, blocking. Use it as a context manager, or call `close`.

    Rows are read and written in the calling thread; snapshots go on their way in a thread of the store's own.
    """

    open = Opening(StateStore.open)
    of_query = Opening(open_query_state)
    load = Blocking(StateStore.load)
    commit = Blocking(StateStore.commit)
    abort = Blocking(StateStore.abort)
    maintain = Blocking(StateStore.maintain)

    @property
    def version(self) -> int | None:
        return self.asynchronous.version

    @property
    def unique_id(self) -> UniqueId | None:
        return self.asynchronous.unique_id

    @property
    def lineage(self) -> tuple[LineageItem, ...]:
        return self.asynchronous.lineage

    @property
    def num_keys(self) -> int:
        return self.asynchronous.num_keys

    @property
    def num_internal_keys(self) -> int:
        return self.asynchronous.num_internal_keys

    @property
    def families(self) -> tuple[str, ...]:
        return self.asynchronous.families

    @property
    def last_load(self) -> LoadMetrics | None:
        return self.asynchronous.last_load

    @property
    def last_save(self) -> SaveMetrics:
        return self.asynchronous.last_save

    def get(self, key: bytes, family: str = DEFAULT_FAMILY) -> bytes | None:
        return self.asynchronous.get(key, family)

    def items(
        self, prefix: bytes = b"", *, family: str = DEFAULT_FAMILY, start: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        return self.asynchronous.items(prefix, family=family, start=start)

    def put(self, key: bytes, value: bytes, family: str = DEFAULT_FAMILY) -> None:
        self.asynchronous.put(key, value, family)

    def merge(self, key: bytes, operand: bytes, family: str = DEFAULT_FAMILY) -> None:
        self.asynchronous.merge(key, operand, family)

    def delete(self, key: bytes, family: str = DEFAULT_FAMILY) -> None:
        self.asynchronous.delete(key, family)

    def add_family(self, name: str, *, internal: bool = False) -> bool:
        return self.asynchronous.add_family(name, internal=internal)

    def drop_family(self, name: str) -> bool:
        return self.asynchronous.drop_family(name)
