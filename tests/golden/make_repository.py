"""Makes a repository as an older commit of this project writes it; run once in a work tree of that commit.

    git worktree add ../older 9c11d49
    PYTHONPATH=../older python tests/golden/make_repository.py tests/golden/repository_9c11d49.tar.xz

It has what a repository can have: jobs and tasks, packs, deltas, inline files, a name, a fork, a rewind, a pin, a
boundary, a forgotten job, an abandoned upload and backups of a streaming checkpoint. An archive is never made again.
"""

import asyncio
import sys
import tarfile
import tempfile
from pathlib import Path
from unittest import mock

from blobstore.base import BytesBody
from engine.checkpoint.backup import backup_checkpoint
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from index.plan.commits import Commit, Retention
from index.snapshot.codec import encode_record
from index.snapshot.keys import pin_key
from index.snapshot.model import Pin, Scope, ScopeLayout
from tests.unit.engine.checkpoint.live_query import LiveQuery

FLIGHTS = Scope("flights")
REPLAY = Scope("replay")
TASKS = (Scope("by task", "0"), Scope("by task", "1"))
GONE = Scope("gone")
NAME = "before-upgrade"
# A commit of the same number and state, which the collection has closed.
PINNED = 3
PIN_ID = "0123456789abcdef0123"
# Of the streaming checkpoint.
BATCHES = 6

# Which state each commit holds that the collection has left, by scope and number.
STATES = {FLIGHTS: {2: 2, 4: 1, 5: 5, 6: 6}, REPLAY: {1: 3, 2: 13}, TASKS[0]: {1: 20, 2: 21}, TASKS[1]: {1: 30, 2: 31}}
# Sizes that make each kind of file with little data.
SETTINGS = TransferSettings(
    inline_file_bytes_max=16,
    inline_bytes_max=64,
    pack_file_bytes_max=2048,
    pack_bytes_max=8192,
    chunk_bytes=4096,
    blob_bytes_max=8192,
    range_bytes=8192,
    memory_bytes_max=64 * 1024,
    in_flight_max=4,
)


def tree(state: int) -> dict[str, bytes]:
    """Return the files of a state; from one state to the next four of twenty change."""
    files = {f"{n:06d}.sst": b"%d, as of state %d\n" % (n, state - (state - n) % 5) * 50 for n in range(20)}
    return files | {
        "CURRENT": b"MANIFEST-%06d\n" % state,
        "OPTIONS-000007": b"max_open_files=1000\n" * 250,
        "large": b"the same in each state\n" * 900,
        "sub/empty": b"",
        "sub/\N{LATIN SMALL LETTER U WITH DIAERESIS}bersicht": b"state %d" % state * 20,
    }


def write_tree(directory: Path, state: int) -> Path:
    """Make a directory hold exactly a state; files that are right stay as they are."""
    for name, data in tree(state).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != data:
            path.unlink(missing_ok=True)
            path.write_bytes(data)
    return directory


async def _commit(repository: Repository, scope: Scope, directory: Path, state: int) -> Commit:
    task = scope.task or "0"
    result = await repository.backup(scope, write_tree(directory, state), task=task)
    layout = ScopeLayout(tasks_count=1, key_hash="spark-hash-v1") if scope == FLIGHTS else None
    return await repository.commit(scope, [result], offsets=f"state {state}", layout=layout)


async def make(root: Path, scratch: Path) -> None:
    """Write the repository to `root`."""
    async with await Repository.init(f"file://{root}", settings=SETTINGS) as repository:
        first, second, third = [await _commit(repository, FLIGHTS, scratch / "flights", n) for n in (1, 2, 3)]
        assert third.pointer.number == PINNED
        await repository.name(second, NAME)
        await repository.fork(third, REPLAY)
        await _commit(repository, REPLAY, scratch / "replay", 13)
        await repository.rewind(first)
        await _commit(repository, FLIGHTS, scratch / "flights", 5)
        for number, scope in enumerate(TASKS):
            for state in (20, 21):
                await _commit(repository, scope, scratch / f"task-{number}", state + 10 * number)
        for state in (40, 41):
            await _commit(repository, GONE, scratch / "gone", state)
        await repository.forget(GONE)
        # As of a reader that was killed.
        pin = Pin(
            id=PIN_ID,
            scope=FLIGHTS,
            source=third.pointer,
            duration_ms=7_200_000,
            purpose="read",
            stores=third.record.stores,
        )
        await repository.store.put(pin_key(pin.id), BytesBody(encode_record(pin)))
        query = LiveQuery(scratch / "query", partitions=1)
        await query.run(BATCHES - 2)
        await backup_checkpoint(repository, query.root)
        await query.run(2)
        await backup_checkpoint(repository, query.root)
        await query.close()
        await repository.collect(Retention(keep_last=2), delete_share_max=1.0)
        await _commit(repository, FLIGHTS, scratch / "flights", 6)
        await repository.backup(FLIGHTS, write_tree(scratch / "flights", 7))


def _anonymous(item: tarfile.TarInfo) -> tarfile.TarInfo:
    item.uid = item.gid = 0
    item.uname = item.gname = ""
    return item


def main(archive: Path) -> None:
    """Make the archive."""
    with tempfile.TemporaryDirectory() as temporary:
        root, scratch = Path(temporary, "repository"), Path(temporary, "scratch")
        # Indexes as small as these are stored whole otherwise.
        with mock.patch("engine.records.indexes.WHOLE_BYTES_MAX", 0):
            asyncio.run(make(root, scratch))
        with tarfile.open(archive, "x:xz") as tar:
            tar.add(root, "repository", filter=_anonymous)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
