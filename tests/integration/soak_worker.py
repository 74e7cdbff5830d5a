"""The processes of the soak on S3: a writer that commits without end, and a collector that never stops.

    python -m tests.integration.soak_worker write URL DIRECTORY COMMITS
    python -m tests.integration.soak_worker collect URL KEEP_LAST

The writer goes on from the newest commit that it finds, its own or not, and prints a line for each commit that was
acknowledged to it: its number, its version. What a version holds follows from the version alone (`files_of`), so that
anybody can judge a restore.
"""

import asyncio
import hashlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import TypeVar

from blobstore.errors import StoreUnavailableError
from blobstore.opening import StoreSettings, open_store
from blobstore.s3.settings import S3Settings
from blobstore.wrappers.retry import RetrySettings
from engine.backup.backup import BackupOptions
from engine.errors import CommitUnknownError
from engine.repository.repository import Repository
from engine.settings import KIB, TransferSettings
from index.plan.commits import Commit, Retention
from index.snapshot.model import Scope

T = TypeVar("T")

JOB = Scope("soak")
# Short waits: the faults are many and none of them lasts.
STORE = StoreSettings(
    retry=RetrySettings(first_wait_s=0.02, wait_max_s=0.5, deadline_s=15.0),
    s3=S3Settings(path_style=True, read_timeout_s=5.0, connect_timeout_s=5.0),
)
# So small that a version has inline files, packed ones, single blobs and one that is cut.
TRANSFER = TransferSettings(
    inline_file_bytes_max=128, pack_file_bytes_max=4 * KIB, pack_bytes_max=32 * KIB, chunk_bytes=8 * KIB,
    blob_bytes_max=32 * KIB, in_flight_max=4,
)  # fmt: skip
TRIES_MAX = 40
SIZES = (50, 100, 700, 1_500, 3_000, 9_000, 20_000, 70_000)


def files_of(version: int) -> dict[str, bytes]:
    """Some thirty files; each changes every few versions, at its own pace, so that most are retained."""
    files: dict[str, bytes] = {}
    for number in range(30):
        # A file of its own for each generation, as SSTs are.
        generation = version // (3 + number)
        seed = f"{number}/{generation}"
        size_bytes = SIZES[number % len(SIZES)] + int(hashlib.sha256(seed.encode()).hexdigest()[:2], 16)
        files[f"{number:02d}-{generation:04d}"] = Random(seed).randbytes(size_bytes)
    return files


def make_tree(directory: Path, version: int) -> None:
    """Bring a directory to a version."""
    files = files_of(version)
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if path.name not in files:
            path.unlink()
    for name, data in files.items():
        path = directory / name
        if not path.exists() or path.read_bytes() != data:  # a killed writer leaves halves
            path.write_bytes(data)


async def again(work: Callable[[], Awaitable[T]]) -> T:
    """Do it until the store answers: what its own retries could not get through is not a fault of the caller."""
    for _ in range(TRIES_MAX):
        try:
            return await work()
        except (StoreUnavailableError, CommitUnknownError) as error:
            sys.stderr.write(f"again after {type(error).__name__}: {error}\n")
    return await work()


async def write(url: str, directory: Path, commits: int) -> None:
    repository = await again(lambda: Repository.open(open_store(url, STORE), settings=TRANSFER))
    for _ in range(commits):
        commit = await write_one(repository, directory / "tree")
        sys.stdout.write(f"{commit.pointer.number} {commit.record.version}\n")
        sys.stdout.flush()
    await repository.close()


async def write_one(repository: Repository, tree: Path) -> Commit:
    newest = await again(lambda: repository.latest(JOB))
    version = newest.record.version + 1 if newest is not None else 1
    make_tree(tree, version)
    result = await again(lambda: repository.backup(JOB, tree, options=BackupOptions(version=version)))
    # The same request until its outcome is known: a record that landed unseen is adopted (design 0002, C3).
    return await again(lambda: repository.commit(JOB, [result], version=version, offsets=f"v{version}"))


async def collect_for_ever(url: str, keep_last: int) -> None:
    repository = await again(lambda: Repository.open(open_store(url, STORE)))
    while True:
        report = await again(lambda: repository.collect(Retention(keep_last=keep_last), delete_share_max=1))
        sys.stdout.write(f"{len(report.deletes)} {len(report.failed)}\n")
        sys.stdout.flush()
        await asyncio.sleep(0.2)


def main() -> None:
    """Run one of them."""
    match sys.argv[1:]:
        case ["write", url, directory, commits]:
            asyncio.run(write(url, Path(directory), int(commits)))
        case ["collect", url, keep_last]:
            asyncio.run(collect_for_ever(url, int(keep_last)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
