"""Check single objects, whatever they mean: who deletes, in which order, and when a TTL goes.

Part of the history: notified of every record and every object that is created or about to be deleted. Of a TTL that
is removed it is not notified; the next change that comes finds it gone.
"""

from collections.abc import Callable, Collection, Mapping

import msgspec

from blobstore.s3.bucket_rules import EXPIRING
from index.snapshot.model import CommitRecord
from tests.simulation.model.s3 import SimObject

# What is created once and never replaced (K2); names and pins are overwritten when they are released.
_ONCE = ("blobs/", "indexes/", "log/")


class _NewIndex(msgspec.Struct, frozen=True):
    """An index that still has its TTL, with the blobs that are new in it."""

    name: str
    blobs: tuple[str, ...]


class Uploads:
    """K2, D1 and T1, of single objects.

    Args:
        objects: What the bucket holds, by name.
        root: What every name of the repository begins with.
        ways: The keys that each index leads to, its own too.
        violated: Called with what broke a rule.
    """

    def __init__(
        self,
        objects: Mapping[str, SimObject],
        root: str,
        ways: Mapping[str, frozenset[str]],
        violated: Callable[[str], None],
    ) -> None:
        self._objects = objects
        self._root = root
        self._ways = ways
        self._violated = violated
        self._there = {name.removeprefix(root) for name in objects}
        # Every key that any record has ever led to.
        self._recorded: set[str] = set()
        self._unsettled: list[_NewIndex] = []
        # Records that were valid once and still are there, with the keys that each leads to.
        self._standing: dict[str, frozenset[str]] = {}

    def copy(
        self, objects: Mapping[str, SimObject], ways: Mapping[str, frozenset[str]], violated: Callable[[str], None]
    ) -> "Uploads":
        """The same, of copies of the objects."""
        copied = Uploads(objects, self._root, ways, violated)
        copied._recorded, copied._unsettled = set(self._recorded), list(self._unsettled)
        copied._standing = dict(self._standing)
        return copied

    def created(self, process: str, key: str) -> None:
        """An object was created or replaced."""
        if key in self._there and key.startswith(_ONCE):
            self._violated(f"K2: {process} replaces {key}")
        self._there.add(key)

    def recorded(self, key: str, record: CommitRecord, *, was_valid: bool) -> None:
        """A record was created; what is new in it has its TTL until somebody could know of it (T1)."""
        led: set[str] = set()
        for store in record.stores:
            way = self._ways.get(store.index.key, frozenset({store.index.key}))
            led |= way
            if store.index.key in self._recorded:
                continue
            new = way - self._recorded
            for name in map(self._root.__add__, new):
                if name in self._objects and self._objects[name].tag != EXPIRING:
                    self._violated(f"T1: {name} has lost its TTL before there was a record, {key}")
            blobs = tuple(self._root + k for k in new if k.startswith("blobs/"))
            self._unsettled.append(_NewIndex(self._root + store.index.key, blobs))
            self._recorded |= way
        if was_valid:
            self._standing[key] = frozenset(led)

    def deleting(self, process: str, key: str, *, may_delete: bool) -> None:
        """An object is about to be deleted, by a process or (with an empty name) by the store itself."""
        self._there.discard(key)
        self._standing.pop(key, None)
        if process and not may_delete:
            self._violated(f"D1: {process}, which does not collect, deletes {key}")
        if process and key.startswith(("blobs/", "indexes/")):
            stored = self._objects[self._root + key]
            if stored.tag != EXPIRING and key not in self._recorded:
                self._violated(f"T1: {key} has lost its TTL, and no record has ever led to it")
            for record, led in self._standing.items():
                if key in led:
                    self._violated(f"D1: {process} deletes {key} before {record}, which leads to it")

    def look(self, but: Collection[str] = ()) -> None:
        """T1: an index that has lost its TTL vouches for the blobs that are new in it.

        Args:
            but: Keys of which nothing is known any more.
        """
        if not self._unsettled:
            return
        left: list[_NewIndex] = []
        for index in self._unsettled:
            stored = self._objects.get(index.name)
            if stored is None:
                continue
            if stored.tag == EXPIRING:
                left.append(index)
                continue
            for name in index.blobs:
                blob = self._objects.get(name)
                if blob is not None and blob.tag == EXPIRING and name.removeprefix(self._root) not in but:
                    self._violated(f"T1: {index.name} has lost its TTL before {name}, which is new in it")
        self._unsettled = left
