"""Listing the keys of a real RocksDB: ranges, column families, hostile bytes, and a directory that is gone."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import rocksdict
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import DamagedError, NotFoundError, UsageError
from engine.inspect.browse import (
    SCRATCH_PREFIX,
    KeyPlace,
    KeyRange,
    RestoredRows,
    Rows,
    escape_bytes,
    find_keys,
    is_checkpoint_backup,
    opened_rows,
    parse_bytes,
    parse_place,
    write_place,
)
from engine.rocksdb.in_place import StoreInPlace, end_of_prefix
from engine.rocksdb.store import StoreWriter
from index.spark.checkpoint import CheckpointBackup
from tests.unit.engine.conftest import JOB, World
from tests.unit.engine.rocksdb.test_in_place import LocalRanges

HOSTILE = b"\x00\xff\x1b[31m\\"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A store with keys k0 to k4 and a hostile one, and a second column family."""
    directory = tmp_path / "state"
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(create_if_missing=True)
    db = rocksdict.Rdict(str(directory), options)
    family = db.create_column_family("extra", rocksdict.Options(raw_mode=True))
    for number in range(5):
        db[b"k%d" % number] = b"v%d" % number
    db[HOSTILE] = b"\x01"
    family[b"other"] = b"w"
    family.close()
    db.flush()
    db.close()
    return directory


@pytest.fixture(params=["in place", "restored"])
async def rows(request: pytest.FixtureRequest, state: Path) -> Rows:
    return RestoredRows(state) if request.param == "restored" else await StoreInPlace.open(LocalRanges(state))


async def test_all_families_are_browsed_in_the_order_of_their_keys(rows: Rows) -> None:
    found = await find_keys(rows, KeyRange(), keys_max=10, values=True, counted=True)
    assert [(k.family, k.key, k.value) for k in found.keys] == [
        ("default", HOSTILE, b"\x01"),
        *(("default", b"k%d" % n, b"v%d" % n) for n in range(5)),
        ("extra", b"other", b"w"),
    ]
    assert (found.count, found.next, found.families) == (7, None, ("default", "extra"))


@pytest.mark.parametrize(
    "wanted, keys",
    [
        (KeyRange(prefix=b"k"), [b"k0", b"k1", b"k2", b"k3", b"k4"]),
        (KeyRange(start=b"k3"), [b"k3", b"k4"]),
        (KeyRange(start=b"k1", stop=b"k3"), [b"k1", b"k2"]),
        (KeyRange(prefix=b"k", start=b"k4"), [b"k4"]),
        (KeyRange(prefix=b"z"), []),
        (KeyRange(stop=b"k"), [HOSTILE]),
    ],
)
async def test_a_range_has_its_keys_and_not_its_end(rows: Rows, wanted: KeyRange, keys: list[bytes]) -> None:
    found = await find_keys(rows, msgspec.structs.replace(wanted, family="default"), keys_max=10)
    assert [k.key for k in found.keys] == keys
    assert found.next is None


async def test_a_limit_says_where_to_go_on_and_a_count_goes_on_to_the_end(rows: Rows) -> None:
    found = await find_keys(rows, KeyRange(prefix=b"k"), keys_max=2)
    assert [k.key for k in found.keys] == [b"k0", b"k1"]
    assert found.next is not None
    assert (found.next.key, found.count) == (b"k2", None)
    counted = await find_keys(rows, KeyRange(), keys_max=0, counted=True)
    assert (counted.keys, counted.count) == ((), 7)


async def test_one_goes_on_in_a_family_with_those_behind_it_whole(rows: Rows) -> None:
    wanted = KeyRange(start=b"k", stop=b"p")
    pages, resume = [], None
    while True:
        found = await find_keys(rows, wanted, keys_max=2, resume=resume)
        pages.append([(k.family, k.key) for k in found.keys])
        assert found.families == ("default", "extra")
        if found.next is None:
            break
        resume = parse_place(write_place(KeyPlace(found.next.family, found.next.key)))
    default = [("default", b"k%d" % n) for n in range(5)]
    assert pages == [default[:2], default[2:4], [default[4], ("extra", b"other")]]
    # Behind the family to go on in, keys are listed from the beginning of the range and not from that place.
    assert [k.key for k in (await find_keys(rows, wanted, keys_max=9, resume=KeyPlace("default", b"zz"))).keys] == [
        b"other"
    ]
    assert (await find_keys(rows, wanted, keys_max=9, resume=KeyPlace("default", b"a"))).keys[0].key == b"k0"


async def test_one_goes_on_nowhere_but_in_a_family_of_the_range(rows: Rows) -> None:
    with pytest.raises(NotFoundError, match="no column family 'extra'") as caught:
        await find_keys(rows, KeyRange(family="default"), keys_max=1, resume=KeyPlace("extra", b""))
    assert caught.value.hint == "it has default"


async def test_what_is_not_there_is_reported(rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no column family 'absent'") as caught:
        await find_keys(rows, KeyRange(family="absent"), keys_max=1)
    assert caught.value.hint == "it has default, extra"
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="not a RocksDB directory"):
        RestoredRows(tmp_path / "empty")
    with pytest.raises(NotFoundError, match="CURRENT"):
        await StoreInPlace.open(LocalRanges(tmp_path / "empty"))


def damage_first_blocks(state: Path) -> None:
    for sst in state.glob("*.sst"):
        data = bytearray(sst.read_bytes())
        data[0:8] = b"\xee" * 8
        sst.write_bytes(data)


async def test_a_damaged_block_is_damage_and_not_the_end_of_the_keys(state: Path) -> None:
    await asyncio.to_thread(damage_first_blocks, state)
    for rows in (RestoredRows(state), await StoreInPlace.open(LocalRanges(state))):
        with pytest.raises(DamagedError):
            await find_keys(rows, KeyRange(), keys_max=10)


async def test_a_snapshot_is_browsed_and_leaves_nothing_behind(world: World, state: Path, tmp_path: Path) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, [await repository.backup(JOB, state)])
    keys_before = await world.keys()
    scratch = tmp_path / "scratch"
    async with opened_rows(repository.opened, commit.record.stores[0], scratch) as (rows, files):
        assert Path(rows.location).parent.name.startswith(SCRATCH_PREFIX)
        assert (await find_keys(rows, KeyRange(), keys_max=0, counted=True)).count == 7
        assert files.requests == 0
    async with opened_rows(repository.opened, commit.record.stores[0]) as (rows, files):
        assert (await find_keys(rows, KeyRange(), keys_max=0, counted=True)).count == 7
        assert await rows.get(b"k3", "default", merge_delimiter=None) == b"v3"
        assert await rows.get(b"k3", "extra", merge_delimiter=None) is None
    assert list(scratch.iterdir()) == []
    assert await world.keys() == keys_before


async def test_a_store_is_read_in_place_while_its_commit_is_pinned(world: World, state: Path) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, [await repository.backup(JOB, state)])
    async with repository.store_in_place(commit) as store:
        assert await world.keys("pins/"), "else a collection could take what is read"
        assert store.families == ("default", "extra")
        assert await store.get(b"k1") == b"v1"
        assert await store.get(b"nix") is None
        assert [row async for rows in store.chunks(start=b"k3") for row in rows] == [(b"k3", b"v3"), (b"k4", b"v4")]
    with pytest.raises(NotFoundError, match="no store 0/nix"):
        async with repository.store_in_place(commit, store="nix"):
            pass


async def test_an_error_leaves_nothing_behind_either(world: World, state: Path, tmp_path: Path) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, [await repository.backup(JOB, state)])
    await world.store.inner.delete(sorted(await world.keys("blobs/")))
    with pytest.raises(DamagedError):
        async with opened_rows(repository.opened, commit.record.stores[0], tmp_path / "scratch"):
            pass
    with pytest.raises(DamagedError, match=r"blob .* is missing"):
        async with opened_rows(repository.opened, commit.record.stores[0]) as (rows, _):
            await find_keys(rows, KeyRange(), keys_max=9)
    assert list((tmp_path / "scratch").iterdir()) == []


async def test_what_is_no_rocksdb_is_refused_before_anything_is_fetched(world: World, tmp_path: Path) -> None:
    repository = await world.process()
    tree = world.tree({"a": b"a" * 100_000})
    commit = await repository.commit(JOB, [await repository.backup(JOB, tree)])
    with pytest.raises(NotFoundError, match="not a RocksDB directory"):
        async with opened_rows(repository.opened, commit.record.stores[0], tmp_path / "scratch"):
            pass
    assert not (tmp_path / "scratch").exists()


async def test_operands_without_a_delimiter_are_refused(tmp_path: Path) -> None:
    with StoreWriter.open(tmp_path / "s") as writer:
        writer.put(b"k", b"v")
    rows = RestoredRows(tmp_path / "s")
    assert (await find_keys(rows, KeyRange(), keys_max=1, merge_delimiter=b",")).keys[0].key == b"k"
    with pytest.raises(UsageError, match="between operands"):
        await find_keys(rows, KeyRange(), keys_max=1, merge_delimiter=b";")


@pytest.mark.parametrize(
    "prefix, end", [(b"", None), (b"a", b"b"), (b"a\xff", b"b"), (b"\xff\xff", None), (b"a\xfe\xff", b"a\xff")]
)
def test_the_keys_of_a_prefix_end_where_the_next_one_begins(prefix: bytes, end: bytes | None) -> None:
    assert end_of_prefix(prefix) == end


@given(st.binary(max_size=30))
def test_escaped_bytes_read_back_and_steer_no_terminal(data: bytes) -> None:
    text = escape_bytes(data)
    assert parse_bytes(text) == data
    assert text.isprintable()


@given(st.text(max_size=10), st.binary(max_size=10))
@example("a:b", b":")
@example("0x", b"0x")
@example("", b"")
def test_places_read_back_and_steer_no_terminal(family: str, key: bytes) -> None:
    text = write_place(KeyPlace(family, key))
    assert parse_place(text) == KeyPlace(family, key)
    assert text.isprintable()


def test_what_is_no_place_is_refused() -> None:
    with pytest.raises(UsageError, match="not a place"):
        parse_place("default")
    with pytest.raises(UsageError, match="not a key"):
        parse_place("default:\\q")


@pytest.mark.parametrize("text", ["0xf", "0xzz", "a\\", "a\\x1", "\\n", "\\xgg"])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a key"):
        parse_bytes(text)


def test_hexadecimal_and_text_say_the_same() -> None:
    assert parse_bytes("0x00ff") == parse_bytes("\\x00\\xff") == b"\x00\xff"
    assert escape_bytes(b"0xab") == "\\x30xab"
    assert escape_bytes("größe".encode()) == "größe"


def test_backups_of_checkpoints_are_known() -> None:
    assert is_checkpoint_backup(CheckpointBackup(query_id="q", batch=2, oldest_batch=1).encode())
    assert is_checkpoint_backup('{"kind":"spark-checkpoint","format":99}')
    assert not is_checkpoint_backup("2013-08")


async def test_a_restore_of_rows_that_is_cancelled_leaves_no_directory(
    world: World, state: Path, tmp_path: Path
) -> None:
    repository = await world.process()
    commit = await repository.commit(JOB, [await repository.backup(JOB, state)])

    async def read() -> None:
        async with opened_rows(repository.opened, commit.record.stores[0], tmp_path / "scratch"):
            pass

    for turns in range(40):
        task = asyncio.ensure_future(read())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert not list((tmp_path / "scratch").glob("*"))
