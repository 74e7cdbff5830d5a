"""`tidemark spark backup`: what it prints, and its exit codes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engine.cli import tidemark
from engine.cli.exit_codes import ExitCode

Run = Callable[..., Result]


@pytest.fixture
def checkpoint(tmp_path: Path, checkpoints: dict[int, Path]) -> Path:
    target = tmp_path / "query"
    shutil.copytree(checkpoints[5], target)
    return target


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `tidemark`; there is a repository already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TIDEMARK_REPOSITORY", str(tmp_path / "repository"))

    def invoke(*words: str) -> Result:
        return CliRunner().invoke(tidemark, list(words))

    assert invoke("init").exit_code == 0
    return invoke


def test_it_tells_what_it_did_and_the_second_time_that_there_is_nothing_to_do(run: Run, checkpoint: Path) -> None:
    planned = json.loads(run("spark", "backup", str(checkpoint), "--dry-run", "--json").stdout)
    assert (planned["batch"], planned["is_taken"], planned["stores"]) == (4, False, 2)
    first = json.loads(run("spark", "backup", str(checkpoint), "--json").stdout)
    assert (first["verb"], first["batch"], first["is_new"], first["commit"]["number"]) == ("spark backup", 4, True, 1)
    assert first["job"] == planned["job"] == f"spark-{first['query_id']}"
    assert first["state"]["files"] == planned["files"]
    assert first["location"] == str(checkpoint)
    again = run("spark", "backup", str(checkpoint))
    assert again.exit_code == 0
    assert "commit 1 of" in again.stdout
    assert "nothing to do" in again.stdout


def test_people_get_batch_sizes_and_requests(run: Run, checkpoint: Path) -> None:
    lines = run("spark", "backup", str(checkpoint), "--job", "flights").stdout.splitlines()
    assert lines[0].endswith(": commit 1 of flights")
    assert lines[1].startswith("2 stores, ")
    assert "request" in lines[2]
    assert lines[3] == "batches 2 to 4 can be restored from it"
    assert "is backed up already" in run("spark", "backup", str(checkpoint), "-n", "-j", "flights").stdout


@pytest.mark.parametrize(
    "pattern, expected",
    [("metadata", ExitCode.NOT_FOUND), ("state/0/0/5_*", ExitCode.NOT_FOUND), ("nothing", ExitCode.OK)],
)
def test_what_is_missing_is_not_found(run: Run, checkpoint: Path, pattern: str, expected: ExitCode) -> None:
    for path in checkpoint.glob(pattern):
        path.unlink()
    assert run("spark", "backup", str(checkpoint)).exit_code == expected


def test_damage_has_its_exit_code_and_names_the_file(run: Run, checkpoint: Path) -> None:
    (sst, *_) = checkpoint.glob("state/0/1/SSTs/*.sst")
    data = bytearray(sst.read_bytes())
    data[10] ^= 1
    sst.write_bytes(data)
    result = run("spark", "backup", str(checkpoint))
    assert result.exit_code == ExitCode.DAMAGED
    assert sst.name in result.stderr


def test_a_plan_is_not_watched(run: Run, checkpoint: Path) -> None:
    assert run("spark", "backup", str(checkpoint), "-n", "--watch", "1s").exit_code == ExitCode.USAGE
