"""What a blob restore replaces: replay of a changelog into RocksDB, as a lower bound without a broker.

A changelog is a file in memory of records of one key and one value, read in order; nothing is fetched, decoded,
decompressed or checked, which a real replay from a broker does for each message. It goes into a store with Spark's
settings and no write-ahead log, and is flushed:

- one by one: a put for each message;
- batched: 10,000 messages at a time, sorted, each key once.

Against that, the restore of the same state from an S3 server on this machine: every byte verified, every file fsynced,
the store opened and a key read. All in Python, whose share is largest where messages are smallest and go one by one.

Run `make bench PART=replay`, or `python -m benchmarks.bench_replay --state-mb 20 --rounds 2` for a quick look; another
size than that of a whole run is in the names of the results.
"""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.peers import report
from benchmarks.peers.clients.job import Job, main, opened
from benchmarks.peers.clients.tidemark_client import SCOPE, open_repository
from benchmarks.peers.contestants import OURS, Place, Tidemark
from benchmarks.peers.figures import good
from benchmarks.peers.outcome import Outcome, begin
from benchmarks.peers.processes import ROOT, Command, end_in_order, run, run_idle, sample_of_run, sync
from benchmarks.peers.servers import BenchServer, open_server
from benchmarks.peers.trees import tree_bytes
from engine.rocksdb.store import StoreReader, StoreWriter, spark_settings
from engine.settings import MIB

KEY_BYTES = 16
AT_ONCE = 10_000
STATE_MB = 256
VALUES_BYTES = (50, 200, 1024)
OVERWRITES = (1, 5)
ONE, BATCHED = "replay, one by one", "replay, batched"
VERBS = {OURS: "restore", ONE: "one", BATCHED: "batched"}
ABOUT = {
    OURS: "restore from S3, verified and fsynced; then the store is opened and a key is read",
    ONE: "a lower bound without a broker: one put for each message, no write-ahead log, then a flush",
    BATCHED: "a lower bound without a broker: 10,000 messages at a time, sorted, each key once, then a flush",
}


def label_of(value_bytes: int, overwrites: int) -> str:
    """What a shape is called."""
    return f"values of {value_bytes} B, {overwrites} write{'s' if overwrites > 1 else ''} per key"


def write_changelog(path: Path, keys_count: int, value_bytes: int, overwrites: int) -> None:
    """Write each key `overwrites` times, each time in another order."""
    rng = np.random.default_rng(value_bytes * 10 + overwrites)
    with path.open("wb") as file:
        for _ in range(overwrites):
            order = rng.permutation(keys_count)
            for begin_at in range(0, keys_count, AT_ONCE):
                keys = order[begin_at : begin_at + AT_ONCE]
                records = np.empty((len(keys), KEY_BYTES + value_bytes), dtype=np.uint8)
                texts = np.array([b"%016x" % key for key in keys], dtype=f"S{KEY_BYTES}")
                records[:, :KEY_BYTES] = texts.view(np.uint8).reshape(len(keys), KEY_BYTES)
                records[:, KEY_BYTES:] = np.frombuffer(os.urandom(len(keys) * value_bytes), dtype=np.uint8).reshape(
                    len(keys), value_bytes
                )
                file.write(records.tobytes())


def read_changelog(path: Path, value_bytes: int) -> Iterator[tuple[bytes, bytes]]:
    """Its records in order."""
    record_bytes = KEY_BYTES + value_bytes
    with path.open("rb") as file:
        while data := file.read(AT_ONCE * record_bytes):
            for at in range(0, len(data), record_bytes):
                yield data[at : at + KEY_BYTES], data[at + KEY_BYTES : at + record_bytes]


def replay_one_by_one(store: StoreWriter, path: Path, value_bytes: int) -> None:
    """A put for each message."""
    put = store.put
    for key, value in read_changelog(path, value_bytes):
        put(key, value)


def replay_batched(store: StoreWriter, path: Path, value_bytes: int) -> None:
    """As many messages at once as are read at once."""
    records = read_changelog(path, value_bytes)
    while changes := dict(_take(records)):
        store.write_batch(changes)


def _take(records: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    for _ in range(AT_ONCE):
        record = next(records, None)
        if record is None:
            return
        yield record


async def _restore(job: Job) -> None:
    async with await open_repository(job) as repository:
        opened()
        await repository.find_and_restore(SCOPE, Path(job.directory))
    with StoreReader.open(Path(job.directory), spark_settings()) as store:
        store.get(b"%016x" % 0)


def step(job: Job) -> None:
    """One step in a process of its own."""
    if job.verb == "restore":
        asyncio.run(_restore(job))
        return
    replay = replay_one_by_one if job.verb == "one" else replay_batched
    with StoreWriter.open(Path(job.directory), spark_settings()) as store:
        opened()
        replay(store, Path(job.options["changelog"]), job.options["value_bytes"])
        store.flush()


def count_keys(directory: Path) -> int:
    """How many a store has."""
    with StoreReader.open(directory, spark_settings()) as store:
        return sum(store.count().values())


class Replays:
    """All shapes on one server."""

    def __init__(self, server: BenchServer, memory: Path, outcome: Outcome, state_bytes: int) -> None:
        self._server = server
        self._memory = memory
        self._outcome = outcome
        self._state_bytes = state_bytes
        self._place = Place.of(server)

    def run(self, value_bytes: int, overwrites: int) -> None:
        """All rounds of one shape."""
        label = label_of(value_bytes, overwrites)
        keys_count = self._state_bytes // (KEY_BYTES + value_bytes)
        changelog, source, target = (self._memory / name for name in ("changelog", "source", "target"))
        write_changelog(changelog, keys_count, value_bytes, overwrites)
        with StoreWriter.open(self._memory / "building", spark_settings()) as store:
            replay_batched(store, changelog, value_bytes)
            store.flush()
            store.checkpoint(source)
        shutil.rmtree(self._memory / "building")
        ours = Tidemark()
        ours.prepare(self._place)
        run(ours.upload(self._place, source))
        # What a process holds before it works: Python, our imports and an open repository.
        opened = run_idle(ours.open(self._place))
        for number in range(1, self._outcome.rounds + 1):
            for name, verb in VERBS.items():
                shutil.rmtree(target, ignore_errors=True)
                command = ours.command(verb, self._place, target)
                options = {"changelog": str(changelog), "value_bytes": value_bytes, "safe": self._place.is_safe}
                job = Job(**(msgspec.json.decode(command.arguments[-1]) | {"options": options}))
                usage = run(
                    Command(
                        arguments=(sys.executable, "-m", "benchmarks.bench_replay", job.encode()),
                        environment={**command.environment, "PYTHONPATH": str(ROOT)},
                    )
                )
                sync_s = sync(self._memory)
                found = count_keys(target)
                sample = sample_of_run(
                    usage,
                    opened,
                    step=label,
                    contestant=name,
                    number=number,
                    size_bytes=tree_bytes(source),
                    files_count=len(list(source.iterdir())),
                    sync_s=sync_s,
                    error="" if found == keys_count else f"{found} keys of {keys_count}",
                )
                self._outcome.samples.append(sample)
                sys.stdout.write(f"{label} {number} {name:20} {sample.work_s:.2f} s\n")
        for path in (source, target):
            shutil.rmtree(path)
        changelog.unlink()
        self._server.empty()


def measure(options: argparse.Namespace) -> Outcome:
    """Every shape in turn."""
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-", dir=options.memory) as directory:
        memory = Path(directory)
        with open_server(options.server, memory) as server:
            title = f"Restore of {options.state_mb} MB of state against replay of its changelog"
            make = partial(begin, "replay", title, server=server.kind, target="tmpfs", rounds=options.rounds)
            outcome = make(scale=options.state_mb / STATE_MB, contestants=ABOUT)
            replays = Replays(server, memory, outcome, options.state_mb * MIB)
            for value_bytes in VALUES_BYTES:
                for overwrites in OVERWRITES:
                    replays.run(value_bytes, overwrites)
    return outcome


def _measure_all() -> None:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_replay", description=description)
    parser.add_argument("--state-mb", type=int, default=STATE_MB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", choices=("rclone", "ceph"), default="rclone")
    parser.add_argument("--memory", default="/dev/shm", help="a directory in memory")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    end_in_order()
    outcome = measure(options)
    written = report.write(outcome, options.results, plot_curve)
    sys.stdout.write(f"{report.markdown(outcome)}\nwritten: {written}\n")


def plot_curve(outcome: Outcome, path: Path) -> None:
    """One panel for each number of writes per key, and in it a line for each contestant."""
    from benchmarks.peers.plot import Curve, plot_curves  # noqa: PLC0415  # matplotlib is in an extra

    panels = {
        f"{overwrites} write{'s' if overwrites > 1 else ''} per key": [
            Curve(
                name=name,
                points=[
                    (value_bytes, [s.work_s for s in good(outcome.of(label_of(value_bytes, overwrites), name))])
                    for value_bytes in VALUES_BYTES
                ],
            )
            for name in VERBS
        ]
        for overwrites in OVERWRITES
    }
    plot_curves(panels, path, title=outcome.title, x_label="bytes of a value")


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        main(step)
    else:
        _measure_all()
