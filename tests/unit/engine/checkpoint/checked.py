"""What tests of the check share: what it finds, which files there are, and a byte to alter."""

from pathlib import Path
from typing import Any

from engine.checkpoint.check import check_checkpoint
from tests.unit.engine.checkpoint.live_query import LiveQuery

GOLDEN = Path(__file__).parents[3] / "golden" / "spark"
# Of these copies.
LEFT_OUT = {"state/0/_stateSchema/default", "sources/0"}
WHOLE = ["changelog-v1-lz4", "changelog-v2-lz4", "changelog-v3-lz4", "changelog-v4-lz4", "row-checksums"]


async def found(root: Path | LiveQuery, **settings: Any) -> list[tuple[str, str]]:
    """Kinds and paths of what a check finds."""
    report = await check_checkpoint(root.location if isinstance(root, LiveQuery) else root, **settings)
    return [(finding.kind, finding.path) for finding in report.findings]


def below(root: Path, pattern: str) -> list[Path]:
    return sorted(root.glob(pattern))


def first(root: Path, pattern: str) -> Path:
    return below(root, pattern)[0]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x04
    path.write_bytes(data)
