"""From the loss of a task to its first read: a promoted follower beside a full restore, in the same run.

A RocksDB of about 1 GiB is backed up to a repository in a directory and followed; then 1 % of it changes. Each round:

- `step`: the follower brings its directory to that change.
- `promoted`: in the same process, the directory is promoted, which asks for the newest commit; the store is opened for
  writing and one key is read.
- `promoted, CLI`: the same by `tidemark follow --promote`, a new process with its imports, then the opening.
- `restored`: a full restore to an empty directory, the opening and the key. It is what `promoted` replaces.

The page cache is warm for all of them. Which of the last three comes first changes from round to round.

Run `make bench PART=failover`, or `python -m benchmarks.bench_failover --size-mb 256 --rounds 3` for a quick look.
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.repository.repository import SyncRepository
from engine.rocksdb.store import StoreWriter
from index.snapshot.model import Scope

SIZE_MB, ROUNDS = 1024, 5
VALUE_BYTES = 4096
CHANGED_SHARE = 0.01
# What an operator waits for at most.
GOAL_S = 0.2
JOB = Scope("job")
STEPS = ("step", "promoted", "promoted, CLI", "restored")
KEY = b"%012d" % 7


def write(db: StoreWriter, rng: random.Random, *, count: int, keys_max: int) -> None:
    """Put rows that do not compress: every key once, or some of them."""
    for start in range(0, count, 1000):
        rows = range(start, min(start + 1000, count))
        numbers = rows if count == keys_max else [rng.randrange(keys_max) for _ in rows]
        db.write_batch({b"%012d" % number: rng.randbytes(VALUE_BYTES) for number in numbers})
    db.flush()


def commit(repository: SyncRepository, db: StoreWriter, checkpoint: Path) -> None:
    db.checkpoint(checkpoint)
    repository.commit(JOB, [repository.backup(JOB, checkpoint)])
    shutil.rmtree(checkpoint)


def read_first(directory: Path) -> None:
    with StoreWriter.open(directory) as db:
        assert db.get(KEY) is not None


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(root: Path, *, size_mb: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds of every step, by round; the first round is thrown away."""
    seconds: dict[str, list[float]] = {step: [] for step in STEPS}
    rng, keys_max = random.Random(0), size_mb * 2**20 // VALUE_BYTES
    url = f"file://{root}/repository"
    with SyncRepository.init(url) as repository, StoreWriter.open(root / "db") as db:
        write(db, rng, count=keys_max, keys_max=keys_max)
        commit(repository, db, root / "checkpoint")
        for number in range(rounds + 1):
            taken = one_round(repository, db, root, rng, number, keys_max)
            for step in STEPS if number else ():
                seconds[step].append(taken[step])
    return seconds


def one_round(
    repository: SyncRepository, db: StoreWriter, root: Path, rng: random.Random, number: int, keys_max: int
) -> Mapping[str, float]:
    scratch = root / f"round-{number}"
    scratch.mkdir()
    one, other, restored = scratch / "one", scratch / "other", scratch / "restored"
    for directory in (one, other):
        repository.follow(JOB, directory, task="0", store="default")
    write(db, rng, count=int(keys_max * CHANGED_SHARE), keys_max=keys_max)
    commit(repository, db, root / "checkpoint")
    taken = {"step": timed(lambda: repository.follow(JOB, one, task="0", store="default"))}
    repository.follow(JOB, other, task="0", store="default")

    def promote() -> None:
        assert repository.promote(JOB, one, task="0", store="default").lag_commits == 0
        read_first(one)

    def promote_by_command() -> None:
        words = ["follow", JOB.job, str(other), "--promote", "--quiet", "--task", "0", "--store", "default"]
        environment = os.environ | {"TIDEMARK_REPOSITORY": f"file://{root}/repository"}
        subprocess.run([sys.executable, "-m", "engine.cli", *words], check=True, env=environment)
        read_first(other)

    def restore() -> None:
        repository.find_and_restore(JOB, restored)
        read_first(restored)

    works = [("promoted", promote), ("promoted, CLI", promote_by_command), ("restored", restore)]
    for step, work in works[number % 3 :] + works[: number % 3]:
        taken[step] = timed(work)
    shutil.rmtree(scratch)
    return taken


def report(seconds: Mapping[str, list[float]], *, size_mb: int) -> None:
    print(f"a store of {size_mb} MB, {len(seconds['restored'])} rounds")
    for step, values in seconds.items():
        print(f"{step:14} median {statistics.median(values):7.3f} s, from {min(values):7.3f} to {max(values):7.3f}")
    pairs = zip(seconds["promoted"], seconds["restored"], strict=True)
    print(f"restored / promoted, pair by pair: median {statistics.median(b / a for a, b in pairs):.0f}")
    slowest = max(seconds["promoted"])
    print(f"promoted within {GOAL_S} s in every round: {'reached' if slowest <= GOAL_S else 'missed'}")


def test_failover_to_a_follower(tmp_path: Path) -> None:
    report(measure(tmp_path, size_mb=SIZE_MB, rounds=ROUNDS), size_mb=SIZE_MB)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_failover", description=__doc__)
    parser.add_argument("--size-mb", type=int, default=SIZE_MB, help="size of the store (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds after the first (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch_directory:
        measured = measure(Path(scratch_directory), size_mb=options.size_mb, rounds=options.rounds)
    report(measured, size_mb=options.size_mb)
