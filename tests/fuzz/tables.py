"""Targets for what becomes Arrow: the inventory of a collection, and rows of Spark's."""

from typing import Final

from engine.spark.collection.tasks import decode_inventory
from engine.spark.sources.unsafe_rows import Table, decode_keys, decode_pairs, decode_rows, split_bytes, split_typed
from index.plan import plan_format
from index.spark import schema as state_schema
from tests.fuzz.target import Target

SUBJECT: Final = "fuzzed"
# A row of one number, and a key of two such rows with a length of four bytes before them.
_ROW_BYTES: Final = 17
_PREFIXED_BYTES: Final = 4 + 2 * _ROW_BYTES
_LONGS: Final = (
    '{"type":"struct","fields":[{"name":"a","type":"long","nullable":true,"metadata":{}},'
    '{"name":"b","type":"long","nullable":true,"metadata":{}}]}'
)


def run_inventory(data: bytes) -> None:
    table = decode_inventory(data, plan_format.SHARDS[0])
    for name in table.column_names:
        table[name].to_pylist()


_FIELDS: Final = tuple(
    f'{{"name":"f","type":{of},"nullable":true,"metadata":{{}}}}'
    for of in (
        '"long"',
        '"binary"',
        '"decimal(38,4)"',
        '{"type":"array","elementType":"short","containsNull":true}',
        '{"type":"map","keyType":"integer","valueType":"binary","valueContainsNull":true}',
        '{"type":"struct","fields":[{"name":"g","type":"binary","nullable":true,"metadata":{}}]}',
    )
)


def run_unsafe_rows(data: bytes) -> None:
    """The first byte has which fields a row has, the second where the bytes are cut into two rows."""
    if len(data) < 2:
        return
    chosen = ",".join(field for bit, field in enumerate(_FIELDS) if data[0] >> bit & 1)
    of = state_schema.decode_type(f'{{"type":"struct","fields":[{chosen}]}}')
    assert isinstance(of, state_schema.StructType)
    of = state_schema.with_unique_names(of)
    assert isinstance(of, state_schema.StructType)
    cut = 2 + data[1] * 8 + 1
    rows = [data[2:cut], data[cut:]]
    array = decode_rows(of, rows, subject=SUBJECT)
    array.validate(full=True)
    assert len(array.to_pylist()) == len(rows)
    keys, values = decode_pairs(of, of, [(rows[0], rows[1])], subject=SUBJECT)
    assert (len(keys), len(values)) == (1, 1)


def run_prefixed_rows(data: bytes) -> None:
    """Keys of two rows, the length of the first before it, and values of one."""
    of = state_schema.decode_type(_LONGS)
    assert isinstance(of, state_schema.StructType)
    table = Table(key=of, value=of, prefix_columns=1)
    assert len(split_bytes("default", [(data, data)])[0]) == 1
    key, value = data[:_PREFIXED_BYTES], data[_PREFIXED_BYTES:]
    assert len(decode_keys(table, [key, key], subject=SUBJECT)) == len((key, key))
    assert [len(part) for part in split_typed(table, [(key, value)], subject=SUBJECT)] == [1, 1]


TARGETS: Final = (
    Target(name="inventory", run=run_inventory, covers=(decode_inventory,)),
    Target(name="prefixed-rows", run=run_prefixed_rows, covers=(split_typed, split_bytes, decode_keys), bytes_max=256),
    Target(name="unsafe-rows", run=run_unsafe_rows, covers=(decode_rows, decode_pairs), bytes_max=1024),
)
