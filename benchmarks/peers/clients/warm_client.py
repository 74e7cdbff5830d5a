"""tidemark in a process that goes on: a request per line comes in, and each answer shows what the work took.

`benchmarks.peers.warm` has the other end. Time, CPU and memory are those of the work alone, without its start.
"""

import asyncio
import resource
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.peers.clients.job import Job, main
from benchmarks.peers.clients.tidemark_client import SCOPE, open_repository
from engine.backup.backup import BackupResult
from engine.repository.repository import Repository
from engine.restore.restore import RestoreOptions

STATUS: Final = Path("/proc/self/status")
# Writing a 5 makes the kernel forget the peak of memory so far.
FORGET_PEAK: Final = Path("/proc/self/clear_refs")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to do."""

    # `reopen`, `backup` (and commit), `backup_stores`, `commit`, `restore`.
    verb: str
    directory: str = ""
    # Of a restore: the directory has content, and what is right in it may stay.
    replace: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What it took."""

    wall_s: float = 0.0
    user_s: float = 0.0
    system_s: float = 0.0
    peak_bytes: int = 0
    # Resident before any work began, with the repository open.
    idle_bytes: int = 0
    # Of a restore: from the store, and found in the directory.
    files_fetched: int = 0
    files_reused: int = 0
    error: str = ""


class WarmClient:
    """One repository, and what was backed up and is not committed yet."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._repository: Repository | None = None
        self._results: list[BackupResult] = []
        self._idle_bytes = 0

    async def serve(self) -> None:
        """Until the input ends."""
        while line := await asyncio.to_thread(sys.stdin.readline):
            answer = await self.measure(msgspec.json.decode(line, type=Request))
            sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
            sys.stdout.flush()
        if self._repository is not None:
            await self._repository.close()

    async def measure(self, request: Request) -> Answer:
        """Do it, and look what it took."""
        if request.verb == "reopen":
            await self.reopen()
            return Answer()
        if self._repository is None:
            await self.reopen()
        FORGET_PEAK.write_text("5")
        self._idle_bytes = self._idle_bytes or memory_bytes("VmRSS")
        before, began_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        fetched = reused = 0
        error = ""
        try:
            fetched, reused = await self.work(request)
        except Exception as failure:  # noqa: BLE001 - whatever it is, it is this sample's and no other's
            error = f"{type(failure).__name__}: {failure}"
        wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_SELF)
        return Answer(
            wall_s=wall_s,
            user_s=after.ru_utime - before.ru_utime,
            system_s=after.ru_stime - before.ru_stime,
            peak_bytes=memory_bytes("VmHWM"),
            idle_bytes=self._idle_bytes,
            files_fetched=fetched,
            files_reused=reused,
            error=error,
        )

    async def reopen(self) -> None:
        """Forget everything that is in memory."""
        if self._repository is not None:
            await self._repository.close()
        self._repository = await open_repository(self._job)

    async def work(self, request: Request) -> tuple[int, int]:
        """Do it; of a restore, how many files were fetched and reused."""
        repository, directory = self._repository, Path(request.directory)
        assert repository is not None
        match request.verb:
            case "backup":
                await repository.commit(SCOPE, [await repository.backup(SCOPE, directory)])
            case "backup_stores":
                stores = sorted(directory.iterdir())  # noqa: ASYNC240 - nothing else happens in this process
                self._results = [await repository.backup(SCOPE, path, task=path.name) for path in stores]
            case "commit":
                await repository.commit(SCOPE, self._results)
            case "restore":
                done = await repository.find_and_restore(
                    SCOPE, directory, options=RestoreOptions(replace=request.replace)
                )
                return done.result.files_fetched, done.result.files_reused
            case verb:
                raise ValueError(verb)
        return 0, 0


def memory_bytes(name: str, status: Path = STATUS) -> int:
    """One of the sizes that the kernel reports of a process."""
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(lambda job: asyncio.run(WarmClient(job).serve()))
