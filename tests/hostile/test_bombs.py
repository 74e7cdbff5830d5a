"""What would fill the memory is refused, or comes in pieces, in a process that has little of it (architecture, H3)."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.hostile.bomb_probe import BOMBS, MIB

ROOT: Final = Path(__file__).parents[2]
# What comes out, piece by piece, where every length that is stated is one that a writer may state.
HARMLESS: Final = {"zstd_bomb": 512 * MIB, "lz4_blocks": 256 * MIB, "lzf_bomb": 6_547_300, "sst_block": 0}
# One that a checksum of 8 bytes would not stop is refused by the error of the one who reads it.
TYPED: Final = {"DamagedError", "CorruptIndexError", "DamagedChangelogError", "BatchLogError", "FileChecksumError"}
SECONDS_MAX: Final = 60.0

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture(scope="module")
def came() -> dict[str, str]:
    """What came of each bomb, set off one after the other under one cap."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.bomb_probe", *BOMBS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert sum(float(seconds) for _, _, seconds in lines) < SECONDS_MAX
    return {name: what for name, what, _ in lines}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_no_more_than_a_readers_share(came: dict[str, str], name: str) -> None:
    if name in HARMLESS:
        assert came[name] == str(HARMLESS[name])
    else:
        assert came[name] in TYPED
