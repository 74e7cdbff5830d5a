"""A scan of RocksDB that gives rows in lists: twice as fast as one by one.

rocksdict's own iterator over rows runs outside the interpreter, but ends at a damaged block as if there were no more:
so its end is looked at again with one of the same moment that tells.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, Protocol, Self

import msgspec

from engine.errors import EngineError, UsageError

# Rows that are taken at the most before anybody looks at their size.
_SLICE_ROWS_MAX: Final = 512


class Witness(Protocol):
    """An iterator that does not take damage for the end: rocksdict's `RdictIter`."""

    def seek(self, key: bytes) -> None:
        """Go to the first key that is not less."""
        ...

    def valid(self) -> bool:
        """Whether it stands at a row."""
        ...

    def status(self) -> None:
        """Raise what it has come to, if that is not the end."""
        ...

    def next(self) -> None:
        """Go on."""
        ...

    def key(self) -> Any:  # noqa: ANN401  # bytes in raw mode, which rocksdict's types do not say
        """The key of the row."""
        ...

    def value(self) -> Any:  # noqa: ANN401  # as above
        """The value of the row."""
        ...


class ChunkLimits(msgspec.Struct, frozen=True):
    """How much a list holds: so many rows at the most, and about so many bytes."""

    rows_max: int
    bytes_max: int


class ChunkScan:
    """The iterator behind `StoreReader.chunks`.

    Args:
        rows: rocksdict's iterator over rows, at the first one with the prefix.
        witness: Of the same moment.
        prefix: Of the keys that are wanted.
        limits: Of a list.
        typed: The error to raise instead of rocksdict's.
    """

    def __init__(
        self,
        rows: Iterator[Any],
        witness: Witness,
        prefix: bytes,
        limits: ChunkLimits,
        typed: Callable[[Exception], EngineError],
    ) -> None:
        self._rows = rows
        self._witness: Witness | None = witness
        self._prefix = prefix
        self._limits = limits
        self._typed = typed
        self._last: bytes | None = None
        self._slice_rows = 1
        self._state: Literal["open", "beyond", "ended"] = "open"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[tuple[bytes, bytes]]:
        if self._state == "ended":
            raise StopIteration
        if self._witness is None:
            raise UsageError("the store was closed during a scan", operation="scan")
        try:
            found = self._take_chunk(self._witness)
        except Exception as error:
            raise self._typed(error) from error
        if self._state == "beyond":
            self._state = "ended"
            self.cut_off()
        if not found:
            raise StopIteration
        return found

    def cut_off(self) -> None:
        """Let go of RocksDB's iterators; a scan that had not ended raises from now on."""
        self._rows, self._witness = iter(()), None

    def _take_chunk(self, witness: Witness) -> list[tuple[bytes, bytes]]:
        rows_max, bytes_max = self._limits.rows_max, self._limits.bytes_max
        found: list[tuple[bytes, bytes]] = []
        size_bytes = 0
        while len(found) < rows_max and size_bytes < bytes_max and self._state == "open":
            more = self._take(witness, min(self._slice_rows, rows_max - len(found)))
            found += more
            more_bytes = sum(map(len, itertools.chain.from_iterable(more)))
            size_bytes += more_bytes
            fit = bytes_max * len(more) // (more_bytes + 1)
            self._slice_rows = max(1, min(fit, 2 * self._slice_rows, _SLICE_ROWS_MAX))
        return found

    def _take(self, witness: Witness, rows_max: int) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = list(itertools.islice(self._rows, rows_max))
        if not found:
            self._look_at_end(witness)
            return found
        self._last = found[-1][0]
        if not self._last.startswith(self._prefix):
            self._state = "beyond"
            del found[bisect_left(found, 1, key=lambda row: 0 if row[0].startswith(self._prefix) else 1) :]
        return found

    def _look_at_end(self, witness: Witness) -> None:
        """Whether this is the end, or a block cannot be read; if neither, the witness goes on from here."""
        witness.seek(self._prefix if self._last is None else self._last)
        if self._last is not None and witness.valid() and witness.key() == self._last:
            witness.next()
        if witness.valid():
            self._rows = _remaining(witness)
        else:
            witness.status()
            self._state = "beyond"


def _remaining(witness: Witness) -> Iterator[tuple[bytes, bytes]]:
    """The rows from where an iterator stands, to its end or to a damaged block."""
    while witness.valid():
        yield witness.key(), witness.value()
        witness.next()
