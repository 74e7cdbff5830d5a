"""Targets for what becomes Arrow: the inventory of a collection, and rows of Spark's."""

from typing import Final

from engine.spark.collect_listing import decode_inventory
from engine.spark.unsafe_rows import decode_pairs, decode_rows
from index import run_file, state_schema
from tests.fuzz.target import Target

SUBJECT: Final = "fuzzed"


def run_inventory(data: bytes) -> None:
    table = decode_inventory(data, run_file.SHARDS[0])
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
    if len(data) < 2:  # noqa: PLR2004  # a test
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


TARGETS: Final = (
    Target(name="inventory", run=run_inventory, covers=(decode_inventory,)),
    Target(name="unsafe-rows", run=run_unsafe_rows, covers=(decode_rows, decode_pairs), bytes_max=1024),
)
