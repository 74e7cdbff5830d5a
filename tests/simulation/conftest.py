"""Fixtures of all tests of the simulation."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_directory() -> Iterator[Path]:
    """In memory where the machine has that: thousands of fsyncs."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="tidemark-", dir=base))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
