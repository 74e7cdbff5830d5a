"""What was merged into a loaded version and does not stand in RocksDB yet.

rocksdict cannot write operands, so to merge is to set the whole value anew: one by one, a thousand operands of one key
would cost what half a million do. Here they wait, and those of a key are joined once, when somebody looks.
"""

from typing import Final

from engine.rocksdb.store import StoreWriter

# They are written when there are so many bytes of them, whoever looks.
OPERANDS_BYTES_MAX: Final = 4 * 1024 * 1024
# What an operand takes in memory beside its bytes.
_OVERHEAD_BYTES: Final = 100


class PendingOperands:
    """Operands by key, in the order they came. Not for use by two threads at once.

    Args:
        db: What they are merged into; its own value of such a key is behind until `write`.
    """

    def __init__(self, db: StoreWriter) -> None:
        self._db = db
        self._by_key: dict[bytes, list[bytes]] = {}
        self._size_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def add(self, key: bytes, operand: bytes) -> None:
        """Append to the value of a key."""
        operands = self._by_key.get(key)
        if operands is None:
            operands = self._by_key[key] = []
            self._size_bytes += len(key) + _OVERHEAD_BYTES
        operands.append(operand)
        self._size_bytes += len(operand) + _OVERHEAD_BYTES
        if self._size_bytes >= OPERANDS_BYTES_MAX:
            self.write()

    def drop(self, key: bytes) -> None:
        """The value of a key is about to be replaced or removed."""
        operands = self._by_key.pop(key, None)
        if operands is not None:
            self._size_bytes -= len(key) + _OVERHEAD_BYTES + sum(len(operand) + _OVERHEAD_BYTES for operand in operands)

    def write_one(self, key: bytes) -> None:
        """Write what was appended to this key; what fails can be tried again."""
        operands = self._by_key.get(key)
        if operands is None:
            return
        before = self._db.get(key)
        self._db.put(key, self._db.merge_delimiter.join(operands if before is None else (before, *operands)))
        self.drop(key)

    def write(self) -> None:
        """Write everything: one value after the other, which may be of any size."""
        for key in sorted(self._by_key):
            self.write_one(key)
