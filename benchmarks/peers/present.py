"""Work (c): restore onto a directory that has 90 % of the files, trusted by stat or verified by hash.

Ours is one warm process. "Trusted" is the process that restored the directory before: its digest cache knows each
file's stat. "Verified" has just opened the repository again and knows nothing, so it reads and hashes what is there;
what that alone costs is measured beside it, in this process.

The peers bring the same directory up to date, each after it has restored it whole itself: rclone by size and time, and
restic in the ways that it has. Before 0.17 that is one: everything is fetched and written again.
"""

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from typing_extensions import override

from benchmarks.peers.clients.warm_client import Answer
from benchmarks.peers.contestants import OURS, Contestant, Place
from benchmarks.peers.figures import Sample
from benchmarks.peers.outcome import Outcome
from benchmarks.peers.processes import Command, ContestantError, run, run_idle, sample_of_run, sync
from benchmarks.peers.programs import Rclone, Restic
from benchmarks.peers.run import Run
from benchmarks.peers.servers import BUCKET, open_server
from benchmarks.peers.trees import KIB, MIB, SHAPES, Shape, difference, make_tree, tree_bytes, tree_digests
from benchmarks.peers.warm import WarmTidemark, init_repository, sample_of

SHAPE_NAMES = ("small", "mid")
TRUSTED = f"{OURS}, 90 % trusted by stat"
VERIFIED = f"{OURS}, 90 % verified by hash"
READING = "reading and hashing 90 %"
MISSING_SHARE = 10
# A file that changed a moment ago is not yet trusted by its stat.
SETTLE_S = 2.1


class RcloneOnto(Rclone):
    """rclone, which trusts a file by its size and its time."""

    name = "rclone, 90 % by size and time"
    about = "rclone copy onto them: size and the time that the server keeps; no content is read"

    @override
    def restore(self, place: Place, target: Path) -> Command:
        source = f"peer:{BUCKET}/{self.prefix}"
        return self._command(place, "copy", source, str(target), "--use-server-modtime", "--modify-window", "1s")


class ResticOnto(Restic):
    """restic with one of the rules that it has for files that are there."""

    def __init__(self, rule: str, name: str, about: str) -> None:
        super().__init__()
        self._rule = rule
        self.name = name
        self.about = about

    @override
    def restore(self, place: Place, target: Path) -> Command:
        plain = super().restore(place, target)
        more = ("--overwrite", self._rule) if self._rule else ()
        return Command(arguments=(*plain.arguments, *more), environment=plain.environment, directory=plain.directory)


def restic_rules() -> tuple[ResticOnto, ...]:
    """The ways that the installed restic has to treat files that are there."""
    program = shutil.which("restic")
    has_rules = (
        program
        and "--overwrite"
        in subprocess.run([program, "restore", "--help"], capture_output=True, text=True, check=False).stdout
    )
    if not has_rules:
        about = "restic restore onto them; before 0.17 it has no --overwrite and looks at nothing: all is fetched"
        return (ResticOnto("", "restic, all written again", about),)
    return (
        ResticOnto("if-changed", "restic, 90 % by size and time", "restic restore --overwrite if-changed"),
        ResticOnto("always", "restic, 90 % verified by hash", "restic restore --overwrite always: content is compared"),
    )


def step_of(shape: Shape) -> str:
    """What the step with a tree is called."""
    size = f"{shape.size_bytes // MIB} MiB" if shape.size_bytes >= MIB else f"{shape.size_bytes // KIB} KiB"
    return f"{shape.count:,} files of {size}"


def restore_onto(work: Run) -> Outcome:
    """Both trees."""
    outcome = work.begin("Restore onto a directory that has 90 % of the files", "")
    wanted = {peer.name for peer in work.contestants}
    peers = work.present(outcome, [p for p in (RcloneOnto(), *restic_rules()) if p.name.split(",")[0] in wanted])
    outcome.contestants = {
        OURS: "full restore into an empty directory, warm process",
        TRUSTED: "the same process restored the directory before, with --trust-stat",
        VERIFIED: "nothing is known of the directory",
        READING: "blake3 of the files that are there, one thread, no library of ours: what verifying is bound by",
    } | outcome.contestants
    for name in SHAPE_NAMES:
        memory = work.memory / name
        memory.mkdir()
        # By time rclone can only report what the server keeps the time of.
        with open_server(work.server, memory, modtimes=True) as server:
            outcome.server = server.kind
            _Onto(work, outcome, name, memory, Place.of(server)).run(peers)
        shutil.rmtree(memory)
    return outcome


class _Onto:
    """The rounds of one tree."""

    def __init__(self, work: Run, outcome: Outcome, name: str, memory: Path, place: Place) -> None:
        shape = SHAPES[name].scaled(work.scale)
        self._work = work
        self._outcome = outcome
        self._place = place
        self._source = memory / "source"
        self._target = work.restore_root / "target"
        self._step = step_of(shape)
        make_tree(shape, self._source)
        self._expected = tree_digests(self._source)
        self._size_bytes = tree_bytes(self._source)

    def run(self, peers: list[Contestant]) -> None:
        settings = dict(self._work.settings) | {"trust_stat": True}
        init_repository(self._place, settings)
        with WarmTidemark(self._place, settings) as ours:
            ours.ask("backup", self._source)
            for peer in peers:
                # Two ways of one program share what it has uploaded.
                peer.prepare(self._place)
                run(peer.upload(self._place, self._source))
            for number in range(1, self._work.rounds + 1):
                self._empty()
                self._ours(OURS, number, lambda: ours.ask("restore", self._target))
                self._take_away()
                self._ours(TRUSTED, number, lambda: ours.ask("restore", self._target, replace=True))
                ours.ask("reopen")
                self._take_away()
                self._ours(READING, number, self._read)
                self._ours(VERIFIED, number, lambda: ours.ask("restore", self._target, replace=True))
                for peer in peers:
                    self._peer(peer, number)
        for peer in peers:
            peer.cleanup()
        shutil.rmtree(self._target)

    def _ours(self, contestant: str, number: int, act: Callable[[], Answer]) -> None:
        sync(self._work.restore_root)
        answer = act()
        sync_s = sync(self._work.restore_root)
        error = difference(self._expected, self._target) if contestant != READING else ""
        sample = sample_of(
            answer,
            step=self._step,
            contestant=contestant,
            number=number,
            size_bytes=self._size_bytes,
            files_count=len(self._expected),
            sync_s=sync_s,
            error=error,
        )
        self._add(sample, f"{answer.files_fetched} fetched, {answer.files_reused} reused")

    def _peer(self, peer: Contestant, number: int) -> None:
        self._empty()
        self._target.mkdir(parents=True)
        try:
            run(peer.restore(self._place, self._target))
            self._take_away()
            opened = run_idle(peer.open(self._place))
            sync(self._work.restore_root)
            usage = run(peer.restore(self._place, self._target))
        except ContestantError as error:
            self._outcome.notes.append(f"{peer.name}, {self._step}, round {number} failed: {error}")
            return
        sync_s = sync(self._work.restore_root)
        sample = sample_of_run(
            usage,
            opened,
            step=self._step,
            contestant=peer.name,
            number=number,
            size_bytes=self._size_bytes,
            files_count=len(self._expected),
            sync_s=sync_s,
            error=difference(self._expected, self._target),
        )
        self._add(sample, "")

    def _add(self, sample: Sample, shown: str) -> None:
        self._outcome.samples.append(sample)
        self._work.report(
            f"{sample.step} {sample.round} {sample.contestant:36} {sample.work_s:.3f} s {shown}{sample.error}"
        )

    def _empty(self) -> None:
        shutil.rmtree(self._target, ignore_errors=True)

    def _take_away(self) -> None:
        """One file in ten is gone; the others have been quiet for a while."""
        for path in sorted(self._target.iterdir())[::MISSING_SHARE]:
            path.unlink()
        time.sleep(SETTLE_S)

    def _read(self) -> Answer:
        began_s = time.perf_counter()
        for path in sorted(self._target.iterdir()):
            blake3().update_mmap(path).digest()
        return Answer(wall_s=time.perf_counter() - began_s)
