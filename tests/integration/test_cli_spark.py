"""The way of a user of streaming checkpoints through the command line, on what Spark itself has written."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner, Result

from engine.cli import tidemark
from index.spark.query_logs import decode_operator

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "spark"
# An aggregation of ten batches, and a transformWithState query of three, whose metadata names its schemas by path.
AGGREGATION: Final = GOLDEN / "lost-attempts"
TRANSFORM: Final = GOLDEN / "changelog-v4-lz4"
HDFS: Final = GOLDEN / "hdfs-provider"


class Shell:
    """A user's shell with a repository, and nothing left over from other users."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run("init")

    def run(self, *words: str, code: int = 0) -> Result:
        environment = {"TIDEMARK_REPOSITORY": f"file://{self.directory}/repository"}
        result = CliRunner().invoke(tidemark, list(words), env=environment)
        assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.output
        return result

    def spark(self, *words: str, code: int = 0) -> dict[str, Any]:
        """The JSON object of a verb of the group `spark`; of the error if it is to end with one."""
        result = self.run("spark", *words, "--json", code=code)
        shown: dict[str, Any] = json.loads(result.stdout or result.stderr)
        assert shown["schema"] == 1
        if code == 0:
            assert shown["verb"] == f"spark {words[0]}"
        return shown

    def checkpoint(self, golden: Path, *, until: int | None = None) -> Path:
        """A copy of a checkpoint, without the commits after a batch."""
        copy = self.directory / golden.name
        if not copy.exists():
            shutil.copytree(golden, copy)
            # The schemas that its metadata names are not kept with it.
            for metadata in copy.glob("state/*/_metadata/v2/*"):
                for store in decode_operator(metadata.read_bytes()).stores:
                    for path in store.schema_paths:
                        schema = copy / path[path.rindex("state/") :]
                        schema.parent.mkdir(parents=True, exist_ok=True)
                        schema.write_bytes(b"a schema")
            # Nor is the log of the files that were read.
            newest = max(int(path.name) for path in (copy / "offsets").iterdir())
            (copy / "sources" / "0").mkdir(parents=True)
            for entry in range(newest + 1):
                line = json.dumps({"path": f"file:///in/{entry}", "timestamp": 1, "batchId": entry})
                name = f"{entry}.compact" if entry % 10 == 9 else str(entry)
                (copy / "sources" / "0" / name).write_text(f"v1\n{line}")
        for commit in (golden / "commits").iterdir():
            if until is None or int(commit.name) <= until:
                shutil.copy(commit, copy / "commits")
            else:
                (copy / "commits" / commit.name).unlink(missing_ok=True)
        return copy


@pytest.fixture
def shell(own_directory: Path) -> Shell:
    return Shell(own_directory)


def commits(checkpoint: Path) -> list[int]:
    return sorted(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdecimal())


def test_there_and_back(shell: Shell) -> None:
    first = shell.spark("backup", str(shell.checkpoint(AGGREGATION, until=5)))
    assert first["batch"] == 5
    checkpoint = shell.checkpoint(AGGREGATION)
    second = shell.spark("backup", str(checkpoint))
    assert second["batch"] == 9
    assert second["commit"]["number"] == first["commit"]["number"] + 1
    again = shell.spark("backup", str(checkpoint))
    assert again["commit"]["number"] == second["commit"]["number"]

    target = shell.directory / "restored"
    assert shell.spark("restore", str(target), "--dry-run")["batch"] == 9
    assert not target.exists()
    assert shell.spark("restore", str(target))["batch"] == 9
    assert commits(target)[-1] == 9
    shell.run("spark", "check", str(target))

    # What is there is not touched unless somebody says so.
    assert shell.spark("restore", str(target), code=9)["hint"]
    older = shell.spark("restore", str(target), "--batch", "5", "--move-aside", "--replayed")
    assert (older["batch"], commits(target)) == (5, [5])
    assert commits(Path(older["moved_aside"]))[-1] == 9
    shell.run("spark", "check", str(target))
    assert not list(target.glob("state/**/*.changelog"))


def test_people_see_what_was_done(shell: Shell) -> None:
    checkpoint = shell.checkpoint(AGGREGATION)
    backup = shell.run("spark", "backup", str(checkpoint)).stdout
    restored = shell.run("spark", "restore", str(shell.directory / "restored")).stdout
    checked = shell.run("spark", "check", str(checkpoint)).stdout
    for shown in (backup, restored, checked):
        assert "batch" in shown
        assert all(len(line) <= 160 for line in shown.splitlines())
    assert shell.run("spark", "backup", str(checkpoint), "--quiet").output == ""


def test_state_is_explained_in_a_checkpoint_and_in_a_backup_of_it(shell: Shell) -> None:
    checkpoint = str(shell.checkpoint(AGGREGATION))
    shell.run("spark", "backup", checkpoint)
    here = shell.spark("explain", checkpoint, "--full")
    there = shell.spark("explain", f"file://{shell.directory}/repository", "--full")
    (operator,), (stored,) = here["operators"], there["operators"]
    assert operator["rows_by"] == "counted"
    assert [stored[name] for name in ("rows", "row_bytes", "entries")] == [
        operator[name] for name in ("rows", "row_bytes", "entries")
    ]
    assert f"{operator['rows']:,} rows (counted)" in shell.run("spark", "explain", checkpoint, "--full").stdout
    assert shell.spark("explain", checkpoint)["operators"][0]["rows_by"] in {"snapshot", "unknown"}
    shell.spark("explain", f"file://{shell.directory}/repository", "--on-spark", code=2)


def test_a_job_is_named_where_there_are_several(shell: Shell) -> None:
    shell.spark("backup", str(shell.checkpoint(AGGREGATION)), "--job", "totals")
    # The schema files were left out of this copy.
    shell.spark("backup", str(shell.checkpoint(TRANSFORM)), "--job", "tallies", "--despite-damage")
    refused = shell.spark("restore", str(shell.directory / "new"), code=2)
    assert "totals" in refused["hint"] + refused["message"]
    assert "tallies" in refused["hint"] + refused["message"]
    shown = shell.spark("restore", str(shell.directory / "new"), "--job", "tallies")
    assert (shown["job"], shown["batch"]) == ("tallies", 2)
    metadata = (shell.directory / "new" / "state" / "0" / "_metadata" / "v2" / "0").read_text()
    assert f"file:{shell.directory}/new/state/0/_stateSchema/" in metadata.replace("file://", "file:")


def test_another_query_is_refused(shell: Shell) -> None:
    shell.spark("backup", str(shell.checkpoint(AGGREGATION)), "--job", "totals")
    refused = shell.spark("backup", str(shell.checkpoint(TRANSFORM)), "--job", "totals", code=2)
    assert "query" in refused["message"]


@pytest.mark.parametrize("verb", ["backup", "check", "explain"])
def test_what_is_no_checkpoint_is_not_found(shell: Shell, verb: str) -> None:
    (shell.directory / "nothing").mkdir()
    assert "no checkpoint" in shell.spark(verb, str(shell.directory / "nothing"), code=7)["message"]


def test_a_repository_without_backups_says_so(shell: Shell) -> None:
    assert "tidemark spark backup" in shell.spark("restore", str(shell.directory / "new"), code=7)["hint"]


@pytest.mark.parametrize("batch", ["99", "0"])
def test_a_batch_that_no_backup_has_is_not_found(shell: Shell, batch: str) -> None:
    shell.spark("backup", str(shell.checkpoint(AGGREGATION)))
    refused = shell.spark("restore", str(shell.directory / "new"), "--batch", batch, code=7)
    assert "9" in refused["message"] + refused["hint"]
    assert not (shell.directory / "new").exists()


def test_a_checkpoint_gets_another_number_of_partitions_at_a_new_place(shell: Shell) -> None:
    source = shell.checkpoint(AGGREGATION)
    split, merged = shell.directory / "split", shell.directory / "merged"
    plan = shell.spark("rescale", str(source), str(split), "--partitions", "6", "--dry-run")
    assert plan["dry_run"]
    assert not split.exists()
    done = shell.spark("rescale", str(source), str(split), "--partitions", "6")
    assert {name: done[name] for name in plan if name != "dry_run"} == {n: plan[n] for n in plan if n != "dry_run"}
    assert (done["partitions_before"], done["partitions"], done["stores"], done["batch"]) == (1, 6, 6, 9)
    assert done["keys_checked"] > 0
    assert sorted(path.name for path in (split / "state" / "0").glob("[0-9]*")) == list("012345")
    shell.run("spark", "check", str(split), "--strict")
    lines = shell.run("spark", "rescale", str(split), str(merged), "--partitions", "3").stdout
    assert "partitions 6 → 3; stores 6 → 3" in lines
    assert f"{done['keys_checked']:,} keys checked, each in its partition" in lines
    assert "6 SSTs taken over as they are" in lines
    assert "written again" not in lines
    shell.run("spark", "check", str(merged), "--strict")
    hint = shell.run("spark", "rescale", str(split), str(shell.directory / "no"), "--partitions", "4", "-n").stdout
    assert "no row would be written again for a number of partitions of 1, 2, 3" in hint
    assert hint.endswith("nothing was written\n")


def test_a_backup_gets_another_number_of_partitions(shell: Shell) -> None:
    shell.spark("backup", str(shell.checkpoint(AGGREGATION)))
    source, target = str(shell.directory / "repository"), shell.directory / "new"
    plan = shell.spark("restore", str(target), "--partitions", "6", "--dry-run")
    assert not target.exists()
    done = shell.spark("restore", str(target), "--partitions", "6")
    assert done["rescaled"] == plan["rescaled"]
    assert (done["stores"], done["rescaled"]["stores_before"], done["batch"]) == (6, 1, 9)
    shell.run("spark", "check", str(target), "--strict")
    # The source of a rescale may be a repository, as a path or a URL.
    again = shell.spark("rescale", source, str(shell.directory / "again"), "--partitions", "6")
    assert again["rescaled"] == done["rescaled"]
    lines = shell.run("spark", "rescale", f"file://{source}", str(shell.directory / "no"), "--partitions", "6", "-n")
    assert f"{done['rescaled']['keys_checked']:,} keys checked" in lines.stdout
    assert lines.stdout.endswith("nothing was written\n")
    older = shell.spark("rescale", source, str(shell.directory / "older"), "--partitions", "2", "--batch", "8")
    assert (older["batch"], older["stores"]) == (8, 2)
    shell.spark("restore", str(shell.directory / "no"), "--partitions", "2", "--batch", "99", code=7)
    assert not (shell.directory / "no").exists()


def test_a_rescale_that_cannot_be_is_refused_and_leaves_nothing(shell: Shell) -> None:
    target = shell.directory / "new"
    source = shell.checkpoint(AGGREGATION)
    shell.run("spark", "rescale", str(source), str(target), code=2)
    shell.run("spark", "rescale", str(source), str(target), "--partitions", "0", code=2)
    shell.spark("rescale", str(source), str(target), "--partitions", "2", "--batch", "99", code=7)
    shell.spark("rescale", str(source), str(source), "--partitions", "2", code=9)
    shell.spark("rescale", str(source), str(target), "--partitions", "2", "--job", "totals", code=2)
    # By a way that does not exist, which would be made in the source.
    shell.spark("rescale", str(source), f"{source}/x/../../new", "--partitions", "2")
    assert not (source / "x").exists()
    shutil.rmtree(target)
    hdfs = shell.spark("rescale", str(shell.checkpoint(HDFS)), str(target), "--partitions", "2", code=2)
    assert "spark convert --to rocksdb" in hdfs["hint"]
    assert not target.exists()


def test_a_checkpoint_is_converted_to_a_new_place(shell: Shell) -> None:
    source = shell.checkpoint(AGGREGATION)
    target = shell.directory / "converted"
    plan = shell.spark("convert", str(source), str(target), "--format", "1", "--codec", "zstd", "--dry-run")
    assert plan["dry_run"]
    assert not target.exists()
    done = shell.spark("convert", str(source), str(target), "--format", "1", "--codec", "zstd")
    assert (done["format_before"], done["format_version"], done["codec"]) == (2, 1, "zstd")
    assert done["batch"] == plan["batch"] == 9
    shell.run("spark", "check", str(target))
    refused = shell.spark("convert", str(source), str(target), code=9)
    assert "converted" in refused["message"]
    shown = shell.run("spark", "convert", str(target), str(shell.directory / "back"), "--format", "2").stdout
    assert "format 1 → 2, codec zstd" in shown
    assert "checkpointFormatVersion=2" in shown
    shell.run("spark", "convert", str(source), str(shell.directory / "no"), "--format", "3", code=2)


def test_another_backup_than_the_one_that_was_chosen_is_restored_with_a_warning(shell: Shell) -> None:
    blobs = shell.directory / "repository" / "blobs"
    shell.spark("backup", str(shell.checkpoint(AGGREGATION, until=4)))
    first = set(blobs.rglob("*"))
    shell.spark("backup", str(shell.checkpoint(AGGREGATION)))
    target = str(shell.directory / "restored")
    taken = shell.run("spark", "restore", target, "--or-newest-complete", "-n")
    assert ("would be batch 9" in taken.stdout, taken.stderr) == (True, "")
    for blob in set(blobs.rglob("*")) - first:
        if blob.is_file():
            blob.unlink()
    for words in (("-n",), ()):
        taken = shell.run("spark", "restore", target, "--or-newest-complete", *words)
        assert "batch 4 of query" in taken.stdout
        assert "not the backup that was chosen, of batch 9" in taken.stderr


def test_what_only_a_shell_reads_is_no_target(shell: Shell) -> None:
    checkpoint = str(shell.checkpoint(AGGREGATION))
    shell.spark("backup", checkpoint)
    for words in (("restore", "~/new"), ("convert", checkpoint, "~/new", "--format", "1")):
        assert "begins with ~" in shell.spark(*words, code=9)["message"]
    assert not Path("~").exists()
