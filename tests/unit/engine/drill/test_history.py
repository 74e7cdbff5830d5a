from pathlib import Path

import msgspec
import pytest

from engine.drill.drill import EARLIER_NAME, LINE_BYTES_MAX, append, decode_line, history_path, read_history
from index.errors import FormatError, UnknownFormatError
from tests.unit.engine.drill.builders import drill, failed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report" / "restore-drills.jsonl"


def test_what_is_appended_is_read_in_its_order(path: Path) -> None:
    entries = (drill(), failed(), drill(slo_ms=5000, task="3"))
    for entry in entries:
        append(path, entry)
    history = read_history(path)
    assert history.entries == entries
    assert history.broken == ()


def test_no_file_is_no_history(path: Path) -> None:
    assert read_history(path).entries == ()


def test_half_a_line_of_a_crash_costs_only_itself(path: Path) -> None:
    append(path, drill())
    with path.open("ab") as file:
        file.write(b'{"outcome":"done","sch')
    append(path, failed())
    history = read_history(path)
    assert history.entries == (drill(), failed())
    assert ["line 2" in str(error) for error in history.broken] == [True]
    assert b'{"outcome":"done","sch\n' in path.read_bytes(), "nothing is lost"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"[]\n",
        b"\xff\xfe\n",
        b"{}\n",
        b"[" * 5000 + b"\n",
        msgspec.json.encode(drill(restore_s=-1.0)),
        msgspec.json.encode(drill(stores_at_once=0)),
        msgspec.json.encode(drill()).replace(b"12.0", b"1e999"),
        msgspec.json.encode(drill()).replace(b'"done"', b'"won"'),
        msgspec.json.encode(drill(job="x" * LINE_BYTES_MAX)),
    ],
)
def test_a_line_that_is_no_restore_drill_is_a_format_error_that_names_it(line: bytes) -> None:
    with pytest.raises(FormatError, match="here"):
        decode_line(line, "here")


def test_a_line_that_is_too_long_hides_no_other(path: Path) -> None:
    append(path, drill(job="x" * 3 * LINE_BYTES_MAX))
    append(path, drill())
    history = read_history(path)
    assert (len(history.entries), len(history.broken)) == (1, 1)


def test_a_line_of_a_newer_release_says_so() -> None:
    with pytest.raises(UnknownFormatError, match="schema 2"):
        decode_line(b'{"schema":2,"outcome":"other"}', "here")


def test_a_line_with_the_figures_of_earlier_releases_is_read() -> None:
    line = msgspec.json.encode(drill())
    line = line.replace(b'"measured":{', b'"warnings":["x"],"cores_count":2,"measured":{"network_bytes_per_s":1.5,')
    assert decode_line(line, "here") == drill()


def test_a_field_of_later_is_passed_over() -> None:
    line = msgspec.json.encode(failed()).replace(b"{", b'{"later":[1],', 1)
    assert decode_line(line, "here") == failed()


def test_a_history_that_an_earlier_release_began_goes_on_in_its_file(path: Path) -> None:
    assert history_path(path.parent) == path
    append(path.parent / EARLIER_NAME, drill())
    assert history_path(path.parent) == path.parent / EARLIER_NAME
