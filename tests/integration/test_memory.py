"""Memory stays under its budget however large a file or however many files."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.settings import KIB, MIB
from tests.servers.s3_server import S3Server

ROOT = Path(__file__).resolve().parents[2]
IN_FLIGHT_BYTES = 64 * MIB

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture
def scratch() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="tidemark-memory-"))
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    "large_mib, files",
    [pytest.param(256, 5_000), pytest.param(4096, 100_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
def test_resident_size_over_idle_is_bounded(scratch: Path, large_mib: int, files: int) -> None:
    """The rule of the project: 128 MiB, plus the bytes in flight, plus 3 KiB per file."""
    probe(scratch, large_mib, files, 100)


@pytest.mark.parametrize("files", [10_000, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_an_index_that_is_written_beside_packs_is_within_the_same_rule(scratch: Path, files: int) -> None:
    """Where there are packs alone they are in memory, as many as may be, while the index is made (design 0002, P3)."""
    backup_bytes, _ = measure(scratch, 0, files, 4 * KIB)["phases"]["first backup"]
    assert backup_bytes <= allowed_bytes(files)


@pytest.mark.s3
@pytest.mark.parametrize(
    "large_mib, files",
    [pytest.param(256, 500), pytest.param(1024, 20_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
def test_resident_size_over_idle_is_bounded_on_s3(
    scratch: Path, s3_server: S3Server, s3_bucket: str, large_mib: int, files: int
) -> None:
    """The SDK and its connections are within the same rule."""
    probe(scratch, large_mib, files, 100, f"s3://{s3_bucket}")


def probe(scratch: Path, large_mib: int, files: int, file_bytes: int, *url: str) -> None:
    """Back up and restore in a process of its own, and hold what that took against the rule."""
    measured = measure(scratch, large_mib, files, file_bytes, *url)
    assert measured["over_idle_bytes"] <= allowed_bytes(files), measured


def allowed_bytes(files: int) -> int:
    return 128 * MIB + IN_FLIGHT_BYTES + 3 * KIB * files


def measure(scratch: Path, large_mib: int, files: int, file_bytes: int, *url: str) -> Any:
    numbers = large_mib, files, file_bytes
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.memory_probe", str(scratch), *map(str, numbers), *url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
