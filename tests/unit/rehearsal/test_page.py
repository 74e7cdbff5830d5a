from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from typing_extensions import override

from engine.rehearsal.history import History
from engine.rehearsal.model import Entry
from engine.rehearsal.page import SHOWN_MAX, make_rehearsals_page, write_page
from index.errors import FormatError
from tests.unit.rehearsal.builders import failed, rehearsal

HOSTILE = "</h2></td><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\"'&<!--"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[str] = set()

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _page(*entries: Entry, broken: tuple[FormatError, ...] = ()) -> tuple[str, _Tags]:
    page = make_rehearsals_page(History(entries=entries, broken=broken))
    tags = _Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    return page, tags


def _hostile(**changes: Any) -> Entry:
    return rehearsal(
        job=HOSTILE,
        task=HOSTILE,
        release=HOSTILE,
        repository_id=HOSTILE,
        kept_at=HOSTILE,
        warnings=(HOSTILE,),
        **changes,
    )


def test_names_of_others_are_nothing_but_text() -> None:
    page, tags = _page(
        _hostile(),
        failed(job=HOSTILE, error=HOSTILE, message=HOSTILE),
        broken=(FormatError(HOSTILE, subject=HOSTILE),),
    )
    assert tags.seen.isdisjoint({"script", "img", "a", "link", "iframe", "object", "use", "image"})
    assert not {name for name in tags.attributes if name.startswith("on") or name in {"href", "src"}}
    assert "\x1b" not in page
    assert "&lt;script&gt;" in page


def test_a_page_has_phases_bounds_forecast_and_history() -> None:
    page, _ = _page(rehearsal(slo_ms=5000), failed(), rehearsal(slo_ms=20_000))
    for text in ("open RocksDB (4)", "bound by network", "16 executors", "10x, 9.8 GiB", "SLO 20s: met", "missed"):
        assert text in page
    assert page.count("<svg ") == 4
    assert "3 rehearsals" in page


def test_the_job_rehearsed_last_comes_first_and_a_failure_is_told() -> None:
    page, _ = _page(rehearsal(job="old"), rehearsal(job="new"), failed(job="old"))
    assert page.index("<h2>old") < page.index("<h2>new")
    assert "The last rehearsal failed" in page
    assert "DamagedError: a blob is missing" in page


def test_a_job_that_only_failed_has_a_section_too() -> None:
    page, _ = _page(failed())
    assert "flights" in page
    assert "Forecast" not in page


def test_a_long_history_is_shown_from_its_end() -> None:
    page, _ = _page(*(rehearsal(began_at_ms=n) for n in range(SHOWN_MAX + 5)))
    assert f"{SHOWN_MAX} rehearsals" in page


def test_extreme_numbers_make_a_page_too() -> None:
    _page(rehearsal(restore_s=1e15, began_at_ms=2**63 - 1, size_bytes=2**63 - 1))
    _page(rehearsal(find_s=0, restore_s=0, open_s=0))
    _page()


def test_a_limit_far_above_all_flattens_nothing() -> None:
    page, _ = _page(rehearsal(slo_ms=10**9))
    assert ">SLO</text>" not in page
    page, _ = _page(rehearsal(slo_ms=15_000))
    assert ">SLO</text>" in page


def test_a_page_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "rehearsals.html"
    for job in ("one", "two"):
        write_page(path, History(entries=(rehearsal(job=job),), broken=()))
    assert "two" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]
