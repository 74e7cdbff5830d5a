"""`tidemark spark backup`: what it prints, and its exit codes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from blobstore.errors import StoreUnavailableError
from engine.checkpoint import backup
from engine.checkpoint.backup import CheckpointBackupResult
from engine.checkpoint.errors import QueryMovedOnError
from engine.cli import tidemark
from engine.cli.run import ExitCode
from engine.errors import CommitDamagedError, CommitUnknownError, ConflictError, UnsafeSourceError
from index.errors import VersionMissingError
from index.plan.commits import SHRINK_FLOOR_BYTES

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


def test_it_reports_what_it_did_and_the_second_time_that_there_is_nothing_to_do(run: Run, checkpoint: Path) -> None:
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
    "pattern, expected", [("metadata", ExitCode.DAMAGED), ("state/0/0/5_*", ExitCode.DAMAGED), ("nothing", ExitCode.OK)]
)
def test_what_is_missing_is_damage(run: Run, checkpoint: Path, pattern: str, expected: ExitCode) -> None:
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


def test_what_is_gone_from_the_repository_is_sent_again_and_meanwhile_an_older_backup_is_taken(
    run: Run, checkpoint: Path, checkpoints: dict[int, Path], tmp_path: Path
) -> None:
    run("spark", "backup", str(checkpoint))
    before = {path for path in (tmp_path / "repository/blobs").rglob("*") if path.is_file()}
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoints[8], checkpoint)
    run("spark", "backup", str(checkpoint))
    for path in (tmp_path / "repository/blobs").rglob("*"):
        if path.is_file() and path not in before:
            path.unlink()
    refused = run("spark", "restore", "repository", "restored")
    assert refused.exit_code == ExitCode.DAMAGED
    assert "the backup of batch 4 is the newest of which everything is there" in refused.stderr
    assert "batch 4 of query" in run("spark", "restore", "repository", "restored", "--or-newest-complete").stdout
    assert "nothing to do" in run("spark", "backup", str(checkpoint)).stdout
    assert ": commit 3 of" in run("spark", "backup", str(checkpoint), "--check-retained").stdout
    assert "batch 7 of query" in run("spark", "restore", "repository", "again").stdout


def test_state_that_has_shrunk_is_not_committed_unless_that_is_allowed(
    run: Run, checkpoint: Path, checkpoints: dict[int, Path], tmp_path: Path
) -> None:
    """Design 0006, P8."""
    words = "spark", "backup", str(checkpoint), "--job", "flights"
    first = json.loads(run(*words, "--json").stdout)["commit"]
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoints[8], checkpoint)

    def enlarge_newest(name: str, version: int) -> None:
        """Let the newest backup have much more of a store: one large file."""
        file = tmp_path / f"large-{version}" / name
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(SHRINK_FLOOR_BYTES + 9 * first["size_bytes"]))
        place = "--job", "flights", "--task", "0-0", "--version", str(version), "--offsets", first["offsets"]
        added = run("backup", str(tmp_path / f"large-{version}"), *place)
        assert added.exit_code == ExitCode.OK, added.output

    enlarge_newest("6.changelog", 6)
    assert run(*words, "-n").exit_code == ExitCode.OK
    enlarge_newest("SSTs/1.sst", 7)
    for options in ([], ["-n"]):
        refused = run(*words, *options)
        assert refused.exit_code == ExitCode.TOO_MUCH
        assert "by more than 50%; nothing was committed" in refused.stderr
        assert "--shrink-max 100%" in refused.stderr
    assert ": commit 4 of flights" in run(*words, "--shrink-max", "100%").stdout
    assert "is backed up already" in run(*words, "-n").stdout


class Interrupted(KeyboardInterrupt):
    """Ends a watch as its user would, which is how it is meant to end."""


@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailableError("busy", operation="get"),
        ConflictError("another backup", operation="commit"),
        CommitUnknownError("no answer", operation="commit"),
        CommitDamagedError("is gone", operation="commit"),
        QueryMovedOnError("read 3 times", operation="backup"),
        UnsafeSourceError("is not there", operation="backup"),
        VersionMissingError("is not there"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_watch_goes_on_after_what_passes(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    taken = backup.backup_checkpoint
    turns: list[Exception | None] = [error, None, error, None]

    async def take(*args: Any, **how: Any) -> CheckpointBackupResult:
        if not turns:
            raise Interrupted
        failure = turns.pop(0)
        if failure is not None:
            raise failure
        return await taken(*args, **how)

    monkeypatch.setattr(backup, "backup_checkpoint", take)
    result = run("spark", "backup", str(checkpoint), "--watch", "1ms")
    assert result.exit_code == ExitCode.OK
    assert result.stderr.count(f"trying again in 1 ms: {error}") == 2
    # The second one is of the same batch.
    assert result.stdout.count("commit 1 of") == 1


def test_a_watch_ends_with_what_does_not_pass(run: Run, checkpoint: Path) -> None:
    (checkpoint / "commits/4").write_bytes(b"damaged")
    result = run("spark", "backup", str(checkpoint), "--watch", "1ms")
    assert result.exit_code == ExitCode.DAMAGED
    assert f"{checkpoint}/commits/4" in result.stderr


def test_the_scratch_directory_is_the_one_that_is_said(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    words = ("spark", "backup", str(checkpoint), "--scratch")
    assert run(*words, str(tmp_path / "absent")).exit_code == ExitCode.USAGE
    assert run(*words, str(tmp_path / "scratch")).exit_code == ExitCode.OK


def test_a_plan_is_not_watched(run: Run, checkpoint: Path) -> None:
    assert run("spark", "backup", str(checkpoint), "-n", "--watch", "1s").exit_code == ExitCode.USAGE


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["backup", "dry run"])
def test_another_copy_of_the_checkpoint_is_a_usage_error_unless_it_took_its_place(
    run: Run, tmp_path: Path, checkpoint: Path, checkpoints: dict[int, Path], more: tuple[str, ...]
) -> None:
    further = shutil.copytree(checkpoints[8], tmp_path / "further")
    assert run("spark", "backup", str(further)).exit_code == ExitCode.OK
    refused = run("spark", "backup", str(checkpoint), *more)
    assert refused.exit_code == ExitCode.USAGE
    assert "give each copy of a checkpoint a job of its own (--job)" in refused.stderr
    assert run("spark", "backup", str(checkpoint), "--moved", *more).exit_code == ExitCode.OK
