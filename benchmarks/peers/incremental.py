"""Work (b): 1 % of many small files changed, ours in a warm process, against `rclone sync` and `restic backup`.

All have the whole tree in the bucket, each below a prefix of its own, and keep it there: nobody could be incremental
otherwise. In each round a hundredth of the files is rewritten, and everybody is brought up to date in turn. At the end
each one's tree is restored and compared.
"""

import shutil
from pathlib import Path

from benchmarks.peers.contestants import OURS, Contestant, Place
from benchmarks.peers.counting import open_proxy
from benchmarks.peers.figures import Sample
from benchmarks.peers.outcome import Outcome, Requests
from benchmarks.peers.processes import ContestantError, run, run_idle
from benchmarks.peers.run import Run
from benchmarks.peers.servers import BenchServer, open_server
from benchmarks.peers.trees import KIB, Shape, change_files, difference, make_tree, tree_digests
from benchmarks.peers.warm import WarmTidemark, init_repository, sample_of

COUNTS = (5_000, 100_000)
FILE_BYTES = 4 * KIB
PEERS = ("rclone", "restic")


def update_trees(work: Run) -> Outcome:
    """Both sizes."""
    outcome = work.begin("Incremental backup, 1 % of the files changed", "")
    peers = work.present(outcome, [peer for peer in work.contestants if peer.name in PEERS])
    outcome.contestants = {OURS: "backup and commit in a warm process"} | outcome.contestants
    for count in COUNTS:
        memory = work.memory / str(count)
        memory.mkdir()
        # rclone tells what changed by times, so that the server has to keep them.
        with open_server(work.server, memory, modtimes=True) as server:
            outcome.server = server.kind
            _Updates(work, outcome, server, memory, peers).run(max(100, round(count * work.scale)))
        shutil.rmtree(memory)
    return outcome


class _Updates:
    """The rounds of one size."""

    def __init__(self, work: Run, outcome: Outcome, server: BenchServer, memory: Path, peers: list[Contestant]) -> None:
        self._work = work
        self._outcome = outcome
        self._server = server
        self._source = memory / "source"
        self._peers = peers
        self._place = Place.of(server)

    def run(self, count: int) -> None:
        step = f"1 % of {count:,} files"
        make_tree(Shape(name="many", count=count, size_bytes=FILE_BYTES), self._source)
        settings = dict(self._work.settings)
        init_repository(self._place, settings)
        with WarmTidemark(self._place, settings) as ours:
            ours.ask("backup", self._source)
            for peer in self._peers:
                peer.prepare(self._place)
                run(peer.upload(self._place, self._source))
            for number in range(1, self._work.rounds + 1):
                size_bytes = change_files(self._source, number)
                answer = ours.ask("backup", self._source)
                self._add(sample_of(answer, step=step, contestant=OURS, number=number, size_bytes=size_bytes))
                for peer in self._peers:
                    self._update(peer, step, number, size_bytes)
        self._count(step, settings)
        self._check(settings)
        for peer in self._peers:
            peer.cleanup()

    def _update(self, peer: Contestant, step: str, number: int, size_bytes: int) -> None:
        opened = run_idle(peer.open(self._place))
        usage = run(peer.update(self._place, self._source))
        self._add(
            Sample(
                step=step,
                contestant=peer.name,
                round=number,
                wall_s=usage.wall_s,
                user_s=usage.user_s,
                system_s=usage.system_s,
                peak_bytes=usage.peak_bytes,
                size_bytes=size_bytes,
                open_s=opened.wall_s,
                open_cpu_s=opened.cpu_s,
                open_peak_bytes=opened.peak_bytes,
            )
        )

    def _add(self, sample: Sample) -> None:
        self._outcome.samples.append(sample)
        self._work.told(f"{sample.step} {sample.round} {sample.contestant:10} {sample.work_s:.3f} s")

    def _count(self, step: str, settings: dict[str, object]) -> None:
        """One more round through the proxy; ours is made warm by one backup first."""
        with open_proxy(self._place.endpoint_url) as proxy:
            place = Place.of(self._server, proxy.endpoint_url)
            with WarmTidemark(place, settings) as ours:
                ours.ask("backup", self._source)
                change_files(self._source, 0)
                proxy.counted()
                ours.ask("backup", self._source)
                self._outcome.requests.append(Requests(step=step, contestant=OURS, counts=dict(proxy.counted())))
            for peer in self._peers:
                run(peer.update(place, self._source))
                self._outcome.requests.append(Requests(step=step, contestant=peer.name, counts=dict(proxy.counted())))

    def _check(self, settings: dict[str, object]) -> None:
        expected, target = tree_digests(self._source), self._work.room / "target"
        with WarmTidemark(self._place, settings) as ours:
            for name in (OURS, *(peer.name for peer in self._peers)):
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir(parents=True)
                try:
                    if name == OURS:
                        ours.ask("restore", target)
                    else:
                        run(next(p for p in self._peers if p.name == name).restore(self._place, target))
                    wrong = difference(expected, target)
                except ContestantError as error:
                    wrong = str(error)
                told = f"WRONG: {wrong}" if wrong else "restored right"
                self._outcome.notes.append(f"{name}, {len(expected):,} files, after the last round: {told}")
        shutil.rmtree(target, ignore_errors=True)
