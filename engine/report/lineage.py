"""The lineage of jobs as a graph: commits in the order of their times, a lane for each job, with rewinds and forks."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from engine.inspect.history import HistoryEntry
from engine.report import svg
from engine.report.html import framed, tell
from engine.report.model import JobFacts
from engine.report.plots import short_time
from engine.report.svg import Words
from index.plan.commits import Commit
from index.snapshot.model import Scope
from index.text import count, shortened

# Of each job the newest, and of jobs the first in the order of the report.
NODES_MAX: Final = 40
LANES_MAX: Final = 12
_STEP: Final = 34.0
_LANE: Final = 84.0
_LEFT: Final = 150.0
_TOP: Final = 46.0
_RADIUS: Final = 7.0
_LABEL_LENGTH_MAX: Final = 18
_NAME_LENGTH_MAX: Final = 16

COMMIT, REWIND, FORK, LEFT_BEHIND = svg.BLUE, svg.ORANGE, svg.GREEN, svg.GREY


class _Node(msgspec.Struct, frozen=True, kw_only=True):
    entry: HistoryEntry
    commit: Commit
    x: float
    y: float


def draw_lineage(jobs: Sequence[JobFacts]) -> str:
    """The graph; empty if there is nothing to draw."""
    lanes = [job for job in jobs if any(e.commit is not None for e in job.history.entries)][:LANES_MAX]
    nodes = _place(lanes)
    if not nodes:
        return ""
    width = max(svg.WIDTH, 30 + max(node.x for node in nodes.values()))
    height = _TOP + _LANE * len(lanes)
    drawn = [_lane(job.scope, _TOP + _LANE * number, width) for number, job in enumerate(lanes)]
    drawn += [_edges(node, nodes) for node in nodes.values()]
    drawn += [_draw(node) for node in nodes.values()]
    rewinds = sum(node.commit.record.kind == "rewind" for node in nodes.values())
    forks = sum(node.commit.record.kind == "fork" for node in nodes.values())
    words = Words(
        "Lineage of the commits",
        f"{count(len(nodes), 'commit')} of {count(len(lanes), 'job')}, with {count(rewinds, 'rewind')} and "
        f"{count(forks, 'fork')}; the table below says the same.",
    )
    return framed(svg.figure(width, height, drawn, words), words.title)


def _place(lanes: Sequence[JobFacts]) -> dict[tuple[Scope, int, str], _Node]:
    """Where each commit stands: from left to right as they came, whatever their job."""
    found = [
        (commit.committed_at_ms, number, entry, commit)
        for number, job in enumerate(lanes)
        for entry in job.history.entries[:NODES_MAX]
        if (commit := entry.commit) is not None
    ]
    found.sort(key=lambda item: (item[0], item[1], item[2].number))
    return {
        _id(commit.scope, commit.record.number, commit.record.write_id): _Node(
            entry=entry, commit=commit, x=_LEFT + _STEP * at, y=_TOP + _LANE * lane
        )
        for at, (_, lane, entry, commit) in enumerate(found)
    }


def _id(scope: Scope, number: int, write_id: str) -> tuple[Scope, int, str]:
    return scope, number, write_id


def _lane(scope: Scope, y: float, width: float) -> str:
    name = shortened(str(scope), _LABEL_LENGTH_MAX)
    titled = f"<g><title>{tell(str(scope))}</title>{svg.text(8, y + 4, name)}</g>"
    return svg.segment(_LEFT - 16, y, width - 8, y, style="grid") + titled


def _edges(node: _Node, nodes: Mapping[tuple[Scope, int, str], _Node]) -> str:
    """From what a commit came after, and from what a rewind or a fork took."""
    record = node.commit.record
    drawn = ""
    if record.predecessor is not None:
        before = nodes.get(_id(record.scope, record.predecessor.number, record.predecessor.write_id))
        # Where it is gone, the line begins in the dark.
        x = before.x if before is not None else node.x - _STEP * 0.7
        drawn += svg.segment(x, node.y, node.x, node.y, dashed=before is None)
    if record.source is not None:
        scope = record.source_scope or record.scope
        source = nodes.get(_id(scope, record.source.number, record.source.write_id))
        if source is not None:
            drawn += _curve(source, node, REWIND if record.kind == "rewind" else FORK)
    return drawn


def _curve(source: _Node, node: _Node, colour: str) -> str:
    # Above its lane, or from one lane to the other.
    bend = node.y - 34 if source.y == node.y else (source.y + node.y) / 2
    places = ((source.x, source.y), (source.x, bend), (node.x, bend), (node.x, node.y))
    begin, *rest = (f"{x:.1f} {y:.1f}" for x, y in places)
    path = f"M {begin} C {' '.join(rest)}"
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"></path>'


def _draw(node: _Node) -> str:
    record, entry = node.commit.record, node.entry
    kinds = {"commit": COMMIT, "rewind": REWIND, "fork": FORK}
    colour = kinds[record.kind]
    is_past = entry.rewound_by is not None or not entry.restores
    told = f"{record.kind} {entry.number} of {record.scope}, version {record.version}, "
    told += short_time(node.commit.committed_at_ms)
    if entry.rewound_by is not None:
        told += f", left behind by {entry.rewound_by}"
    if entry.names:
        told += f", named {', '.join(entry.names)}"
    mark = (
        f'<circle cx="{node.x:.1f}" cy="{node.y:.1f}" r="{_RADIUS:g}" class="hollow" stroke="{LEFT_BEHIND}" '
        'stroke-width="2"></circle>'
        if is_past
        else svg.circle(node.x, node.y, _RADIUS, colour)
    )
    number = svg.text(node.x, node.y + 21, str(entry.number), style="soft", anchor="middle")
    named = shortened(", ".join(entry.names), _NAME_LENGTH_MAX)
    name = svg.text(node.x, node.y + 36, named, anchor="middle") if named else ""
    return f"<g><title>{tell(told)}</title>{mark}{number}{name}</g>"
