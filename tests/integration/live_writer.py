"""A process that writes to a RocksDB until it is ended, and the history of what it writes (design 0012).

Its operations follow from a seed, so that the state after any of them can be made again. `python -m
tests.integration.live_writer DIRECTORY KIND KEYS RATE` says "begun" once there is something to copy, and from then on
does RATE operations a second, or as many as it can if that is 0.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import rocksdict

# With a write-ahead log; without one; with one whose files are written again; two column families whose rows come in
# one batch, with a write-ahead log, and without one but with memtables that are flushed together.
KINDS: Final = ("wal", "no-wal", "recycled", "families", "atomic")
OTHER: Final = "other"
VALUE_BYTES: Final = 400
_ROOT: Final = Path(__file__).parents[2]
Rows = dict[bytes, bytes]


class Operation(NamedTuple):
    """A row is put, or deleted if it is None; with families, in both of them."""

    key: bytes
    value: bytes | None


def operations(keys: int) -> Iterator[Operation]:
    """Yield what a writer does, for ever: each value has the number of its operation, and one in ten deletes."""
    rng = random.Random(keys)
    filling = rng.randbytes(VALUE_BYTES)
    number = 0
    while True:
        key = b"%08d" % rng.randrange(keys)
        yield Operation(key, None if rng.random() < 0.1 else b"%016d" % number + filling[number % VALUE_BYTES :])
        number += 1


class History:
    """The state after each operation, from the first one on: it never goes back."""

    def __init__(self, keys: int) -> None:
        self.rows: Rows = {}
        self.number = -1
        self._operations = operations(keys)

    def find(self, rows: Rows) -> int | None:
        """Return after which operation exactly these rows were there; None if there is no such state from here on."""
        newest = max((int(value[:16]) for value in rows.values()), default=-1)
        while self.number < newest:
            self._step()
        for _ in range(200):
            if self.rows == rows:
                return self.number
            # Those after the newest row can only have deleted some.
            self._step()
        return None

    def _step(self) -> None:
        self.number += 1
        key, value = next(self._operations)
        if value is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = value


def options(kind: str) -> rocksdict.Options:
    made = rocksdict.Options(raw_mode=True)
    made.create_if_missing(create_if_missing=True)
    made.create_missing_column_families(create_missing_cfs=True)
    made.set_write_buffer_size(256 * 1024)
    made.set_target_file_size_base(16 * 1024)
    made.set_level_zero_file_num_compaction_trigger(2)
    made.set_max_bytes_for_level_base(512 * 1024)
    made.set_compression_type(rocksdict.DBCompressionType.none())
    # Files this small make a MANIFEST long, which each copy has and each RocksDB reads that opens one. A new one begins
    # every few minutes.
    made.set_max_manifest_file_size(2 * 1024 * 1024)
    if kind == "recycled":
        made.set_recycle_log_file_num(4)
    if kind == "atomic":
        made.set_atomic_flush(atomic_flush=True)
    return made


def open_writer(directory: Path, kind: str) -> rocksdict.Rdict:
    families = {OTHER: options(kind)} if kind in {"families", "atomic"} else None
    return rocksdict.Rdict(str(directory), options(kind), families)


def read_rows(directory: Path, family: str = "default") -> Rows:
    """Open a copy as RocksDB does by default, to read, and read all of it."""
    plain = rocksdict.Options(raw_mode=True)
    plain.set_paranoid_checks(enabled=True)
    names = rocksdict.Rdict.list_cf(str(directory), plain)
    access = rocksdict.AccessType.read_only(error_if_log_file_exist=False)
    db = rocksdict.Rdict(str(directory), plain, dict.fromkeys(names, plain), access)
    opened = db if family == "default" else db.get_column_family(family)
    rows: Rows = {bytes(key): bytes(value) for key, value in opened.items()}  # type: ignore[arg-type]  # raw mode
    if opened is not db:
        opened.close()
    db.close()
    return rows


@contextmanager
def writing(directory: Path, kind: str, keys: int, *, rate: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Let another process write, until it is killed at the end of the block."""
    command = [sys.executable, "-m", "tests.integration.live_writer", str(directory), kind, str(keys), str(rate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "begun\n"
            yield writer
            assert writer.poll() in {None, -signal.SIGKILL}, "the writer has failed"
        finally:
            writer.kill()


def main() -> None:
    directory, kind, keys, rate = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    db = open_writer(directory, kind)
    how = rocksdict.WriteOptions()
    how.disable_wal = kind in {"no-wal", "atomic"}  # type: ignore[method-assign,assignment]  # rocksdict's stub errs
    has_families = kind in {"families", "atomic"}
    handles = [db.get_column_family_handle(name) for name in ("default", OTHER)] if has_families else []
    began_s, parent = 0.0, os.getppid()
    for number, (key, value) in enumerate(operations(keys)):
        if has_families:
            batch = rocksdict.WriteBatch(raw_mode=True)
            for handle in handles:
                if value is None:
                    batch.delete(key, handle)
                else:
                    batch.put(key, value, handle)
            db.write(batch, how)
        elif value is None:
            db.delete(key, how)
        else:
            db.put(key, value, how)
        if not number % 1000 and os.getppid() != parent:
            return  # nobody is there to end it
        begun = number - 4 * keys
        if rate and begun > 0 and not begun % 50:
            time.sleep(max(0, began_s + begun / rate - time.monotonic()))
        if not begun:
            began_s = time.monotonic()
            sys.stdout.write("begun\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
