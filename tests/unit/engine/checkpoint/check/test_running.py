"""What a check warns of, and what a running query or a poor machine makes of it (0005, 4)."""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.checkpoint import store_check as check_store_module
from engine.checkpoint.check import check_checkpoint, check_logs, finish_check
from engine.checkpoint.findings import CheckReport, Finding
from engine.checkpoint.store_check import check_store
from engine.errors import NotFoundError, TargetError
from engine.rocksdb import store as rocksdb_module
from engine.runtime import Runtime, Stopwatch
from engine.state.checkpoint_dir import CheckpointDir
from index.spark.checksums import hadoop_checksum_name
from index.spark.metadata import StateMetadata
from index.spark.names import snapshot_name
from tests.unit.engine.checkpoint.checked import GOLDEN, LEFT_OUT, first, flip, found
from tests.unit.engine.checkpoint.live_query import NewQuery

# ---------------------------------------------------------------------- warnings


async def test_a_lineage_near_its_limit_is_a_warning(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_store_module, "LINEAGE_BYTES_MAX", 160)
    warnings = (await check_checkpoint(checkpoint)).of_kind("warning")
    assert {finding.rule for finding in warnings} == {"K6"}
    assert "commits fail after about" in warnings[0].message


async def test_a_newer_history_is_a_warning(checkpoint: Path) -> None:
    changelog = first(checkpoint, "state/0/0/8_*.changelog")
    shutil.copy(changelog, changelog.with_name("12_abandoned.changelog"))
    assert await found(checkpoint) == [("warning", "state/0/0/12_abandoned.changelog")]


# What no committed version needs, and Spark's own maintenance deletes or passes over.
Change = Callable[[Path], object]
UNNEEDED: dict[str, Change] = {
    "state/0/0/4_lost.changelog": lambda path: path.write_bytes(b"of another attempt"),
    "state/0/0/3_gone.zip.crc": lambda path: path.write_bytes(b"{}"),
    "state/0/1/notes.txt": lambda path: path.write_bytes(b"what is this"),
    "state/0/7": lambda path: shutil.copytree(path.with_name("1"), path),
    "state/3": lambda path: shutil.copytree(path.with_name("0"), path),
    "state/0/0/.9.changelog.5b0a2b5e.tmp": lambda path: path.write_bytes(b"half"),
    "state/0/0/SSTs/000099-00000000-0000-4000-8000-000000000000.sst": lambda path: path.write_bytes(b"an orphan"),
}


@pytest.mark.parametrize("path", UNNEEDED)
async def test_what_nobody_needs_is_no_finding(checkpoint: Path, path: str) -> None:
    UNNEEDED[path](checkpoint / path)
    assert await found(checkpoint) == []


@pytest.mark.parametrize("name", ["backup.zip", "007.changelog", "x.crc"])
async def test_a_foreign_name_that_spark_fails_on_is_a_warning(checkpoint: Path, name: str) -> None:
    (checkpoint / "state/0/1" / name).write_bytes(b"foreign")
    assert await found(checkpoint) == [("warning", f"state/0/1/{name}")]


async def test_damage_of_attempts_that_lost_is_nobodys(tmp_path: Path) -> None:
    root = shutil.copytree(GOLDEN / "lost-attempts", tmp_path / "query")
    first(root, "state/0/0/8_bf09*.zip").write_bytes(b"damaged")
    report = await check_checkpoint(root)
    assert {f.path.rpartition("/")[0] for f in report.of_kind("damage")} <= LEFT_OUT


# ---------------------------------------------------------------------- a query that runs, and what is none


async def test_what_a_running_query_deletes_meanwhile_is_no_finding(new_query: NewQuery) -> None:
    query = new_query(versions_retained_min=2, versions_deleted_min=1)
    await query.run(6)
    root = await CheckpointDir.open(query.root)
    logs = await check_logs(root)
    await query.run(10)
    for batch in range(10):
        (query.root / f"commits/{batch}").unlink()
        (query.root / f"offsets/{batch}").unlink()
    checked = [await check_store(root, work, scratch=None, level="full") for work in logs.stores]
    report = await finish_check(root, logs, checked, level="full", watch=Stopwatch(Runtime()))
    assert (report.findings, report.newest_batch) == ((), 5)
    assert {store.versions for store in checked} == {1}


async def test_what_a_running_query_writes_meanwhile_is_no_finding(new_query: NewQuery) -> None:
    query = new_query()
    await query.run(4)
    root = await CheckpointDir.open(query.root)
    logs = await check_logs(root)
    # The batch after the next one, too, and it has just begun to write; an older snapshot is on its way, too.
    await query.run(3)
    for partition in range(2):
        at = logs.stores[partition].versions[1]
        (query.root / f"state/0/{partition}/{snapshot_name(at)}.crc").write_bytes(b"{}")
        (query.root / f"state/0/{partition}/8_{uuid.uuid4()}.changelog.crc").write_bytes(b"{}")
    checked = [await check_store(root, work, scratch=None, level="full") for work in logs.stores]
    assert [finding for store in checked for finding in store.findings] == []


async def test_a_store_that_stays_damaged_while_its_query_runs_is_looked_at_twice(
    new_query: NewQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = new_query(deltas_per_snapshot=100)
    await query.run(4)
    root = await CheckpointDir.open(query.root)
    logs = await check_logs(root)
    await query.run(1)
    changelog = first(query.root, "state/0/0/2_*.changelog")
    changelog.unlink()
    looks = []
    look_at = check_store_module._look_at

    async def count(*looked_at: Any) -> Any:
        looks.append(looked_at)
        await query.run(1)
        return await look_at(*looked_at)

    monkeypatch.setattr(check_store_module, "_look_at", count)
    checked = await check_store(root, logs.stores[0], scratch=None, level="full")
    assert changelog.name in checked.findings[0].path
    assert len(looks) == 2


async def test_of_zips_only_what_they_name_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    """A store may have a hundred, each of many megabytes inside."""
    root = await CheckpointDir.open(checkpoint)
    logs = await check_logs(root)
    check = check_store_module._StoreCheck(root, logs.stores[0], tmp_path, "quick")
    await check.run()
    assert {type(state) for state in check._zips.values()} == {StateMetadata}


# ---------------------------------------------------------------------- what is wrong with this machine


@pytest.mark.parametrize("pattern", ["state/0/0/SSTs/*.sst", "state/0/0/[0-9]*.zip", "state/0/0/[0-9]*.changelog"])
@pytest.mark.parametrize("hidden", [False, True])
async def test_what_this_machine_lacks_is_no_damage(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, hidden: Any
) -> None:
    path = first(checkpoint, pattern)
    if hidden:
        path = path.with_name(hadoop_checksum_name(path.name))
    open_file = os.open

    def refuse(name: Any, *flags: Any, **more: Any) -> int:
        if str(name) == str(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(name))
        return open_file(name, *flags, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TargetError, match="Too many open files"):
        await check_checkpoint(checkpoint)


def test_what_rocksdb_says_of_this_machine_is_no_damage(tmp_path: Path) -> None:
    message = "IO error: No space left on device: While appending to file: /w/000012.sst: No space left on device"
    assert isinstance(rocksdb_module._typed(Exception(message), "put", tmp_path), TargetError)


async def test_a_full_disk_is_named_by_the_directory_that_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails names no file."""

    async def run(self: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(check_store_module._StoreCheck, "run", run)
    with pytest.raises(TargetError, match=re.escape(f"{tmp_path}/tidemark-check-")):
        await check_checkpoint(checkpoint, scratch=tmp_path)


async def test_scratch_that_cannot_be_written_is_reported_as_such(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="not there"):
        await check_checkpoint(checkpoint, scratch=tmp_path / "not there")


async def test_what_is_not_a_checkpoint_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint"):
        await check_checkpoint(tmp_path)


async def test_a_report_can_be_sent(checkpoint: Path) -> None:
    flip(checkpoint / "commits/3", 0)
    report = await check_checkpoint(checkpoint)
    assert msgspec.json.decode(msgspec.json.encode(report), type=CheckReport) == report
    assert all(isinstance(finding, Finding) for finding in report.findings)
