"""Small checkpoints for use cases and interleavings, and what a bucket has to hold in the end."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from blobstore.base import list_blobs
from engine.records import indexes as index_io
from tests.simulation.model.processes import plain_store
from tests.simulation.model.s3 import SimServer
from tests.walker import expected_keys

Tree = Mapping[str, bytes]


def tree(text: str) -> dict[str, bytes]:
    """A checkpoint: inline, packed, and a blob of its own; some of it the same in all, and packs that thin out."""
    small = {f"pack/{n}": (b"%d " % n + (text if n < 5 else "same").encode()) * 300 for n in range(6)}
    return {
        "CURRENT": text.encode(),
        "archive/log": f"log of {text}".encode() * 600,
        "archive/deep/always": b"the same" * 900,
        "empty": b"",
        **small,
    }


def write_tree(root: Path, files: Tree) -> Path:
    """Make it, unless it is there."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def read_tree(root: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


async def check_keys(server: SimServer) -> None:
    """The bucket holds what the walker says, and nothing else."""
    store = plain_store(server)
    there = {blob.key async for blob in list_blobs(store, "")}
    expected = await expected_keys(store, await store.now_ms())
    assert there == expected, f"too many: {sorted(there - expected)}; missing: {sorted(expected - there)}"


@contextlib.contextmanager
def small_deltas() -> Iterator[None]:
    """Within, small indexes are stored as deltas, too (design 0002, P2)."""
    limits = index_io.WHOLE_BYTES_MAX, index_io.DELTA_GAIN_MIN
    index_io.WHOLE_BYTES_MAX, index_io.DELTA_GAIN_MIN = 256, 1  # type: ignore[misc]  # constants, but here
    try:
        yield
    finally:
        index_io.WHOLE_BYTES_MAX, index_io.DELTA_GAIN_MIN = limits  # type: ignore[misc]  # as above
