"""Work (b): 1 % of many small files changed, ours in a warm process, against `rclone sync` and `restic backup`.

All have the whole tree in the bucket, each below a prefix of its own, and keep it there: nobody could be incremental
otherwise. In each round a hundredth of the files is rewritten, and everybody is brought up to date in turn. At the end
each one's tree is restored, or read where the server keeps it, and compared.

Beside it, what a warm process takes when nothing has changed: a whole backup and commit, and of that the look at the
directory alone (scan, identify, diff), as `benchmarks.bench_no_change` measures it in one process with its rival.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks import bench_no_change
from benchmarks.peers.contestants import OURS, Contestant, Place
from benchmarks.peers.counting import open_proxy
from benchmarks.peers.figures import Sample
from benchmarks.peers.outcome import Outcome, Requests
from benchmarks.peers.processes import ContestantError, run, run_idle, sample_of_run
from benchmarks.peers.programs import Rclone
from benchmarks.peers.run import Run
from benchmarks.peers.servers import BenchServer, open_server
from benchmarks.peers.trees import KIB, Shape, change_files, difference, make_tree, tree_digests
from benchmarks.peers.warm import WarmTidemark, init_repository, sample_of

COUNTS = (5_000, 100_000)
FILE_BYTES = 4 * KIB
PEERS = ("rclone", "restic")
LOOK = f"no-change look at {bench_no_change.FILES_COUNT:,} files"
SAMZA = "Samza's rule, same code"
REQUESTS_TIMES_MAX = 3


def changed(count: int) -> str:
    """The step in which 1 % of a number of files has changed."""
    return f"1 % of {count:,} files"


def unchanged(count: int) -> str:
    """The step in which nothing has changed."""
    return f"no change in {count:,} files"


def update_trees(work: Run) -> Outcome:
    """Both sizes."""
    outcome = work.begin("Incremental backup, 1 % of the files changed", "")
    peers = work.present(outcome, [peer for peer in work.contestants if peer.name in PEERS])
    outcome.contestants = {
        OURS: "backup and commit in a warm process; a look is scan, identify and diff alone",
        SAMZA: "the same scan, and the CRC32 of every file: `DirDiffUtil`'s rule",
    } | outcome.contestants
    _look(work, outcome)
    counts = [max(100, round(count * work.scale)) for count in COUNTS]
    for count in counts:
        memory = work.memory / str(count)
        source = memory / "source"
        make_tree(Shape(name="many", count=count, size_bytes=FILE_BYTES), source)
        # rclone shows what changed by times, so that the server has to keep them.
        holds = {Rclone.prefix: source} if any(isinstance(peer, Rclone) for peer in peers) else {}
        with open_server(work.server, memory, modtimes=True, holds=holds) as server:
            outcome.server = server.kind
            _Updates(work, outcome, server, source, peers).run(count)
        shutil.rmtree(memory)
    if work.server == "rclone":
        outcome.notes.append(
            "this server reads a whole directory again for each page of a LIST (0.2 s with 10,000 files, 0.45 s with "
            "40,000): rclone's time for many files is mostly the server's; `--server ceph` has it without that"
        )
    few, many = (outcome.requests_of(changed(count), OURS) for count in counts)
    if few and many:
        outcome.notes.append(
            f"requests of {OURS} for {counts[1]:,} files: {many.total / few.total:.2f} times those for {counts[0]:,} "
            f"(at most {REQUESTS_TIMES_MAX} are wanted)"
        )
    return outcome


def _look(work: Run, outcome: Outcome) -> None:
    root = work.memory / "look"
    root.mkdir()
    ours_ms, theirs_ms = bench_no_change.measure(root)
    for contestant, all_ms in ((OURS, ours_ms), (SAMZA, theirs_ms)):
        for number, took_ms in enumerate(all_ms, 1):
            sample = Sample(
                step=LOOK,
                contestant=contestant,
                round=number,
                wall_s=took_ms / 1000,
                user_s=0.0,
                system_s=0.0,
                peak_bytes=0,
                size_bytes=0,
            )
            outcome.samples.append(sample)
    shutil.rmtree(root)


class _Updates:
    """The rounds of one size."""

    def __init__(
        self, work: Run, outcome: Outcome, server: BenchServer, source: Path, peers: Sequence[Contestant]
    ) -> None:
        self._work = work
        self._outcome = outcome
        self._server = server
        self._source = source
        self._peers = peers
        self._place = Place.of(server)
        self._settings = dict(work.settings)

    def run(self, count: int) -> None:
        step = changed(count)
        init_repository(self._place, self._settings)
        with WarmTidemark(self._place, self._settings) as ours:

            def back_up(step: str, number: int, size_bytes: int) -> None:
                answer = ours.ask("backup", self._source)
                self._add(
                    sample_of(
                        answer, step=step, contestant=OURS, number=number, size_bytes=size_bytes, files_count=count
                    )
                )

            ours.ask("backup", self._source)
            for peer in self._peers:
                peer.prepare(self._place)
                if not (isinstance(peer, Rclone) and self._server.directory_of(peer.prefix)):
                    run(peer.upload(self._place, self._source))
            for number in range(1, self._work.rounds + 1):
                size_bytes = change_files(self._source, number)
                back_up(step, number, size_bytes)
                for peer in self._peers:
                    opened = run_idle(peer.open(self._place))
                    usage = run(peer.update(self._place, self._source))
                    self._add(
                        sample_of_run(
                            usage,
                            opened,
                            step=step,
                            contestant=peer.name,
                            number=number,
                            size_bytes=size_bytes,
                            files_count=count,
                        )
                    )
                back_up(unchanged(count), number, 0)
        self._count(step)
        self._check()
        for peer in self._peers:
            peer.cleanup()

    def _add(self, sample: Sample) -> None:
        self._outcome.samples.append(sample)
        self._work.report(f"{sample.step} {sample.round} {sample.contestant:10} {sample.work_s:.3f} s")

    def _count(self, step: str) -> None:
        """One more round through the proxy; ours is made warm by one backup first."""
        with open_proxy(self._place.endpoint_url) as proxy:
            place = Place.of(self._server, proxy.endpoint_url)
            with WarmTidemark(place, self._settings) as ours:
                ours.ask("backup", self._source)
                change_files(self._source, 0)
                proxy.counted()
                ours.ask("backup", self._source)
                self._outcome.requests.append(Requests(step=step, contestant=OURS, counts=dict(proxy.counted())))
            for peer in self._peers:
                run(peer.update(place, self._source))
                self._outcome.requests.append(Requests(step=step, contestant=peer.name, counts=dict(proxy.counted())))

    def _check(self) -> None:
        expected, target = tree_digests(self._source), self._work.restore_root / "target"
        for peer in (None, *self._peers):
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            kept = self._server.directory_of(peer.prefix) if isinstance(peer, Rclone) else None
            try:
                if peer is None:
                    with WarmTidemark(self._place, self._settings) as ours:
                        ours.ask("restore", target)
                elif kept is None:
                    run(peer.restore(self._place, target))
                wrong = difference(expected, kept or target)
            except ContestantError as error:
                wrong = str(error)
            shown = f"WRONG: {wrong}" if wrong else f"{'kept' if kept else 'restored'} right"
            name = peer.name if peer else OURS
            self._outcome.notes.append(f"{name}, {len(expected):,} files, after the last round: {shown}")
        shutil.rmtree(target, ignore_errors=True)
