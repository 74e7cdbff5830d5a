"""What a work knows of the run that it is a part of."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers.contestants import Contestant
from benchmarks.peers.outcome import Outcome, begin


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One work of one run."""

    work: str
    # A directory in memory, for the server and the sources; gone after the run.
    memory: Path
    # Where trees are restored to, and what that is called.
    restore_root: Path
    to: str
    # `rclone` or `ceph`.
    server: str
    rounds: int
    scale: float
    # What `--set` said of ours.
    settings: Mapping[str, Any]
    # What `--only` said.
    only: str
    contestants: Sequence[Contestant]
    report: Callable[[str], None]

    def present(self, outcome: Outcome, contestants: Sequence[Contestant]) -> list[Contestant]:
        """Those that can take part; who cannot is reported in the outcome."""
        found = []
        for contestant in contestants:
            if why := contestant.why_missing():
                outcome.missing[contestant.name] = why
                self.report(f"{contestant.name} is missing: {why}")
            else:
                outcome.contestants[contestant.name] = contestant.about
                found.append(contestant)
        return found

    def begin(self, title: str, server: str) -> Outcome:
        """An outcome of this run."""
        return begin(
            self.work,
            title,
            server=server,
            target=self.to,
            rounds=self.rounds,
            scale=self.scale,
            contestants={},
            settings=self.settings,
            only=self.only,
        )
