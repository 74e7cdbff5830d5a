import io
import threading
import time
from collections.abc import Mapping

import pytest
from typing_extensions import override

from engine.cli.output import TerminalProgress


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class _Screen(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


class _Broken(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True

    @override
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_terminal_gets_one_line_that_is_drawn_in_place_and_goes_at_the_end() -> None:
    clock, screen = _Clock(), _Screen()
    with TerminalProgress(screen, clock, what="backup") as progress:
        progress.total(files=4, bytes_=4096)
        clock.now_s += 1
        progress.add(files=1, bytes_=1024)
        assert screen.getvalue() == "\r\x1b[Kbackup: 1 of 4 files, 1.0 KiB of 4.0 KiB, 25%, 1.0 KiB/s, 3s left"
    assert screen.getvalue().endswith("\r\x1b[K")
    assert "\n" not in screen.getvalue()


def test_a_terminal_is_not_drawn_on_more_often_than_the_eye_can_see() -> None:
    clock, screen = _Clock(), _Screen()
    progress = TerminalProgress(screen, clock, what="backup")
    for _ in range(1000):
        clock.now_s += 0.001
        progress.add(files=1, bytes_=1)
    assert screen.getvalue().count("\r") <= 10


def test_a_line_is_never_longer_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    clock, screen = _Clock(), _Screen()
    progress = TerminalProgress(screen, clock, what="backup")
    clock.now_s += 5
    progress.add(files=1, bytes_=1)
    assert len(screen.getvalue().removeprefix("\r\x1b[K")) == 19


def test_a_log_gets_a_line_each_ten_seconds_and_no_control_characters() -> None:
    clock, log = _Clock(), io.StringIO()
    with TerminalProgress(log, clock, what="restore") as progress:
        progress.total(files=100, bytes_=100 * 1024)
        for _ in range(35):
            clock.now_s += 1
            progress.add(files=1, bytes_=1024)
    lines = log.getvalue().splitlines()
    assert lines == [
        "restore: 10 of 100 files, 10.0 KiB of 100.0 KiB, 10%, 1.0 KiB/s, 1m 30s left",
        "restore: 20 of 100 files, 20.0 KiB of 100.0 KiB, 20%, 1.0 KiB/s, 1m 20s left",
        "restore: 30 of 100 files, 30.0 KiB of 100.0 KiB, 30%, 1.0 KiB/s, 1m 10s left",
    ]


def test_short_work_writes_nothing_to_a_log() -> None:
    clock, log = _Clock(), io.StringIO()
    with TerminalProgress(log, clock, what="backup") as progress:
        progress.total(files=1, bytes_=1)
        clock.now_s += 9
        progress.add(files=1, bytes_=1)
    assert log.getvalue() == ""


def test_work_of_unknown_size_has_no_share_and_no_time_left() -> None:
    clock, log = _Clock(), io.StringIO()
    progress = TerminalProgress(log, clock, what="verify")
    clock.now_s += 10
    progress.add(files=2, bytes_=10 * 1024)
    assert log.getvalue() == "verify: 2 files, 10.0 KiB, 1.0 KiB/s\n"


def test_the_rate_follows_what_happened_lately() -> None:
    clock, log = _Clock(), io.StringIO()
    progress = TerminalProgress(log, clock, what="backup")
    for _ in range(10):
        clock.now_s += 10
        progress.add(bytes_=10 * 1024)
    for _ in range(3):
        clock.now_s += 10
        progress.add(bytes_=10 * 1024 * 1024)
    assert log.getvalue().splitlines()[-1].endswith("1.0 MiB/s")


def test_a_stream_that_nobody_reads_any_more_stops_no_work() -> None:
    clock = _Clock()
    with TerminalProgress(_Broken(), clock, what="backup") as progress:
        clock.now_s += 1
        progress.add(files=1, bytes_=1)


def test_a_structured_log_that_nobody_reads_any_more_stops_no_work_and_not_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.cli.output.TICK_PERIOD_S", 0.001)
    shown = threading.Semaphore(0)

    def report(line: str, fields: Mapping[str, int]) -> None:
        shown.release()
        raise BrokenPipeError

    clock = _Clock()
    with TerminalProgress(io.StringIO(), clock, what="backup", log=report) as progress:
        clock.now_s += 10
        progress.add(files=1, bytes_=1)
        assert shown.acquire(timeout=10)
        for _ in range(2):
            clock.now_s += 10
            assert shown.acquire(timeout=10)


def test_a_log_gets_its_line_also_while_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cli.output.TICK_PERIOD_S", 0.001)
    clock, log = _Clock(), io.StringIO()
    with TerminalProgress(log, clock, what="restore") as progress:
        progress.total(files=1, bytes_=1024)
        for _ in range(3):
            clock.now_s += 10
            lines = log.getvalue().count("\n") + 1
            until_s = time.monotonic() + 10
            while log.getvalue().count("\n") < lines and time.monotonic() < until_s:
                time.sleep(0.001)
    assert log.getvalue() == 3 * "restore: 0 of 1 files, 0 B of 1.0 KiB, 0%\n"


def test_a_structured_log_gets_the_numbers_and_is_never_drawn_in_place() -> None:
    clock, screen = _Clock(), _Screen()
    shown: list[tuple[str, Mapping[str, int]]] = []
    progress = TerminalProgress(screen, clock, what="backup", log=lambda line, fields: shown.append((line, fields)))
    progress.total(files=4, bytes_=4096)
    for _ in range(12):
        clock.now_s += 1
        progress.add(bytes_=100)
    numbers = {"files": 0, "files_total": 4, "bytes": 1000, "bytes_total": 4096, "bytes_per_s": 100}
    assert shown == [("backup: 0 of 4 files, 1000 B of 4.0 KiB, 24%, 100 B/s, 30s left", numbers)]
    assert screen.getvalue() == ""
