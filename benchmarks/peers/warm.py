"""tidemark as a process that is there already, as seen by the harness."""

import subprocess
from pathlib import Path
from typing import Self

import msgspec
from typing_extensions import override

from benchmarks.peers.clients.warm_client import Answer, Request
from benchmarks.peers.contestants import Place, Tidemark
from benchmarks.peers.figures import Sample
from benchmarks.peers.processes import ContestantError, environment, without_paths


class WarmTidemark(Tidemark):
    """A contestant whose process is started once."""

    module = "warm_client"
    prefix = "tidemark"

    def __init__(self, place: Place, settings: dict[str, object]) -> None:
        super().__init__(settings)
        command = self.command("serve", place)
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command.arguments],
            env=environment(command.environment),
            cwd=command.directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, verb: str, directory: Path | None = None, *, replace: bool = False) -> Answer:
        """Do one thing.

        Raises:
            ContestantError: It failed, or the process has ended.
        """
        request = Request(verb=verb, directory=str(directory or ""), replace=replace)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ContestantError(f"the warm process ended at {verb}")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            raise ContestantError(f"{verb}: {without_paths(answer.error)}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    @override
    def cleanup(self) -> None:
        self.stop()


def init_repository(place: Place, settings: dict[str, object]) -> None:
    """Make the repository that warm processes use."""
    ours = Tidemark(settings)
    ours.prefix = WarmTidemark.prefix
    ours.prepare(place)


def sample_of(
    answer: Answer,
    *,
    step: str,
    contestant: str,
    number: int,
    size_bytes: int,
    files_count: int,
    sync_s: float = 0.0,
    error: str = "",
) -> Sample:
    """What a warm process took, as a sample: nothing is started or opened."""
    return Sample(
        step=step,
        contestant=contestant,
        round=number,
        wall_s=answer.wall_s,
        user_s=answer.user_s,
        system_s=answer.system_s,
        peak_bytes=answer.peak_bytes,
        open_peak_bytes=answer.idle_bytes,
        size_bytes=size_bytes,
        files_count=files_count,
        sync_s=sync_s,
        error=error,
    )
