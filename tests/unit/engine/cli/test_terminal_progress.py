import io
import re
import threading
import time
from collections.abc import Callable, Mapping

import pytest
from typing_extensions import override

from engine.cli.output import Log, ProgressLog, for_terminal, say, styled
from engine.cli.terminal import TerminalBar
from engine.text import Prose, table


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class _Screen(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


class _Broken(_Screen):
    @override
    def write(self, text: str) -> int:
        raise BrokenPipeError


def to(stream: io.StringIO) -> Log:
    """A log of lines alone."""
    return lambda line, _: print(line, file=stream)


def lines_of(screen: io.StringIO) -> list[str]:
    """Each state of the line, without its control sequences."""
    return [line.strip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()))]


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_terminal_gets_a_bar_at_once_which_is_gone_at_the_end() -> None:
    screen = _Screen()
    with TerminalBar(screen, "backup") as progress:
        # Before anything is known.
        assert lines_of(screen)[0].startswith("backup ")
        progress.total(files=4, bytes_=4096)
        progress.add(files=1, bytes_=1024)
    *_, last, end = lines_of(screen)
    assert re.fullmatch(r"backup 1/4 files [^ ]+ +25% 1.0 KiB/4.0 KiB", last.rstrip()), lines_of(screen)
    assert end == ""
    assert screen.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_line_is_never_longer_than_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    screen = _Screen()
    with TerminalBar(screen, "restore") as progress:
        progress.total(files=123_456, bytes_=10**15)
        progress.add(files=99_999, bytes_=10**14)
    assert max(map(len, lines_of(screen))) <= width


def test_a_bar_has_a_rate_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Screen()
    with TerminalBar(screen, "restore") as progress:
        progress.total(files=4, bytes_=4 << 20)
        monkeypatch.setattr("engine.cli.terminal.RATE_AGE_S_MIN", 0)
        progress.add(files=1, bytes_=1 << 20)
    assert re.search(r"25% 1.0 MiB/4.0 MiB [0-9.]+ [KMGT]iB/s \d+.* left$", lines_of(screen)[-2])


def test_a_bar_has_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = _Screen()
    with TerminalBar(screen, "backup") as progress:
        progress.add(files=1, bytes_=1)
    assert "\x1b[3" not in screen.getvalue()


def test_a_log_gets_a_line_each_ten_seconds_and_no_control_characters() -> None:
    clock, log = _Clock(), io.StringIO()
    with ProgressLog(clock, what="restore", log=to(log)) as progress:
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
    with ProgressLog(clock, what="backup", log=to(log)) as progress:
        progress.total(files=1, bytes_=1)
        clock.now_s += 9
        progress.add(files=1, bytes_=1)
    assert log.getvalue() == ""


def test_work_of_unknown_size_has_no_share_and_no_time_left() -> None:
    clock, log = _Clock(), io.StringIO()
    progress = ProgressLog(clock, what="verify", log=to(log))
    clock.now_s += 10
    progress.add(files=2, bytes_=10 * 1024)
    assert log.getvalue() == "verify: 2 files, 10.0 KiB, 1.0 KiB/s\n"


def test_the_rate_follows_what_happened_lately() -> None:
    clock, log = _Clock(), io.StringIO()
    progress = ProgressLog(clock, what="backup", log=to(log))
    for _ in range(10):
        clock.now_s += 10
        progress.add(bytes_=10 * 1024)
    for _ in range(3):
        clock.now_s += 10
        progress.add(bytes_=10 * 1024 * 1024)
    assert log.getvalue().splitlines()[-1].endswith("1.0 MiB/s")


@pytest.mark.parametrize(
    "make", [lambda: ProgressLog(_Clock(), what="x", log=to(_Broken())), lambda: TerminalBar(_Broken(), "x")]
)
def test_a_stream_that_nobody_reads_any_more_stops_no_work(
    make: Callable[[], ProgressLog | TerminalBar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cli.output.LOG_PERIOD_S", 0)
    with make() as progress:
        progress.total(files=1, bytes_=1)
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
    with ProgressLog(clock, what="backup", log=report) as progress:
        clock.now_s += 10
        progress.add(files=1, bytes_=1)
        assert shown.acquire(timeout=10)
        for _ in range(2):
            clock.now_s += 10
            assert shown.acquire(timeout=10)


def test_a_log_gets_its_line_also_while_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cli.output.TICK_PERIOD_S", 0.001)
    clock, log = _Clock(), io.StringIO()
    with ProgressLog(clock, what="restore", log=to(log)) as progress:
        progress.total(files=1, bytes_=1024)
        for _ in range(3):
            clock.now_s += 10
            lines = log.getvalue().count("\n") + 1
            until_s = time.monotonic() + 10
            while log.getvalue().count("\n") < lines and time.monotonic() < until_s:
                time.sleep(0.001)
    assert log.getvalue() == 3 * "restore: 0 of 1 files, 0 B of 1.0 KiB, 0%\n"


def test_a_structured_log_gets_the_numbers() -> None:
    clock = _Clock()
    shown: list[tuple[str, Mapping[str, int]]] = []
    progress = ProgressLog(clock, what="backup", log=lambda line, fields: shown.append((line, fields)))
    progress.total(files=4, bytes_=4096)
    for _ in range(12):
        clock.now_s += 1
        progress.add(bytes_=100)
    numbers = {"files": 0, "files_total": 4, "bytes": 1000, "bytes_total": 4096, "bytes_per_s": 100}
    assert shown == [("backup: 0 of 4 files, 1000 B of 4.0 KiB, 24%, 100 B/s, 30s left", numbers)]


def test_prose_is_broken_between_words_and_what_has_columns_is_left_as_it_is() -> None:
    prose = "of this plan " * 10
    shown = next(for_terminal([Prose(prose.strip())])).splitlines()
    assert max(map(len, shown)) <= 80
    assert " ".join(line.strip() for line in shown) == prose.strip()
    assert [*for_terminal([prose])] == [prose]
    for line in ("a   " * 30, "/a-path-without-a-blank" * 8, '{"a value": "as it is"} ' * 9):
        assert [*for_terminal([line])] == [line]


def test_a_table_that_is_too_wide_is_laid_out_again() -> None:
    key = "blobs/75/fraud-eu/b43f64a098b428048c9d-000000 " * 3
    rows = [("flights[b]", "1,024", key, "-"), ("x", "7", "short", "")]
    lines = table(("job", "size", "key", "names"), rows, right=("size",))
    assert [*for_terminal(table(("job",), [("x",)]))] == ["job", "x"]
    shown = [*for_terminal(["before", *lines, "after"])]
    assert (shown[0], shown[-1]) == ("before", "after")
    assert max(map(len, shown)) <= 80
    assert shown[1].split() == ["job", "size", "key"]
    assert shown[2].startswith("flights[b] 1,024 blobs/75/")
    assert shown[-2] == "x              7 short"
    for _, _, key, _ in rows:
        assert key.replace(" ", "") in "".join(line[17:] for line in shown[2:-1]).replace(" ", "")


def test_two_tables_one_after_the_other_stay_two() -> None:
    lines = [*table(("one", "two"), [("a" * 70, "b" * 30)]), *table(("three",), [("c" * 90,)])]
    shown = [*for_terminal(lines)]
    assert [line.split()[0] for line in shown if line.split()[0] in {"one", "three"}] == ["one", "three"]


def test_wide_characters_hide_no_column() -> None:
    lines = table(("job", "task", "key"), [("状態" * 9, "保存" * 9, "blobs/75/" * 6)])
    shown = " ".join(for_terminal(lines))
    assert "key" in shown
    assert "blobs" in shown


def test_a_warning_is_written_above_the_bar() -> None:
    screen = _Screen()
    with TerminalBar(screen, "backup"):
        say("warning", "backup", "no answer [from] it", log_format="text")
    assert "warning: no answer [from] it" in [line.strip() for line in lines_of(screen)]


def test_a_table_that_fits_in_no_way_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    lines = table(("one", "two", "three"), [("a" * 15, "b" * 15, "c")])
    assert [*for_terminal(lines)] == lines


def test_what_is_bad_is_coloured_but_where_no_colour_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*for_terminal(["store  DAMAGED"])] == ["store  \x1b[31m\x1b[1mDAMAGED\x1b[0m"]
    assert [*for_terminal(["undamaged UNSAFELY"])] == ["undamaged UNSAFELY"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert [*for_terminal(["store  DAMAGED"])] == ["store  DAMAGED"]
    assert styled("error", "error") == "error"
