"""Targets for what becomes Arrow: the inventory of a collection, and rows of Spark's."""

import contextlib
from collections import Counter
from typing import Final

from engine.arrow.block_keys import split_columns
from engine.arrow.key_hashes import partitions_of
from engine.arrow.unsafe_rows import decode_pairs, decode_rows
from engine.spark.collection.tasks import decode_inventory
from engine.spark.sources.tables import Table, decode_keys, decode_values, split_bytes, split_typed
from engine.state.blocks import Blocks, split_entries
from index.plan import plan_format
from index.rocksdb import sst
from index.spark import schema as state_schema
from index.spark.avro import decode_record
from index.spark.partition_keys import KeyRule, choose_key_rule, stored_type
from index.spark.schema import KeyForm
from index.spark.unsafe_row import decode_row
from tests.fuzz.target import Target

SUBJECT: Final = "fuzzed"
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
    stored = stored_type(of)
    assert isinstance(stored, state_schema.StructType)
    for row in rows:
        # The decoder of one row refuses what that of many does.
        with contextlib.suppress(ValueError):
            decode_row(stored, row[1:])
    array = decode_rows(of, rows, subject=SUBJECT)
    array.validate(full=True)
    assert len(array.to_pylist()) == len(rows)
    keys, values = decode_pairs(of, of, [(rows[0], rows[1])], subject=SUBJECT)
    assert (len(keys), len(values)) == (1, 1)


_FORMS: Final = (
    KeyForm("prefix", (0,)),
    KeyForm("range", (0,)),
    KeyForm("time_first", (1,)),
    KeyForm("time_last", (1,)),
    KeyForm(),
)
_KINDS: Final = ("value", "list", "map", "timer")


def run_tables(data: bytes) -> None:
    """The first byte has how keys and values are encoded, the second how long the key is; then both follow."""
    if len(data) < 2:
        return
    of = state_schema.decode_type(_LONGS)
    assert isinstance(of, state_schema.StructType)
    kind, form = divmod(data[0], len(_FORMS))
    avro = ((0, of),) if data[0] & 0x80 else ()
    table = Table(key=of, value=of, key_form=_FORMS[form], kind=_KINDS[kind % len(_KINDS)], delimiter=b",", avro=avro)
    key, value = data[2 : 2 + data[1]], data[2 + data[1] :]
    assert len(split_bytes("default", [(key, value)])[0]) == 1
    assert {len(column) for column in decode_keys(table, [key, key], subject=SUBJECT)} == {2}
    assert len(decode_values(table, [None, value], subject=SUBJECT)) == len((None, value))
    for columns in split_typed(table, [(key, value)], subject=SUBJECT):
        assert len({len(column) for column in columns}) == 1
    operator = "sessionWindowStateStoreSaveExec" if table.key_form.form == "prefix" else "symmetricHashJoin"
    schema = state_schema.StateSchema(family="left-tsWithKey", key=of, value=of)
    rule = choose_key_rule(0, operator, "default", schema, table.key_form, variables={}, is_avro=bool(avro))
    assert [rule.partition_of(key, 200)] == partitions_of(rule, [key], 200)


def run_block_keys(data: bytes) -> None:
    """The first byte has the size of a prefix, the second where the bytes are cut into two blocks."""
    if len(data) < 2:
        return
    blocks = Blocks.joined([block for block in (data[2 : 2 + data[1]], data[2 + data[1] :]) if block])
    found = []
    for split in (split_entries, split_columns):
        with contextlib.suppress(NotImplementedError):
            found.append(Counter((prefix, key) for prefix, keys in split(blocks, data[0] % 3) for key in keys))
    assert len(found) < 2 or found[0] == found[1]


TARGETS: Final = (
    Target(
        name="block-keys",
        run=run_block_keys,
        covers=(split_entries, split_columns, sst.decode_rows),
        refuses=(ValueError,),
        bytes_max=1024,
    ),
    Target(name="inventory", run=run_inventory, covers=(decode_inventory,)),
    Target(
        name="tables",
        run=run_tables,
        covers=(split_typed, split_bytes, decode_keys, decode_values, decode_record, KeyRule.partition_of),
        bytes_max=256,
    ),
    Target(name="unsafe-rows", run=run_unsafe_rows, covers=(decode_rows, decode_pairs, decode_row), bytes_max=1024),
)
