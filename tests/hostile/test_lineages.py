"""Changelogs whose headers lead in circles, back, twice or nowhere: a load ends, with the error that says so (H6)."""

from pathlib import Path
from typing import Final

import pytest

from engine.errors import EngineError
from engine.state.compression import Compressor
from index.errors import DamagedChangelogError, FormatError, LineageError, UnsafeNameError
from index.java_text import encode_utf
from index.snapshot.model import LineageItem, UniqueId
from index.spark.changelog import PUT, encode_end, encode_header, encode_record
from tests.fuzz.target import check_refusal
from tests.unit.engine.state.state_store_kit import Bench, Ids, write_numbers

NEWEST: Final = 4
LONGEST: Final = 65_000


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def forge(path: Path, header: bytes) -> None:
    """Write a changelog with another header, and no checksum beside it."""
    compressor = Compressor("lz4")
    data = header + encode_record(3, (PUT, b"k", b"v")) + encode_end(3)
    path.write_bytes(compressor.write(data) + compressor.finish())
    path.with_name(f"{path.name}.crc").unlink(missing_ok=True)


def text(lineage: str) -> bytes:
    """A header with a lineage that no encoder writes."""
    return encode_header(3)[:4] + encode_utf(lineage)


def chain(*versions: int, ids: Ids) -> bytes:
    """A header that names versions with the ids that they have, the newest one's for those that are not there."""
    named = [ids[version] if 0 < version < len(ids) else ids[-1] for version in versions]
    return encode_header(
        3, [LineageItem(version, UniqueId(str(of))) for version, of in zip(versions, named, strict=True)]
    )


async def written(bench: Bench) -> Ids:
    """Four versions, of which only the first has a snapshot that could be a base."""
    ids: Ids = [None]
    async with bench.store(format_version=2, deltas_per_snapshot=100) as store:
        await write_numbers(store, ids, range(1, NEWEST + 1))
    return ids


async def refused(bench: Bench, ids: Ids) -> Exception:
    async with bench.store(format_version=2) as store:
        with pytest.raises((FormatError, EngineError)) as error:
            await store.load(NEWEST, ids[NEWEST])
    check_refusal(error.value)
    return error.value


WAYS: Final = ((4,), (4, 3, 2, 1), (3, 3), (3, 3, 2, 2, 1, 1), (1, 2), (3, 1), (5, 6), (3, 2, 4), (1,), (2,))


async def test_a_lineage_that_does_not_lead_down_by_ones_is_refused(bench: Bench) -> None:
    ids = await written(bench)
    for versions in WAYS:
        forge(bench.file(NEWEST, "changelog"), chain(*versions, ids=ids))
        assert isinstance(await refused(bench, ids), LineageError), versions


async def test_two_changelogs_that_name_each_other_are_refused(bench: Bench) -> None:
    ids = await written(bench)
    forge(bench.file(3, "changelog"), chain(4, ids=ids))
    forge(bench.file(4, "changelog"), chain(3, ids=ids))
    assert isinstance(await refused(bench, ids), LineageError)


TEXTS: Final = (
    "",
    "[",
    "null",
    "{}",
    "[" * LONGEST,
    '[{"version":3,"checkpointUniqueId":"../../x"}]',
    '[{"version":3,"checkpointUniqueId":"a/b"}]',
    '[{"version":3,"checkpointUniqueId":""}]',
    '[{"version":-3,"checkpointUniqueId":"a"}]',
    '[{"version":1e300,"checkpointUniqueId":"a"}]',
    '[{"version":99999999999999999999,"checkpointUniqueId":"a"}]',
    '[{"version":3}]',
)


async def test_a_lineage_that_is_none_is_refused(bench: Bench) -> None:
    ids = await written(bench)
    for lineage in TEXTS:
        forge(bench.file(NEWEST, "changelog"), text(lineage))
        error = await refused(bench, ids)
        assert isinstance(error, DamagedChangelogError | LineageError | UnsafeNameError), lineage[:40]
