"""The report of a real repository, read as HTML and looked at in headless Chromium."""

import html
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from tests.integration.conftest import Shell
from tests.integration.report_world import FORKED, HOSTILE, REPORT, make_world

# Set where Chromium has to be there, so that the test fails and does not skip.
REQUIRE_CHROMIUM = "TIDEMARK_REQUIRE_CHROMIUM"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
)
# Chromium has errands of its own: they find nobody.
ALONE = "--host-resolver-rules=MAP * ~NOTFOUND"
# What a page asks for, as the log of the network has it.
_ASKED = re.compile(r'"network_isolation_key":"file://[^\n]*?"url":"([^"]*)"')
WIDTHS = (1280, 400)
SECTIONS = ["jobs", "collections"]

# What of the page sticks out of it, at each width; what scrolls inside its own frame does not count.
_MEASURE = """
<script>
window.onload = () => {
  console.error("seen");
  const reported = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const inside = frame.contentDocument, width = inside.documentElement.clientWidth;
    const out = [...inside.body.querySelectorAll("*")].filter(e => !e.closest(".wide > *") &&
      e.getBoundingClientRect().right > width + 1).map(e => e.outerHTML.slice(0, 80));
    reported[frame.width] = {width, scroll: inside.documentElement.scrollWidth, out, text: inside.body.innerText.length,
      sections: [...inside.querySelectorAll("section")].map(s => s.id),
      headings: [...inside.querySelectorAll("h2")].map(h => h.innerText),
      untitled: [...inside.querySelectorAll("svg")].filter(s => !s.querySelector(":scope > title")).length,
      nowhere: [...inside.querySelectorAll("a")].filter(a => !inside.querySelector(a.getAttribute("href"))).length};
  }
  document.body.innerHTML = "<pre id=reported></pre>";
  document.getElementById("reported").textContent = JSON.stringify(reported);
};
</script>
"""


@pytest.fixture
def chromium() -> str:
    """The browser."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None and os.environ.get(REQUIRE_CHROMIUM, "") not in {"", "0"}:
        pytest.fail(f"{REQUIRE_CHROMIUM} is set, and there is no chromium", pytrace=False)
    if found is None:
        pytest.skip("there is no chromium")
    return found


class _Page(HTMLParser):
    """Tags that match, what is named, and the cells of each table by its label."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: set[str] = set()
        self.tables: dict[str, list[list[str]]] = {}
        self._label = ""
        self._in_cell = False
        self.feed(text)
        self.close()
        assert self.open == []

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        shown = dict(attrs)
        assert not any(name.startswith("on") for name in shown)
        self.seen.add(tag)
        self.links.update(shown[name] or "" for name in ("href", "src") if name in shown)
        self._label = shown.get("aria-label") or self._label
        if tag == "tr":
            self.tables.setdefault(self._label, []).append([])
        elif tag in {"td", "th"}:
            self.tables[self._label][-1].append("")
            self._in_cell = True
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._in_cell = self._in_cell and tag not in {"td", "th"}

    @override
    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.tables[self._label][-1][-1] += data


@pytest.fixture
def world(shell: Shell) -> Shell:
    """The repository that a report is made of."""
    make_world(shell)
    return shell


def _report(shell: Shell, *words: str) -> tuple[dict[str, Any], Path]:
    shown = shell.result(*REPORT, *words, "--limit", "50")
    return shown, shell.directory / shown["page"]


def test_every_section_has_the_figures_of_the_repository(world: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(world.environment, "TIDEMARK_JOB")
    shown, path = _report(world)
    assert (shown["jobs_count"], shown["drills_count"], shown["collections_count"]) == (2, 2, 1)
    text = path.read_text()
    assert shown["size_bytes"] == len(text.encode())
    page = _Page(text)
    assert [section for section in SECTIONS if f'<section id="{section}">' in text] == SECTIONS
    assert page.links == {"#job-0", "#job-1"}
    assert text.index('<a href="#job-0">') < text.index("<ul class=cards>") < text.index('<div id="job-0">')
    commits = page.tables["Commits of flights"]
    # Of the first the record is gone; the third was left behind by the rewind.
    assert [(row[0], row[1], row[10]) for row in commits[1:]] == [
        ("4", "9", "rewind to 2"),
        ("3", "10", "left behind by 4"),
        ("2", "9", "commit"),
    ]
    assert commits[3][9] == "before-upgrade"
    assert HOSTILE in commits[1][8] or HOSTILE[:20] in commits[3][8]
    sizes = {row[0]: row[5:7] for row in commits}
    assert sizes["3"] == ["195.3 KiB", "690.4 KiB"]
    assert sizes["4"][0] == "0 B"
    assert page.tables[f"Commits of {FORKED}"][1][10] == "fork from 3 of flights"
    failed, done = page.tables["Restore drills of flights"][1:]
    assert (failed[1], done[1], done[7]) == ("failed", "12.6 s", "1m: met")
    freed = page.tables["Collections"][1]
    assert (freed[1], freed[4]) == ("done", "4")
    (problem,) = page.tables["Blobs of flights at risk"][1:]
    assert (problem[0], problem[4]) == ("blob missing", "000003.sst")
    assert problem[3].startswith("blobs/")
    assert "--check-retained" in problem[5]
    assert shown["risks_count"] == 1
    assert f"Made with {shown['requests_count']} requests" in text


def test_the_page_asks_nobody_for_anything_and_all_in_it_is_text(world: Shell) -> None:
    _, path = _report(world)
    text = path.read_text()
    page = _Page(text)
    assert page.seen.isdisjoint({"script", "img", "link", "iframe", "object", "use", "image", "base", "form"})
    assert page.links == {"#job-0"}
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    assert "url(" not in text
    assert "@import" not in text


def test_a_report_changes_nothing_and_reports_one_job_alone(world: Shell) -> None:
    root = world.directory / "repository"

    def look() -> list[tuple[Path, int]]:
        return sorted((p, p.lstat().st_mtime_ns) for p in root.rglob("*") if not p.is_dir())

    before = look()
    shown, path = _report(world)
    assert look() == before
    assert shown["jobs_count"] == 1
    assert f"<h2>{html.escape(FORKED)}" not in path.read_text()
    assert "1 job, 3 records, 2 restore drills, 1 collection, 1 at risk" in world.run(*REPORT).stdout
    assert world.refused("report", "--job", "absent", code=7)["error"] == "NotFoundError"
    assert world.refused("report", "-o", "absent/page.html", code=9)["hint"] == "make it"


def test_jobs_without_a_drill_are_named(world: Shell) -> None:
    shown = world.result("report", "--drills", "nowhere")
    text = (world.directory / shown["page"]).read_text()
    assert "No restore drill in the history in nowhere: run one" in text


def test_a_damaged_record_is_at_risk(world: Shell) -> None:
    record = world.directory / "repository/log/flights/00000000000000000003.commit"
    record.write_bytes(b"no record")
    shown, path = _report(world)
    page = _Page(path.read_text())
    assert page.tables["Damaged records of flights"][1][0] == "log/flights/00000000000000000003.commit"
    what = [row[10] for row in page.tables["Commits of flights"][1:]]
    assert what == ["rewind to 2", "left behind by 4, DAMAGED", "commit"]
    # What was new in commit 3 and is not gone: the pack of its small files is in an earlier blob.
    assert shown["risks_count"] == 1


def test_chromium_shows_it_without_an_error_a_request_or_an_overflow(
    world: Shell, chromium: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(world.environment, "TIDEMARK_JOB")
    _, path = _report(world)
    text = path.read_text()
    dom, noise, asked = _browse(chromium, tmp_path, path)
    assert "CONSOLE" not in noise
    assert asked == []
    assert dom.count("<section id=") == len(SECTIONS)
    # In frames as wide as the screens: a window of Chromium has at least 500 pixels.
    frames = "".join(f'<iframe width={width} height=900 srcdoc="{html.escape(text)}"></iframe>' for width in WIDTHS)
    outer = tmp_path / "frames.html"
    image = "http://nobody.invalid/nobody.png"
    outer.write_text(f"<!doctype html><meta charset=utf-8><body><img src={image}>{frames}{_MEASURE}</body>")
    dom, noise, asked = _browse(chromium, tmp_path, outer)
    # So an error and a request would have been seen.
    assert noise.count("CONSOLE") == 1
    assert asked == [image]
    found = re.search(r"<pre id=\"reported\">(.*)</pre>", dom, re.DOTALL)
    assert found is not None
    shown = json.loads(html.unescape(found[1]))
    for width in WIDTHS:
        seen = shown[str(width)]
        assert seen["out"] == []
        assert seen["scroll"] <= seen["width"] <= width
        assert seen["sections"] == SECTIONS
        assert (seen["untitled"], seen["nowhere"]) == (0, 0)
        assert seen["headings"][0] == "flights"
        assert seen["text"] > 1500


def _browse(chromium: str, directory: Path, page: Path) -> tuple[str, str, list[str]]:
    """The page as Chromium has it after loading, what Chromium said meanwhile, and what the page asked others for."""
    profile, log = directory / f"profile-{page.stem}", directory / f"{page.stem}.net"
    words = [chromium, *FLAGS, ALONE, f"--user-data-dir={profile}", f"--log-net-log={log}", "--window-size=2000,1000"]
    done = subprocess.run([*words, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=90, check=True)
    shutil.rmtree(profile, ignore_errors=True)
    return done.stdout, done.stderr, sorted(set(_ASKED.findall(log.read_text())))
