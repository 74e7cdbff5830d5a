"""Run the programs of the README without a change, in a directory with what its first commands have made."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.unit.engine.workbench import read_tree
from tidemark import SyncRepository

PROJECT = Path(__file__).parents[2]
PROGRAMS = re.findall(
    r"^```python\n(.*?)^```$", (PROJECT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
)


def run(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "README.md", "exec"), names)
    return names


def test_the_program_that_backs_up_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = PROJECT / "examples" / "aircraft_state.py"
    subprocess.run([sys.executable, example, "state", "--until", "3"], check=True, capture_output=True)
    names = run(PROGRAMS[0])
    assert names["commit"].record.offsets == "2013-03"
    assert read_tree(tmp_path / "again") == read_tree(tmp_path / "state" / "checkpoint-03")


def test_the_program_of_a_job_on_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(PROGRAMS[1])
    assert names["spark"] is spark
    with SyncRepository.open("words-backups") as repository:
        [commit] = repository.commits("words")
    assert (commit.record.version, commit.record.offsets) == (1, "2013-01")
    # Of each task that had a word.
    assert 1 <= len(commit.record.stores) <= 2


def test_the_job_runs_beside_a_file_that_is_called_as_one_of_our_packages(tmp_path: Path, spark: SparkSession) -> None:
    """On the workers, too, which look into the directory of the driver first."""
    assert spark.version  # the fixture has set the environment
    (tmp_path / "index.py").touch()
    (tmp_path / "job.py").write_text(PROGRAMS[1])
    subprocess.run([sys.executable, "job.py"], cwd=tmp_path, check=True, capture_output=True)
    with SyncRepository.open(f"{tmp_path}/words-backups") as repository:
        assert [commit.record.version for commit in repository.commits("words")] == [1]


def test_these_are_all_programs() -> None:
    assert len(PROGRAMS) == 2
