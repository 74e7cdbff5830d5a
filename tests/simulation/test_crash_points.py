"""Every use case, stopped before and after each of its effects in a real process (design 0002, interruptions)."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fast_directory() -> Iterator[Path]:
    """In memory where the machine has that: thousands of fsyncs."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="tidemark-", dir=base))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize(
    "scenario", ["backup", "commit", "rewind", "restore", "replace", "collect", "name", "fork", "release"]
)
@pytest.mark.timeout(300)
def test_stopped_before_any_effect_nothing_is_lost_and_nothing_leaks(scenario: str, fast_directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.crash_runner", scenario, str(fast_directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=290,
    )
    assert done.stdout.strip(), done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failures"] == []
    assert summary["points"] > 5
