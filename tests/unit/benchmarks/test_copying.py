"""A turn of the harness with contestants of a few lines of shell: wrong bytes are reported, and not timed."""

import shutil
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from typing_extensions import override

from benchmarks.peers.contestants import Contestant, Place
from benchmarks.peers.copying import DOWN, UP, Copying
from benchmarks.peers.outcome import Outcome
from benchmarks.peers.processes import Command, ContestantError, run
from benchmarks.peers.report import markdown
from benchmarks.peers.trees import difference, tree_digests
from tests.servers.s3_server import S3Server


def shell(script: str, *arguments: Path) -> Command:
    return Command(arguments=("sh", "-c", script, "sh", *map(str, arguments)))


class Directory(S3Server):
    """No server at all: contestants here know where the bucket is."""

    kind = "a directory"
    is_safe: ClassVar[bool] = True
    has_ranges: ClassVar[bool] = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.emptied = 0

    @property
    def server(self) -> S3Server:
        return self

    def empty(self) -> None:
        self.emptied += 1
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()

    def directory_of(self, prefix: str) -> Path | None:
        return self.root / prefix


class Copier(Contestant):
    """Copies well, or as it is asked to."""

    def __init__(self, name: str, bucket: Path, restore: str = 'cp -r "$1"/. "$2"') -> None:
        self.name = name
        self.about = restore
        self._bucket = bucket
        self._restore = restore

    @override
    def start(self, place: Place) -> Command:
        return shell("true")

    @override
    def open(self, place: Place) -> Command:
        return shell("true")

    @override
    def upload(self, place: Place, source: Path) -> Command:
        return shell('cp -r "$1"/. "$2"', source, self._bucket)

    @override
    def restore(self, place: Place, target: Path) -> Command:
        return shell(self._restore, self._bucket, target)


def outcome_of(rounds: int) -> Outcome:
    return Outcome(
        work="small",
        title="Tiny",
        server="none",
        target="tmpfs",
        began_at="2026-01-01T00:00:00+00:00",
        rounds=rounds,
        scale=1.0,
        machine={},
        versions={},
        contestants={},
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    root.mkdir()
    for number in range(3):
        (root / f"{number}.sst").write_bytes(bytes([number]) * 100)
    return root


def test_who_restores_wrong_bytes_is_reported_and_has_no_time(source: Path, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    good = Copier("tidemark", bucket)
    flips = Copier("flips a byte", bucket, 'cp -r "$1"/. "$2" && printf X | dd of="$2/1.sst" conv=notrunc status=none')
    loses = Copier("loses a file", bucket, 'cp -r "$1"/. "$2" && rm "$2/2.sst"')
    fails = Copier("fails", bucket, "echo no luck today >&2; exit 3")
    outcome, server = outcome_of(1), Directory(bucket)
    server.endpoint_url = "http://127.0.0.1:9"
    contestants = (good, flips, loses, fails)
    Copying(
        server=server,
        contestants=contestants,
        source=source,
        restore_root=tmp_path / "restored",
        outcome=outcome,
        report=lambda text: None,
    ).run(1)
    assert [outcome.of(DOWN, c.name)[0].error for c in contestants[:3]] == [
        "",
        "wrong content: 1 of 3 files, first 1.sst",
        "missing: 1 of 3 files, first 2.sst",
    ]
    assert "no luck today" in outcome.of(DOWN, "fails")[0].error
    assert all(outcome.of(UP, c.name)[0].error == "" for c in contestants)
    text = markdown(outcome)
    assert "| flips a byte | failed |" in text
    assert "flips a byte, round 1: NOT COUNTED: wrong content" in text
    # Before and after each turn, and so for the requests.
    assert server.emptied == 4 * len(contestants)
    assert not list(bucket.iterdir())


def test_a_file_too_many_is_a_difference(source: Path) -> None:
    expected = tree_digests(source)
    assert difference(expected, source) == ""
    (source / "more").touch()
    assert difference(expected, source) == "unexpected: 1 of 3 files, first more"


def test_cpu_seconds_and_memory_are_those_of_the_process_and_its_children() -> None:
    busy = "import hashlib, os; x = bytearray(64 << 20); hashlib.pbkdf2_hmac('sha256', b'a', b'b', 300_000)"
    usage = run(Command(arguments=("sh", "-c", f'python3 -c "{busy}"; true')))
    assert 0.02 < usage.cpu_s < usage.wall_s + 0.5
    assert usage.peak_bytes > 64 << 20
    assert run(shell("true")).peak_bytes < 32 << 20


def test_a_command_that_fails_says_what_it_said() -> None:
    with pytest.raises(ContestantError, match=r"sh ended with 3: out of luck"):
        run(shell("echo out of luck; exit 3"))
    with pytest.raises(ContestantError, match=r"nobody ended with 127"):
        run(Command(arguments=("/nobody",)))


def test_what_a_program_says_is_reported_without_the_paths_of_the_machine() -> None:
    with pytest.raises(ContestantError, match=r"sh ended with 1: no PATH, but http://127.0.0.1:9/bucket and 3/4"):
        run(shell("echo no /srv/some/where, but http://127.0.0.1:9/bucket and 3/4; exit 1"))


def client(work: str) -> Command:
    """A client in Python that takes 0.2 s to open, and 0.3 s to end as the interpreter does."""
    lines = (
        "import atexit, os, sys, time",
        "from benchmarks.peers.clients import job",
        "def work(_):",
        f"    {work}",
        "atexit.register(time.sleep, 0.3)",
        "time.sleep(0.2)",
        "job.opened()",
        "sys.argv[1:] = ['{}']",
        "job.Job = dict",
        "job.main(work)",
    )
    return Command(arguments=(sys.executable, "-c", "\n".join(lines)))


def test_starting_and_ending_a_process_are_not_its_work() -> None:
    usage = run(client("time.sleep(0.1)"))
    assert usage.opened_s >= 0.5
    assert 0.1 <= usage.wall_s - usage.opened_s < usage.opened_s
    assert 0 < usage.opened_cpu_s <= usage.cpu_s


def test_who_leaves_without_the_interpreter_s_end_is_measured_alike() -> None:
    usage = run(client("time.sleep(0.1); job.leave()"))
    assert 0.2 <= usage.opened_s < usage.wall_s
    assert usage.wall_s - usage.opened_s >= 0.1


def test_who_leaves_and_does_not_say_that_it_is_done_has_no_time() -> None:
    with pytest.raises(ContestantError, match="without saying that it was done"):
        run(client("os._exit(0)"))
