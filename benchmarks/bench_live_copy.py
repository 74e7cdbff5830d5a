"""How long a copy of a RocksDB takes while another process writes to it (design 0012).

A process puts and deletes rows of about 400 bytes in a RocksDB of about 200 SSTs, at a steady rate, with small write
buffers, so that flushes and compactions never cease. Beside it copies are taken, with and without a write-ahead log.
The wall clock has what the two processes, and others of the machine, take from each other; the CPU time has not.

Run `make bench PART=live_copy`, or `python -m benchmarks.bench_live_copy --copies 200` for a quick look.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from engine.rocksdb.live import LiveReader
from tests.integration.live_writer import writing

COPIES, KEYS, RATE = 1000, 10_000, 5_000
GOAL_MS = 50
KINDS = ("no-wal", "wal")


def p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


def measure(root: Path, kind: str, *, copies: int, rate: int) -> None:
    """Print what the copies of one store took."""
    wall_ms, cpu_ms, ssts, attempts = [], [], [], 0
    with writing(root / kind, kind, KEYS, rate=rate):
        reader = LiveReader(root / kind)
        for _ in range(copies):
            target = root / "copy"
            target.mkdir()
            began, began_cpu = time.perf_counter(), time.process_time()
            taken = reader.copy(target)
            wall_ms.append((time.perf_counter() - began) * 1000)
            cpu_ms.append((time.process_time() - began_cpu) * 1000)
            ssts.append(taken.ssts)
            attempts += taken.attempts
            shutil.rmtree(target)
            time.sleep(0.01)
        reader.close()
    shutil.rmtree(root / kind)
    print(f"{kind}: {copies} copies of {min(ssts)} to {max(ssts)} SSTs, begun again {attempts - copies} times")
    for name, values in (("wall", wall_ms), ("CPU", cpu_ms)):
        median, most = statistics.median(values), max(values)
        print(f"  {name:4} median {median:6.1f} ms, p99 {p99(values):6.1f} ms, most {most:6.1f} ms")
    print(f"  p99 below {GOAL_MS} ms: {'reached' if p99(wall_ms) < GOAL_MS else 'missed'}")


def test_live_copies(tmp_path: Path) -> None:
    for kind in KINDS:
        measure(tmp_path, kind, copies=COPIES, rate=RATE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_live_copy", description=__doc__)
    parser.add_argument("--copies", type=int, default=COPIES, help="copies of each store (default: %(default)s)")
    parser.add_argument("--rate", type=int, default=RATE, help="writes in a second (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch_directory:
        for each in KINDS:
            measure(Path(scratch_directory), each, copies=options.copies, rate=options.rate)
