"""The report as one page of HTML that asks nobody for anything."""

from collections.abc import Callable, Iterator
from typing import Final

from engine.report.html import make_page, paragraph, tell
from engine.report.model import ReportFacts
from engine.report.risks import tell_collections, tell_risks
from engine.report.sections import tell_all_rehearsals, tell_commits, tell_jobs, tell_lineage, tell_shares
from index.text import count, human_bytes, iso_time

TITLE: Final = "State of a repository"

_SECTIONS: Final[tuple[tuple[str, str, Callable[[ReportFacts], Iterator[str]]], ...]] = (
    ("commits", "Commits over time", tell_commits),
    ("shares", "New against retained bytes", tell_shares),
    ("rehearsals", "Restore drills", tell_all_rehearsals),
    ("lineage", "Lineage", tell_lineage),
    ("collections", "Collections", tell_collections),
    ("risks", "At risk", tell_risks),
)


def make_report_page(facts: ReportFacts) -> str:
    """The page as HTML."""
    return make_page(TITLE, _body(facts))


def _body(facts: ReportFacts) -> Iterator[str]:
    yield paragraph(facts.location)
    yield paragraph(
        f"repository {facts.repository_id}; {iso_time(facts.made_at_ms)} by the store's clock; "
        f"tidemark {facts.release}",
        "note",
    )
    links = "".join(f'<a href="#{name}">{tell(title)}</a>' for name, title, _ in _SECTIONS)
    yield f"<nav aria-label=Sections>{links}</nav>"
    yield _tiles(facts)
    yield from tell_jobs(facts.jobs, facts.jobs_left_out)
    for name, title, tell_section in _SECTIONS:
        yield f'<section id="{name}"><h2>{tell(title)}</h2>'
        yield from tell_section(facts)
        yield "</section>"
    yield _requests(facts)


def _tiles(facts: ReportFacts) -> str:
    entries = [entry for job in facts.jobs for entry in job.history.entries]
    freed = sum(total.size_bytes for audit in facts.audits for total in audit.deleted)
    unknown = facts.verified is None
    risks = "not known" if unknown else f"{facts.risks_count:,}"
    tiles = (
        (f"{len(facts.jobs) + facts.jobs_left_out:,}", "jobs", ""),
        (f"{len(entries):,}", "records told", ""),
        (human_bytes(sum(e.share.bytes_uploaded for e in entries if e.share is not None)), "uploaded for them", ""),
        (human_bytes(freed), "freed by collections", ""),
        ("not known" if facts.plan is None else human_bytes(facts.plan.freed_bytes), "will be freed", ""),
        (risks, "at risk", "bad" if unknown or facts.risks_count else "good"),
    )
    told = "".join(
        f"<li><b{f' class={style}' if style else ''}>{tell(figure)}</b>{tell(name)}</li>"
        for figure, name, style in tiles
    )
    return f"<ul class=tiles>{told}</ul>"


def _requests(facts: ReportFacts) -> str:
    told = ", ".join(f"{number:,} {name}" for name, number in facts.requests.items())
    return paragraph(f"Made with {count(sum(facts.requests.values()), 'request')} to the store: {told}.", "note")
