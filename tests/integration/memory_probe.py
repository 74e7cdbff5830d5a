"""A program that backs a tree up and restores it, and shows how much memory that took at its peak.

    python -m tests.integration.memory_probe DIRECTORY LARGE_MIB FILES FILE_BYTES [URL]

The tree has one sparse file, unless that has 0 MiB, and many tiny ones. It is made by another process, so that making
it counts for nothing.
"""

import asyncio
import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

from blobstore.opening import open_store
from engine.backup.backup import BackupOptions, WholeDirectory, backup_source
from engine.records.repository import OpenRepository, StoreAddress
from engine.restore.restore import RestoreOptions, restore_store
from engine.settings import MIB, TransferSettings
from index.snapshot.model import RepositoryRecord, Scope, StoreReference

_MAKE = """
import sys
from pathlib import Path
root, (large_mib, files, file_bytes) = Path(sys.argv[1]), map(int, sys.argv[2:5])
root.mkdir()
if large_mib:
    with open(root / "large", "wb") as large:
        large.truncate(large_mib << 20)
for number in range(files):
    if number % 1000 == 0:
        below = root / f"{number // 1000:03d}"
        below.mkdir()
    (below / f"{number:06d}").write_bytes((b"%d" % number * file_bytes)[:file_bytes])
"""


def resident_bytes() -> int:
    """Memory in use now."""
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * resource.getpagesize()


class Peak:
    """The most memory in use, looked at every 5 ms: the kernel's own peak would count what importing took."""

    def __init__(self) -> None:
        self.idle_bytes = self.most_bytes = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.most_bytes = max(self.most_bytes, resident_bytes())

    def end(self) -> int:
        """Peak over idle."""
        self._stop.set()
        self._thread.join()
        return max(self.most_bytes, resident_bytes()) - self.idle_bytes


async def run(root: Path, url: str) -> dict[str, object]:
    settings = TransferSettings(memory_bytes_max=64 * MIB)
    store = open_store(url)
    record = RepositoryRecord(id="0" * 20, ttl_ms=10**9, margin_ms=10**6, collection_period_ms=10**9)
    repository = OpenRepository(store=store, record=record, settings=settings)
    await store.now_ms()
    phases: dict[str, object] = {}
    reference: StoreReference | None = None
    for version, phase in enumerate(("first backup", "second backup"), start=1):
        peak, begun = Peak(), time.monotonic()
        source, address = WholeDirectory(root / "state"), StoreAddress(Scope("job"))
        result = await backup_source(repository, source, address, reference, BackupOptions(version=version))
        reference = result.reference
        phases[phase] = [peak.end(), time.monotonic() - begun]
    assert reference is not None
    for phase in ("restore", "restore again"):
        peak, begun = Peak(), time.monotonic()
        options = RestoreOptions(replace=phase != "restore")
        await restore_store(repository, reference, root / "target", options)
        phases[phase] = [peak.end(), time.monotonic() - begun]
    await store.close()
    return phases


def main() -> None:
    root, numbers = Path(sys.argv[1]), sys.argv[2:5]
    url = sys.argv[5] if len(sys.argv) > 5 else f"file://{root}/repository"
    subprocess.run([sys.executable, "-c", _MAKE, str(root / "state"), *numbers], check=True)
    idle = Peak()
    phases = asyncio.run(run(root, url))
    print(json.dumps({"over_idle_bytes": idle.end(), "phases": phases}))  # noqa: T201


if __name__ == "__main__":
    main()
