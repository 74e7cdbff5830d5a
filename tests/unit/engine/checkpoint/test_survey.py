"""Every checkpoint below a place, by one listing and a few GETs each (design 0005, W1 to W4)."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from typing_extensions import override

from blobstore.base import BytesBody, ListPage
from blobstore.errors import AccessDeniedError
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import MeteredStore
from engine.checkpoint.survey import SurveyedCheckpoint, survey_checkpoints
from engine.errors import NotFoundError
from tests.unit.engine.workbench import read_tree

CLOSED: Final = "cannot be listed: Permission denied"
SPARK = Path(__file__).resolve().parents[3] / "golden" / "spark"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two teams' checkpoints of real queries, and a file beside them."""
    for name, at in (("changelog-v4-lz4", "a/orders"), ("hdfs-provider", "a/b/clicks"), ("join", "joined")):
        shutil.copytree(SPARK / name, tmp_path / at, copy_function=shutil.copyfile)
    (tmp_path / "a" / "report.csv").write_text("x" * 100)
    return tmp_path


async def surveyed(place: Path) -> dict[str, SurveyedCheckpoint]:
    found = await survey_checkpoints(place)
    return {each.path: each for each in found.checkpoints}


async def test_each_checkpoint_is_found_and_described(place: Path) -> None:
    found = await surveyed(place)
    assert {path: (each.batch, each.provider, each.format_version) for path, each in found.items()} == {
        "a/orders": (2, "RocksDB", 2),
        "a/b/clicks": (2, "HDFS-backed", 1),
        "joined": (3, "RocksDB", 2),
    }
    for path, each in found.items():
        files = [file for file in (place / path).rglob("*") if file.is_file() and not file.name.startswith(".")]
        assert each.files == len(files)
        assert each.size_bytes == sum(file.stat().st_size for file in files)
        assert each.state_bytes == sum(f.stat().st_size for f in files if f.is_relative_to(place / path / "state"))
        assert len(each.query_id) == 36
        assert 0 <= each.age_ms < 3_600_000
        assert (each.waste_bytes, each.findings) == ({}, ())
        # Written by the copy, all at once.
        assert each.requests_usd_per_month is None


async def test_what_is_wrong_with_one_is_a_finding_of_that_one(place: Path) -> None:
    (place / "joined" / "metadata").unlink()
    (place / "a" / "orders" / "offsets" / "2").write_bytes(b"not offsets")
    (place / "a" / "b" / "clicks" / "offsets" / "3").write_bytes(b"v1\n")
    shutil.rmtree(place / "a" / "b" / "clicks" / "state")
    found = await surveyed(place)
    [missing], [damaged], [planned] = (found[path].findings for path in ("joined", "a/orders", "a/b/clicks"))
    assert missing.startswith("metadata is missing")
    assert "offsets/2" in damaged
    assert planned == "batch 3 is planned and not committed"
    assert found["a/b/clicks"].state_bytes == 0


async def test_directories_that_may_not_be_listed_are_findings(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where each query is of a user of its own. A superuser lists all: so the test refuses, and not the system."""
    for name in ("lost+found", "stale"):
        (place / name).mkdir()
    before, closed = await surveyed(place), {place / "lost+found", place / "joined" / "state" / "0"}
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        at = Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else Path(path)
        if at in closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(at))
        if at == place / "stale" and not isinstance(path, int):  # the second walk
            raise OSError(errno.EIO, "Input/output error", str(at))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    found = await surveyed(place)
    assert found.pop("lost+found") == SurveyedCheckpoint(path="lost+found", findings=(CLOSED,))
    assert found.pop("stale").findings == ("cannot be listed: Input/output error",)
    assert found.pop("joined").findings == (f"state/0 {CLOSED}",)
    assert {path: msgspec.structs.replace(each, age_ms=before[path].age_ms) for path, each in found.items()} == {
        path: before[path] for path in ("a/orders", "a/b/clicks")
    }
    closed.add(place)
    with pytest.raises(AccessDeniedError):
        await surveyed(place)


@pytest.mark.parametrize("name", ["state", "state/0", "state/0/0"])
async def test_a_link_is_a_finding_as_nothing_behind_it_is_counted(place: Path, name: str) -> None:
    path = place / "a" / "orders" / name
    path.rename(place / "elsewhere")
    path.symlink_to(place / "elsewhere")
    found = await surveyed(place)
    assert found["a/orders"].findings == (f"{name} is a symbolic link: what it leads to is not counted",)
    assert found["joined"].findings == ()


async def test_planted_waste_is_found(place: Path) -> None:
    (place / "a" / "orders" / "commits" / "0").unlink()
    state = place / "a" / "orders" / "state"
    planted = {
        "7/0/1.zip": "dead operator",
        "0/99/SSTs/000001-aa.sst": "dead partition",
        "0/0/3_00000000-0000-0000-0000-000000000000.changelog": "lost attempt",
        "0/0/8_00000000-0000-0000-0000-000000000000.zip": "later version",
    }
    for number, path in enumerate(planted):
        (state / path).parent.mkdir(parents=True, exist_ok=True)
        (state / path).write_bytes(b"x" * 10**number)
    found = await surveyed(place)
    assert found["a/orders"].waste_bytes == {reason: 10**n for n, reason in enumerate(planted.values())}


async def test_what_a_query_writes_while_it_is_listed_is_no_waste(place: Path) -> None:
    """State is listed after commits: with the batches of a fast query from in between."""
    query = place / "a" / "orders"
    (query / "state/0/0/5_00000000-0000-0000-0000-000000000000.zip").write_bytes(b"of batch 4")

    class Moving(MemoryStore):
        @override
        async def list_page(self, prefix: str, *, start_after: str = "", limit: int = 1_000) -> ListPage:
            page = await super().list_page(prefix, start_after=start_after, limit=limit)
            for batch in (3, 4):
                await self.put(f"commits/{batch}", BytesBody((query / "commits/2").read_bytes()))
            return page

    store = Moving()
    for path, data in read_tree(query).items():
        if not path.rpartition("/")[2].startswith("."):
            await store.put(path, BytesBody(data))
    (moved,) = (await survey_checkpoints(store)).checkpoints
    assert (moved.batch, moved.waste_bytes) == (2, {})
    assert (await surveyed(place))["a/orders"].waste_bytes == {"later version": len(b"of batch 4")}


async def test_one_inside_of_another_has_its_own_files(place: Path) -> None:
    shutil.move(place / "joined", place / "a" / "orders" / "joined")
    (place / "offsets").mkdir()
    (place / "offsets" / "5").write_bytes(b"of something else")
    found = await surveyed(place)
    assert {path: each.batch for path, each in found.items()} == {
        ".": -1,
        "a/b/clicks": 2,
        "a/orders": 2,
        "a/orders/joined": 3,
    }
    assert (found["."].files, found["a/orders/joined"].waste_bytes) == (2, {})


async def test_it_costs_one_listing_and_four_gets_for_each(place: Path) -> None:
    store = MeteredStore(MemoryStore())
    for path, data in read_tree(place).items():
        if not path.rpartition("/")[2].startswith("."):
            await store.put(path, BytesBody(data))
    store.meter.reset()
    found = await survey_checkpoints(store)
    assert len(found.checkpoints) == 3
    assert dict(store.meter.requests) == {"list_page": 1, "get": 3 * 4}


async def test_a_place_that_is_a_checkpoint_is_one(place: Path) -> None:
    assert list(await surveyed(place / "joined")) == ["."]


async def test_a_place_without_anything_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing here"):
        await survey_checkpoints(tmp_path / "typo")
