"""Work (a): a tree to an empty bucket and back, by everybody in turn.

A turn of one contestant: the bucket is empty; process start and opening, timed apart; upload, sync; restore to an empty
directory, sync; what came back is compared by digest, outside the timing; both are deleted. A round is a turn of each.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.contestants import Contestant, Place
from benchmarks.peers.counting import open_proxy
from benchmarks.peers.outcome import Outcome, Requests
from benchmarks.peers.processes import NOTHING, Command, ContestantError, Usage, run, run_idle, sample_of_run, sync
from benchmarks.peers.servers import BenchServer
from benchmarks.peers.trees import difference, tree_bytes, tree_digests

UP, DOWN = "up", "down"
Report = Callable[[str], None]


class Copying:
    """The rounds of one tree.

    Args:
        server: Everybody's.
        contestants: In the order of a turn.
        source: The tree.
        restore_root: A directory on the file system that is restored to; a new one below it for each turn.
        outcome: Where samples go.
        report: Hears of each step.
    """

    def __init__(
        self,
        *,
        server: BenchServer,
        contestants: Sequence[Contestant],
        source: Path,
        restore_root: Path,
        outcome: Outcome,
        report: Report,
    ) -> None:
        self._server = server
        self._contestants = contestants
        self._source = source
        self._restore_root = restore_root
        self._outcome = outcome
        self._report = report
        self._expected = tree_digests(source)
        self._size_bytes = tree_bytes(source)
        self._place = Place.of(server)

    def run(self, rounds: int) -> None:
        """All rounds, and one more in which requests are counted."""
        for number in range(1, rounds + 1):
            for contestant in self._contestants:
                self._turn(contestant, number)
        with open_proxy(self._place.endpoint_url) as proxy:
            counted_at = Place.of(self._server, proxy.endpoint_url)
            for contestant in self._contestants:
                target = self._begin()
                try:
                    contestant.prepare(counted_at)
                    for step, command in (
                        (UP, contestant.upload(counted_at, self._source)),
                        (DOWN, contestant.restore(counted_at, target)),
                    ):
                        proxy.counted()
                        run(command)
                        self._outcome.requests.append(
                            Requests(step=step, contestant=contestant.name, counts=dict(proxy.counted()))
                        )
                except ContestantError as error:
                    self._outcome.notes.append(f"{contestant.name}: requests are not counted: {error}")
                self._end(contestant, target)

    def _turn(self, contestant: Contestant, number: int) -> None:
        target = self._begin()
        opened = NOTHING
        try:
            contestant.prepare(self._place)
            self._outcome.starts_s.setdefault(contestant.name, []).append(run(contestant.start(self._place)).wall_s)
            opened = run_idle(contestant.open(self._place))
            upload, restore = contestant.upload(self._place, self._source), contestant.restore(self._place, target)
            self._step(UP, contestant, number, command=upload, opened=opened, written=self._source)
            self._step(DOWN, contestant, number, command=restore, opened=opened, written=target)
        except ContestantError as error:
            # Whatever it was at: it has no time for a restore, and that is reported.
            self._sample(DOWN, contestant, number, NOTHING, opened, sync_s=0.0, error=str(error))
        self._end(contestant, target)

    def _begin(self) -> Path:
        self._server.empty()
        target = self._restore_root / "target"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        return target

    def _end(self, contestant: Contestant, target: Path) -> None:
        contestant.cleanup()
        shutil.rmtree(target, ignore_errors=True)
        self._server.empty()

    def _step(
        self, step: str, contestant: Contestant, number: int, *, command: Command, opened: Usage, written: Path
    ) -> None:
        # What others have left unwritten is not this contestant's.
        sync(self._restore_root)
        usage = run(command)
        sync_s = sync(written)
        error = difference(self._expected, written) if step == DOWN else ""
        self._sample(step, contestant, number, usage, opened, sync_s=sync_s, error=error)

    def _sample(
        self, step: str, contestant: Contestant, number: int, usage: Usage, opened: Usage, *, sync_s: float, error: str
    ) -> None:
        sample = sample_of_run(
            usage,
            opened,
            step=step,
            contestant=contestant.name,
            number=number,
            size_bytes=self._size_bytes,
            files_count=len(self._expected),
            sync_s=sync_s,
            error=error,
        )
        self._outcome.samples.append(sample)
        figures = error or f"{sample.work_s:7.2f} s, sync {sync_s:.2f} s, CPU {sample.cpu_s:.2f} s"
        self._report(f"{self._outcome.work} {number} {contestant.name:18} {step:5} {figures}")
