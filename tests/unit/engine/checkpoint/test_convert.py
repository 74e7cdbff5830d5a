"""A checkpoint made from another one: other formats and codecs, the same rows (0005, V1 to V5)."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.convert import ConvertChoice, convert_checkpoint, plan_conversion
from engine.checkpoint.follower import opened_follower
from engine.errors import DamagedError, NotFoundError, TargetError
from engine.state.query import QueryAt, StreamingCheckpoint
from index.errors import FormatError
from tests.unit.engine.checkpoint.checked import flip
from tests.unit.engine.checkpoint.written_query import WrittenQuery, rows_of
from tidemark.errors import TidemarkError

Format = Literal[1, 2]


async def written(tmp_path: Path, batches: int = 5, **settings: Any) -> WrittenQuery:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work", **settings).begin()
    await query.run(batches)
    return query


async def read(root: Path) -> QueryAt:
    checkpoint = await StreamingCheckpoint.open(root)
    try:
        return await checkpoint.at()
    finally:
        await checkpoint.close()


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("families", [False, True], ids=["one table", "families"])
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (1, 1), (2, 2)])
async def test_rows_are_the_same_in_the_other_format(
    tmp_path: Path, before: Format, after: Format, families: bool
) -> None:
    query = await written(tmp_path, format_version=before, families=families)
    source = content(query.root)
    target = tmp_path / "target"
    done = await convert_checkpoint(query.root, target, ConvertChoice(format_version=after))
    assert (done.format_before, done.format_version, done.stores) == (before, after, 2)
    assert content(query.root) == source
    assert await rows_of(target, tmp_path / "a") == await rows_of(query.root, tmp_path / "b")
    report = await check_checkpoint(target)
    assert report.is_sound
    assert not report.warnings
    # One snapshot for each store, named as the format has it, and the logs of one batch.
    for partition in (0, 1):
        names = sorted(path.name for path in (target / f"state/0/{partition}").glob("*.*"))
        zips = [name for name in names if name.endswith(".zip")]
        assert not [name for name in names if name.endswith(".changelog")]
        assert len(zips) == 1
        assert zips[0].startswith("5_" if after == 2 else "5.zip")
    assert [path.name for path in (target / "commits").iterdir()] == ["4"]
    assert done.files == len(content(target))
    assert done.size_bytes == sum(map(len, content(target).values()))


async def test_every_file_is_durable_before_the_target_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = await written(tmp_path)
    synced: set[int] = set()
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr("os.fsync", note)
    target = tmp_path / "target"
    await convert_checkpoint(query.root, target, ConvertChoice(codec="zstd"))
    # Some keep their names: they were copied, and not written.
    assert {path.name for path in target.rglob("*.sst")} & {path.name for path in query.root.rglob("*.sst")}
    assert [path for path in target.rglob("*") if path.is_file() and path.stat().st_ino not in synced] == []


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
async def test_a_query_goes_on_in_the_other_format(tmp_path: Path, before: Format, after: Format) -> None:
    query = await written(tmp_path, format_version=before)
    target = tmp_path / "target"
    await convert_checkpoint(query.root, target, ConvertChoice(format_version=after))
    other = WrittenQuery(target, tmp_path / "other", format_version=after)
    await other.resume(target, 4)
    await other.run(4)
    await query.run(4)
    assert await rows_of(target, tmp_path / "a") == await rows_of(query.root, tmp_path / "b")
    assert (await check_checkpoint(target)).is_sound


async def test_another_codec_is_pinned_and_written(tmp_path: Path) -> None:
    query = await written(tmp_path, codec="lz4")
    done = await convert_checkpoint(query.root, tmp_path / "target", ConvertChoice(codec="zstd"))
    assert (done.codec_before, done.codec) == ("lz4", "zstd")
    before, after = await read(query.root), await read(tmp_path / "target")
    assert {store.settings.codec for store in after.stores} == {"zstd"}
    key = "spark.sql.streaming.stateStore.compression.codec"
    assert after.offsets.conf == {**before.offsets.conf, key: "zstd"}
    assert after.offsets.offsets == before.offsets.offsets


async def test_an_older_batch_is_converted(tmp_path: Path) -> None:
    query = await written(tmp_path)
    rows = await rows_of(query.root, tmp_path / "a", batch=3)
    done = await convert_checkpoint(query.root, tmp_path / "target", ConvertChoice(batch=3, format_version=1))
    assert done.batch == 3
    assert await rows_of(tmp_path / "target", tmp_path / "b") == rows
    with pytest.raises(NotFoundError):
        await convert_checkpoint(query.root, tmp_path / "more", ConvertChoice(batch=9))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    "pattern, damage",
    [
        ("state/0/1/SSTs/*.sst", lambda path: flip(path, 100)),
        ("state/0/0/*.zip", cut),
        ("state/0/0/5_*.changelog", cut),
        ("offsets/3", cut),
        ("sources/0/1", Path.unlink),
    ],
)
async def test_damage_is_named_and_nothing_is_made(
    tmp_path: Path, pattern: str, damage: Callable[[Path], None]
) -> None:
    query = await written(tmp_path, file_offsets=True)
    path = max(query.root.glob(pattern))
    damage(path)
    with pytest.raises((DamagedError, FormatError), match=path.name) as caught:
        await convert_checkpoint(query.root, tmp_path / "target")
    assert "nothing was written" in getattr(caught.value, "hint", "")
    assert not (tmp_path / "target").exists()
    assert sorted(os.listdir(tmp_path)) == ["query", "work"]  # noqa: PTH208  (names)


async def test_only_a_new_place_will_do(tmp_path: Path) -> None:
    query = await written(tmp_path, 1)
    before = content(query.root)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_bytes(b"x")
    for name, leads_to in (("link", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(leads_to)
    names = ("taken", "taken/file", "taken/file/below", "link", "loop", "loop/below")
    beside = [tmp_path / name for name in names]
    for target in (query.root, query.root / "below", tmp_path, *beside):
        with pytest.raises(TargetError):
            await convert_checkpoint(query.root, target)
        with pytest.raises(TargetError):
            await plan_conversion(query.root, target, ConvertChoice())
        with pytest.raises(TidemarkError):
            async with opened_follower(query.root, target):
                pass
    assert content(query.root) == before
    assert not [name for name in content(tmp_path) if name.startswith(".")]


async def test_a_plan_writes_nothing(tmp_path: Path) -> None:
    query = await written(tmp_path, format_version=1)
    plan = await plan_conversion(query.root, tmp_path / "target", ConvertChoice(format_version=2))
    assert plan.dry_run
    assert (plan.batch, plan.stores, plan.format_before, plan.format_version) == (4, 2, 1, 2)
    assert not (tmp_path / "target").exists()


async def test_a_file_without_an_id_that_does_not_fit_hadoop_s_checksum_is_refused(tmp_path: Path) -> None:
    query = await written(tmp_path, format_version=1)
    changelog = query.root / "state/0/0/5.changelog"
    data = changelog.read_bytes()
    sums = struct.pack(f">{-(-len(data) // 512)}I", *(zlib.crc32(data[n : n + 512]) for n in range(0, len(data), 512)))
    hidden = changelog.with_name(".5.changelog.crc")
    hidden.write_bytes(b"crc\0" + struct.pack(">i", 512) + sums)
    await convert_checkpoint(query.root, tmp_path / "fits")
    hidden.write_bytes(b"crc\0" + struct.pack(">i", 512) + bytes(len(sums)))
    with pytest.raises(FormatError, match=r"5\.changelog"):
        await convert_checkpoint(query.root, tmp_path / "target")
    assert not (tmp_path / "target").exists()
