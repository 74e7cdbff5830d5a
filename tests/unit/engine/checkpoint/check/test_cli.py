import json
import shutil
from pathlib import Path

import pytest

from engine.cli.app import tidemark


@pytest.fixture
def checkpoint(checkpoints: dict[int, Path], tmp_path: Path) -> Path:
    return shutil.copytree(checkpoints[5], tmp_path / "checkpoint")


def run(*words: str) -> int:
    return int(tidemark.main(["spark", "check", *words], standalone_mode=False))


def test_a_sound_checkpoint_ends_with_0(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(checkpoint), "--quiet") == 0
    assert run(str(checkpoint)) == 0
    said = capsys.readouterr().out
    assert said.startswith("sound: 5 batches, 2 stores, 10 versions; ")
    assert said.count("\n") == 1


def test_damage_is_reported_as_a_table_and_ends_with_4(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "commits/3").write_bytes(b"v9\n{}")
    assert run(str(checkpoint), "--level", "quick") == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["finding", "file", "what", "is", "wrong"]
    assert lines[1].startswith("damage   commits/3 ")
    assert "a newer Spark wrote it" in lines[2]
    assert lines[-1].startswith("DAMAGED: 1 finding, SSTs not read: ")


def test_json_has_every_finding(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "state/0/0/copy.zip").write_bytes(b"mine")
    assert run(f"file://{checkpoint}", "--json") == 0
    view = json.loads(capsys.readouterr().out)
    assert (view["verb"], view["sound"], view["warnings"]) == ("spark check", True, 1)
    assert [(f["kind"], f["path"]) for f in view["findings"]] == [("warning", "state/0/0/copy.zip")]


def test_warnings_count_if_somebody_is_strict(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "state/0/0/copy.zip").write_bytes(b"mine")
    assert run(str(checkpoint)) == 0
    assert run(str(checkpoint), "--strict") == 3
    said = capsys.readouterr().out
    assert "sound, 1 warning: " in said
    lines = said.splitlines()
    at = next(number for number, line in enumerate(lines) if "copy.zip" in line)
    assert "it may be moved away" in lines[at + 1]


def test_what_a_quick_check_has_not_read_is_reported(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(checkpoint), "--level", "quick") == 0
    assert capsys.readouterr().out.startswith("sound, SSTs not read: ")


def test_what_is_no_checkpoint_is_not_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path)) == 7
    assert "no checkpoint" in capsys.readouterr().err
