"""A small stateful job for tests: how often each key was seen and the sum of its amounts."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa

from engine.rocksdb.store import StoreReader, StoreWriter

SUMS = pa.schema([("key", pa.string()), ("seen", pa.int64()), ("amount", pa.int64())])
SUMS_DDL = "key string, seen bigint, amount bigint"


def add(store: StoreWriter, batches: Iterator[pa.RecordBatch], task: str) -> None:
    for batch in batches:
        add_batch(store, batch)


def add_batch(store: StoreWriter, batch: pa.RecordBatch) -> None:
    for key, amount in zip(batch.column("key").to_pylist(), batch.column("amount").to_pylist(), strict=True):
        name = str(key).encode()
        seen, total = msgspec.msgpack.decode(store.get(name) or b"\x92\x00\x00")
        store.put(name, msgspec.msgpack.encode((seen + 1, total + amount)))


def read_sums(store: StoreReader, task: str) -> Iterator[pa.RecordBatch]:
    rows = [(key.decode(), *msgspec.msgpack.decode(value)) for key, value in store.items()]
    if rows:
        columns = zip(*rows, strict=True)
        yield pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SUMS, strict=True)], schema=SUMS)


def once(marker: Path) -> bool:
    """Whether this is the first call with this marker, of whichever process."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
