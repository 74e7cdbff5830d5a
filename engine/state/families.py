"""Virtual column families: a prefix of two bytes before every key is the family (design 0004, §3 L4).

RocksDB itself has one column family. A name gets the next number, and a number is never used twice in the life of a
store: what an old changelog says of a family that is gone must not reach a new one.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from engine.errors import DamagedError, UsageError

DEFAULT_FAMILY: Final = "default"
PREFIX_BYTES: Final = 2

# A signed 16-bit number. We give 1 and above, as Spark 4.3 does; its earlier sources begin at 0.
ID_MAX: Final = 2**15 - 1
NO_ID: Final = -1
NAME_CHARACTERS_MAX: Final = 1024


class ColumnFamily(msgspec.Struct, frozen=True):
    """One column family of a store."""

    name: str
    # NO_ID: families are off, and keys have no prefix.
    id: int
    # Whether it is bookkeeping of the operator, whose keys are counted apart.
    is_internal: bool = False

    @property
    def prefix(self) -> bytes:
        """The bytes before each of its keys: its number, little-endian as the machine that Spark runs on."""
        return self.id.to_bytes(PREFIX_BYTES, "little", signed=True) if self.id != NO_ID else b""


class ColumnFamilies:
    """The families of one loaded version.

    Attributes:
        is_enabled: Whether keys carry prefixes; if not, there is only `default`.
        id_max: The greatest number that was ever given.
    """

    def __init__(self, *, is_enabled: bool, families: tuple[ColumnFamily, ...] = (), id_max: int = 0) -> None:
        self.is_enabled = is_enabled
        self.id_max = max([id_max, *(family.id for family in families)]) if is_enabled else 0
        self._families: dict[str, ColumnFamily] = {}
        self._prefixes: dict[str, bytes] = {}
        self._internal_prefixes: frozenset[bytes] = frozenset()
        for family in families if is_enabled else (ColumnFamily(DEFAULT_FAMILY, NO_ID),):
            self._set(family)

    def __iter__(self) -> Iterator[ColumnFamily]:
        return iter(tuple(self._families.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._families

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of their numbers."""
        return tuple(family.name for family in sorted(self._families.values(), key=lambda family: family.id))

    @property
    def ids(self) -> tuple[tuple[str, int], ...]:
        """Names and numbers, as a snapshot's metadata has them: none if families are off."""
        return tuple((family.name, family.id) for family in self) if self.is_enabled else ()

    @property
    def internal(self) -> tuple[tuple[str, bool], ...]:
        """Names and whether they are internal, as a snapshot's metadata has them."""
        return tuple((family.name, family.is_internal) for family in self) if self.is_enabled else ()

    def prefix(self, name: str) -> bytes:
        """Return the prefix of the keys of a family; a `UsageError` if there is no such family."""
        try:
            return self._prefixes[name]
        except KeyError:
            known = ", ".join(self.names) or "none"
            hint = "add it with `add_family` first" if self.is_enabled else "the settings have no column families"
            reason = f"there is no such column family; there are: {known}"
            raise UsageError(reason, operation="state", subject=repr(name), hint=hint) from None

    def add(self, name: str, *, is_internal: bool) -> bool:
        """Give a name the next number; False if it has one.

        Raises:
            UsageError: Families are off, the name cannot be one, or all numbers are given.
        """
        if name in self._families:
            return False
        if not self.is_enabled:
            hint = "set `column_families`"
            raise UsageError("the settings have no column families", operation="add", subject=repr(name), hint=hint)
        if not name or name != name.strip() or len(name) > NAME_CHARACTERS_MAX:
            hint = "a name is not empty, has no space at its ends, and at most 1,024 characters"
            raise UsageError("is not a name of a column family", operation="add", subject=repr(name), hint=hint)
        if self.id_max >= ID_MAX:
            hint = "numbers of families that were dropped do not come back: begin a new store"
            raise UsageError(f"all {ID_MAX} numbers are given", operation="add", subject=repr(name), hint=hint)
        self.id_max += 1
        self._set(ColumnFamily(name, self.id_max, is_internal))
        return True

    def drop(self, name: str) -> None:
        del self._families[name]
        del self._prefixes[name]
        self._note_internal()

    def is_internal(self, stored_key: bytes) -> bool:
        """Return whether a key, with its prefix, is of an internal family."""
        return bool(self._internal_prefixes) and stored_key[:PREFIX_BYTES] in self._internal_prefixes

    def check_prefix(self, stored_key: bytes, directory: str) -> None:
        """Refuse a key whose family no snapshot names, and whose meaning is lost, with a `DamagedError`."""
        if stored_key[:PREFIX_BYTES] not in self._prefixes.values():
            hint = "the snapshot that named the families is needed: load a version that has one"
            reason = f"keys begin with {stored_key[:PREFIX_BYTES].hex()}, which is not a known column family"
            raise DamagedError(reason, operation="load", subject=directory, hint=hint)

    def _set(self, family: ColumnFamily) -> None:
        self._families[family.name] = family
        self._prefixes[family.name] = family.prefix
        self._note_internal()

    def _note_internal(self) -> None:
        internal = (family.prefix for family in self._families.values() if family.is_internal)
        self._internal_prefixes = frozenset(internal)


def after_prefix(prefix: bytes) -> bytes:
    """Return the least key that sorts after every key with this prefix: the end of their range."""
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")
