"""The option `family` on checkpoints that our own stores write: what is refused, and what it chooses."""

import asyncio
from pathlib import Path

import pytest

from engine.errors import DamagedError, NotFoundError, UsageError
from engine.spark.sources.sources import StateSource
from tests.unit.engine.checkpoint.written_query import WrittenQuery


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
