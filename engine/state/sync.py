"""The state store for callers without an event loop: Spark workers, scripts, notebooks."""

from engine.blocking import Blocking, Direct, Facade, Opening
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
    get = Direct(StateStore.get)
    items = Direct(StateStore.items)
    put = Direct(StateStore.put)
    merge = Direct(StateStore.merge)
    delete = Direct(StateStore.delete)
    add_family = Direct(StateStore.add_family)
    drop_family = Direct(StateStore.drop_family)

    @property
    def version(self) -> int | None:
        """Return the loaded version; None if none is loaded."""
        return self.asynchronous.version

    @property
    def unique_id(self) -> UniqueId | None:
        """Return the unique id of the loaded version; None without one."""
        return self.asynchronous.unique_id

    @property
    def lineage(self) -> tuple[LineageItem, ...]:
        """Return the versions from the newest known snapshot to the loaded one; empty without ids."""
        return self.asynchronous.lineage

    @property
    def num_keys(self) -> int:
        """Return the number of keys, internal ones not counted."""
        return self.asynchronous.num_keys

    @property
    def num_internal_keys(self) -> int:
        """Return the number of keys of internal column families."""
        return self.asynchronous.num_internal_keys

    @property
    def families(self) -> tuple[str, ...]:
        """Return the names of the column families."""
        return self.asynchronous.families

    @property
    def last_load(self) -> LoadMetrics | None:
        """Return what the last load did and took; None before the first."""
        return self.asynchronous.last_load

    @property
    def last_save(self) -> SaveMetrics:
        """Return what the last saves did and took."""
        return self.asynchronous.last_save
