"""The option `family` on checkpoints that our own stores write: what is refused, and what it chooses."""

import asyncio
import struct
from pathlib import Path
from typing import Any, Final

import pytest
from typing_extensions import override

from engine.errors import DamagedError, NotFoundError, UsageError
from engine.spark.sources.sources import DiffSource, StateSource
from engine.state.query import StreamingCheckpoint
from engine.state.settings import ENCODING_KEY
from index.java_text import encode_utf
from index.snapshot.model import UniqueId
from index.spark.query_logs import OperatorMetadata, OperatorStore
from index.spark.schema import AtomType
from tests.unit.engine.checkpoint.written_query import WrittenQuery
from tests.unit.engine.spark.sources.test_tables import named, record
from tests.unit.index.spark.test_schema import SPEC, chunks, row_json
from tests.unit.index.spark.written_metadata import encode_operator
from tidemark import StateStore


def written(root: Path, *, families: bool) -> Path:
    async def write() -> None:
        query = await WrittenQuery(root / "checkpoint", root / "work", families=families).begin()
        await query.run(2)

    asyncio.run(write())
    return root / "checkpoint"


def read(checkpoint: Path, **options: str) -> tuple[list[str], int]:
    """Names of columns, and how many rows."""
    source = StateSource({"path": str(checkpoint), **options})
    schema = source.schema()
    reader = source.reader(schema)
    rows = sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))  # type: ignore[union-attr]
    return [field.name for field in schema.fields], rows


def test_a_family_that_the_operator_does_not_have_is_refused_with_those_it_has(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, families=True)
    for rows in ({}, {"rows": "typed"}, {"rows": "bytes"}):
        with pytest.raises(NotFoundError, match="no column family other") as caught:
            read(checkpoint, family="other", **rows)
        assert caught.value.hint.startswith("it has default;")
    with pytest.raises(UsageError) as refused:
        read(checkpoint, rows="typed")
    assert "`family` (default)" in refused.value.hint


def test_an_operator_without_column_families_has_none_to_choose(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="operator 0 has no column family default") as caught:
        read(written(tmp_path, families=False), family="default")
    assert caught.value.hint.startswith("it has none;")


def test_rows_that_do_not_fit_the_schema_of_their_family_are_an_error_and_can_be_read_as_bytes(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, families=True)
    with pytest.raises(DamagedError) as caught:
        read(checkpoint, family="default")
    assert "rows=bytes" in caught.value.hint
    columns, rows = read(checkpoint, family="default", rows="bytes")
    assert columns[4:] == ["family", "key", "value"]
    assert 0 < rows < read(checkpoint)[1], "there are rows of another family"


USER: Final = named(user=AtomType("string"))
OLD, NEW = named(n=AtomType("long")), named(n=AtomType("long"), note=AtomType("string"))
OLD_JSON, NEW_JSON = row_json(n="long"), row_json(n="long", note="string")


class EvolvingQuery(WrittenQuery):
    """A query with state in Avro: from batch 1 on values have one field more, and there is one variable more."""

    def __init__(self, root: Path, *, avro: bool) -> None:
        super().__init__(root / "checkpoint", root / "work", families=True, partitions=1)
        self._avro = avro

    def describe(self, batch: int, *, oldest: int = 0, **families: str) -> None:
        """Write what the operator says from a batch on: files from an oldest one on, families with types of values."""
        texts = [
            encode_utf(name)
            + struct.pack(">h", 0)
            + chunks(row_json(user="string"))
            + struct.pack(">h", batch if name == "count" else 0)
            + chunks(value)
            + chunks(SPEC)
            + chunks()
            for name, value in families.items()
        ]
        data = encode_utf("v3") + struct.pack(">i", len(texts)) + b"".join(texts)
        (self.root / f"state/0/_stateSchema/default/{batch}_abc").write_bytes(data)
        paths = tuple(f"file:{self.root}/state/0/_stateSchema/default/{n}_abc" for n in range(oldest, batch + 1))
        store = OperatorStore(name="default", prefix_columns_count=0, partitions_count=1, schema_paths=paths)
        operator = OperatorMetadata(version=2, id=0, name="transformWithStateExec", stores=(store,))
        (self.root / f"state/0/_metadata/v2/{batch}").write_bytes(encode_operator(operator))

    @property
    @override
    def _conf(self) -> dict[str, str]:
        return super()._conf | ({ENCODING_KEY: "avro"} if self._avro else {})

    @override
    async def _commit(self, checkpoint: StreamingCheckpoint, batch: int, partition: int) -> UniqueId | None:
        files = checkpoint.state_dir(0, partition)
        async with await StateStore.open(files, self._work / str(partition), self._settings) as store:
            await store.load(batch, self._ids[partition])
            store.add_family("seen" if batch else "count", internal=False)
            for user in ("ada", "bob")[batch:]:
                value = record(NEW, (7, "new"), schema=1) if batch else record(OLD, (5,))
                store.put(record(USER, (user,)), value, family="count")
            if batch:
                store.put(record(USER, ("eve",)), record(OLD, (1,)), family="seen")
            committed = await store.commit()
            await store.maintain()
        return committed.unique_id


def evolved(root: Path, *, avro: bool = True, oldest: int = 0, second: str = NEW_JSON) -> Path:
    async def write() -> None:
        query = await EvolvingQuery(root, avro=avro).begin()
        query.describe(0, count=OLD_JSON)
        await query.run(1)
        query.describe(1, oldest=oldest, count=second, seen=OLD_JSON)
        await query.run(1)

    asyncio.run(write())
    return root / "checkpoint"


def changes(checkpoint: Path, **options: str) -> list[dict[str, Any]]:
    source = DiffSource({"path": str(checkpoint), "from_batch": "0", **options})
    reader = source.reader(source.schema())
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]  # type: ignore[union-attr]
    return [{name: row[name] for name in row if name not in {"operator", "partition", "store"}} for row in rows]


def test_values_that_have_a_field_more_since_are_compared_by_the_newer_schema(tmp_path: Path) -> None:
    expected = {
        "change": "changed",
        "key": {"user": "bob"},
        "before": {"n": 5, "note": None},
        "after": {"n": 7, "note": "new"},
    }
    checkpoint = evolved(tmp_path)
    for rows in ({}, {"rows": "typed"}):
        assert changes(checkpoint, family="count", **rows) == [expected]
    backwards = {"change": "changed", "before": expected["after"], "after": expected["before"]}
    assert changes(checkpoint, family="count", from_batch="1", to_batch="0") == [expected | backwards]


def test_a_variable_that_is_new_since_has_only_rows_that_were_added(tmp_path: Path) -> None:
    checkpoint = evolved(tmp_path)
    added = {"change": "added", "key": {"user": "eve"}, "before": None, "after": {"n": 1}}
    for rows in ({}, {"rows": "typed"}):
        assert changes(checkpoint, family="seen", **rows) == [added]
        with pytest.raises(NotFoundError, match="no column family other") as caught:
            changes(checkpoint, family="other", **rows)
        assert caught.value.hint.startswith("it has count, seen;")
        with pytest.raises(NotFoundError, match="no column family seen"):
            read(checkpoint, family="seen", batch="0", **rows)
    (as_bytes,) = changes(checkpoint, family="seen", rows="bytes")
    assert (as_bytes["change"], as_bytes["before"]) == ("added", None)
    (removed,) = changes(checkpoint, family="seen", from_batch="1", to_batch="0")
    assert removed == added | {"change": "removed", "before": added["after"], "after": None}


@pytest.mark.parametrize(
    "query",
    [{"avro": False}, {"avro": False, "second": row_json(n="long", note="variant")}, {"oldest": 1}],
    ids=["evolved without Avro", "not known", "older schema is gone"],
)
def test_a_family_that_no_schema_fits_at_both_batches_is_refused_and_not_shown_as_bytes(
    tmp_path: Path, query: dict[str, Any]
) -> None:
    checkpoint = evolved(tmp_path, **query)
    for rows in ({}, {"rows": "typed"}):
        with pytest.raises(UsageError) as caught:
            changes(checkpoint, family="count", **rows)
        assert "rows=bytes" in caught.value.hint
    assert [row["change"] for row in changes(checkpoint, family="count", rows="bytes")] == ["changed"]
