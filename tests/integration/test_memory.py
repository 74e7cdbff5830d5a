"""Memory stays under its budget however large a file or however many files."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
    probe(scratch, large_mib, files)


@pytest.mark.s3
@pytest.mark.parametrize(
    "large_mib, files",
    [pytest.param(256, 500), pytest.param(1024, 20_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
def test_resident_size_over_idle_is_bounded_on_s3(
    scratch: Path, s3_server: S3Server, s3_bucket: str, large_mib: int, files: int
) -> None:
    """The SDK and its connections are within the same rule."""
    probe(scratch, large_mib, files, f"s3://{s3_bucket}")


def probe(scratch: Path, large_mib: int, files: int, *url: str) -> None:
    """Back up and restore in a process of its own, and hold what that took against the rule."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.memory_probe", str(scratch), str(large_mib), str(files), *url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["over_idle_bytes"] <= 128 * MIB + IN_FLIGHT_BYTES + 3 * KIB * files, measured
