"""Work (c): restore onto a directory that has 90 % of the files, trusted by stat or verified by hash.

All three by one warm process. "Trusted" is the process that restored the directory before: its digest cache knows
each file's stat. "Verified" has just opened the repository anew and knows nothing, so it reads and hashes what is
there; what that alone costs is measured beside it, in this process.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from benchmarks.peers.clients.warm_client import Answer
from benchmarks.peers.contestants import OURS, Place
from benchmarks.peers.outcome import Outcome
from benchmarks.peers.processes import sync
from benchmarks.peers.run import Run
from benchmarks.peers.servers import open_server
from benchmarks.peers.trees import SHAPES, difference, make_tree, tree_bytes, tree_digests
from benchmarks.peers.warm import WarmTidemark, init_repository, sample_of

SHAPE_NAMES = ("small", "mid")
TRUSTED = f"{OURS}, 90 % trusted by stat"
VERIFIED = f"{OURS}, 90 % verified by hash"
READING = "reading and hashing 90 %"
MISSING_SHARE = 10
# A file that changed a moment ago is not yet trusted by its stat.
SETTLE_S = 2.1


def restore_onto(work: Run) -> Outcome:
    """Both trees."""
    with open_server(work.server, work.memory) as server:
        outcome = work.begin("Restore onto a directory that has 90 % of the files", server.kind)
        outcome.contestants = {
            OURS: "full restore into an empty directory, warm process",
            TRUSTED: "the same process restored the directory before",
            VERIFIED: "nothing is known of the directory",
            READING: "blake3 of the files that are there, one thread, no library of ours: what verifying is bound by",
        }
        for name in SHAPE_NAMES:
            _restore_shape(work, outcome, name, Place.of(server))
            server.empty()
    return outcome


def _restore_shape(work: Run, outcome: Outcome, name: str, place: Place) -> None:
    source, target = work.memory / "source", work.room / "target"
    shutil.rmtree(target, ignore_errors=True)
    shape = SHAPES[name].scaled(work.scale)
    make_tree(shape, source)
    expected, size_bytes = tree_digests(source), tree_bytes(source)
    settings = dict(work.settings)
    init_repository(place, settings)
    step = f"{shape.count:,} files of {shape.size_bytes // 1024:,} KiB"
    with WarmTidemark(place, settings) as ours:
        ours.ask("backup", source)

        def turn(contestant: str, number: int, act: Callable[[], Answer]) -> None:
            sync(work.room)
            answer = act()
            sync_s = sync(work.room)
            error = difference(expected, target) if contestant != READING else ""
            sample = sample_of(
                answer,
                step=step,
                contestant=contestant,
                number=number,
                size_bytes=size_bytes,
                sync_s=sync_s,
                error=error,
            )
            outcome.samples.append(sample)
            reused = f"{answer.files_fetched} fetched, {answer.files_reused} reused"
            work.told(f"{step} {number} {contestant:36} {sample.work_s:.3f} s {reused} {error}")

        for number in range(1, work.rounds + 1):
            shutil.rmtree(target, ignore_errors=True)
            turn(OURS, number, lambda: ours.ask("restore", target))
            _take_away(target)
            turn(TRUSTED, number, lambda: ours.ask("restore", target, replace=True))
            ours.ask("reopen")
            _take_away(target)
            turn(READING, number, lambda: _read(target))
            turn(VERIFIED, number, lambda: ours.ask("restore", target, replace=True))
    shutil.rmtree(source)
    shutil.rmtree(target)


def _take_away(target: Path) -> None:
    """One file in ten is gone; the others have been quiet for a while."""
    for path in sorted(target.iterdir())[::MISSING_SHARE]:
        path.unlink()
    time.sleep(SETTLE_S)


def _read(target: Path) -> Answer:
    began_s = time.perf_counter()
    for path in sorted(target.iterdir()):
        blake3().update_mmap(path).digest()
    return Answer(wall_s=time.perf_counter() - began_s)
