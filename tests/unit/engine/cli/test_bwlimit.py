"""The limit on bytes per second: where it may be, and that it holds for a whole run."""

import time
from pathlib import Path

import pytest

from engine.cli.options import Common
from tests.unit.engine.cli.conftest import Run


def test_it_is_a_setting_of_every_verb(run: Run, seen: list[Common], tmp_path: Path) -> None:
    (tmp_path / "tidemark.toml").write_text(
        'repository = "memory://a"\nbwlimit = "10MiB"\n[verify]\nbwlimit = "1MiB"\n'
    )
    run("list")
    run("verify")
    run("list", TIDEMARK_BWLIMIT="64k")
    run("list", "--bwlimit", "0")
    assert [common.bwlimit for common in seen] == [10 * 2**20, 2**20, 64 * 2**10, 0]


@pytest.mark.parametrize("limit", ["1", "63KiB"])
def test_one_below_what_a_single_transfer_needs_is_refused(run: Run, limit: str) -> None:
    result = run("list", "-r", "memory://a", "--bwlimit", limit)
    assert result.exit_code == 2
    assert "give at least 64KiB" in result.stderr


def test_a_backup_and_a_restore_keep_to_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "state").write_bytes(bytes(2**21))
    environment = {
        "TIDEMARK_REPOSITORY": f"file://{tmp_path}/repository",
        "TIDEMARK_JOB": "flights",
        "TIDEMARK_BWLIMIT": str(2**20 + 7),
    }
    assert run("init", **environment).exit_code == 0
    for words in (("backup", "source"), ("restore", "target")):
        began_s = time.monotonic()
        assert run(*words, **environment).exit_code == 0
        assert 1.5 < time.monotonic() - began_s < 20
    assert (tmp_path / "target" / "state").read_bytes() == bytes(2**21)
