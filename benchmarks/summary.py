"""The table and the plot of the newest results: `python -m benchmarks.summary`, or `make bench PART=summary`.

Reads `benchmarks/results/*.json`; writes `benchmarks/results/README.md` and `summary.svg` beside it, a page and a plot
of each work, and tables into `benchmarks/README.md` and `README.md`, between two marks. Git keeps these, and of each
work the newest JSON. Only whole runs count: those on another scale, of some contestants or with settings of ours are
passed over. What was not measured says so; the chart leaves it out.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks import bench_replay
from benchmarks.peers import report
from benchmarks.peers.contestants import OURS
from benchmarks.peers.outcome import Outcome
from benchmarks.peers.processes import ROOT
from benchmarks.peers.report import result_name, table
from benchmarks.summary_rows import MISSED, REACHED, Newest, Row, all_rows, charted, memory_rows, memory_text

RESULTS = ROOT / "benchmarks" / "results"
README = RESULTS.parent / "README.md"
FRONT = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
_HEAD = ("work", "goal", "tidemark", "rival", "ratio", "bound", "goal is", "run")
_LEGEND = (
    "Medians. The ratio is how many times longer than tidemark the rival took, the median of the ratios of the rounds "
    "of one run in which all took turns; `=` where the quartiles overlap, so that neither is ahead. The bound is the "
    "time of a contestant that does no more than the work needs. Starting and ending the process, and opening what it "
    "works on, are not in it. The page of a run has everybody who took part."
)


def load_newest(directory: Path, *, any_scale: bool = False) -> Newest:
    """The newest whole run of each work and target.

    Args:
        directory: Of the results.
        any_scale: Take runs on another scale too, to try this out.

    Raises:
        DecodeError: A file is not a result; its name is reported.
    """
    newest: dict[tuple[str, str], Outcome] = {}
    for path in sorted(directory.glob("*.json")):
        try:
            outcome = msgspec.json.decode(path.read_bytes(), type=Outcome)
        except msgspec.DecodeError as error:
            error.add_note(path.name)
            raise
        if outcome.settings or outcome.only or (outcome.scale != 1 and not any_scale):
            continue
        key = outcome.work, outcome.target
        if key not in newest or newest[key].began_at <= outcome.began_at:
            newest[key] = outcome
    return newest


def goals_table(rows: Sequence[Row], directory: str = "") -> str:
    """Every line of the goals, with links to results in a directory as seen from the page."""
    lines = [
        (r.work, r.goal, r.ours, r.rival, r.ratio, r.bound, _loud(r.verdict), _link(r.source, directory)) for r in rows
    ]
    return "\n".join(table(_HEAD, lines))


def programs_table(newest: Newest) -> str:
    """Show what the chart shows: each work, our time, and how many times as long each program took."""
    lines = []
    for one in charted(newest):
        rivals = "; ".join(f"{name} {times}" for name, times in one.times.items())
        lines.append((one.label, f"{one.took_s[OURS]:.2f} s", rivals))
    return "\n".join(table(("work", "Tidemark", "times as long"), lines))


def machines_text(newest: Newest) -> str:
    """On which machines the runs were, in one sentence: figures of different ones do not compare."""
    runs: dict[str, list[str]] = {}
    for outcome in newest.values():
        # The load is reported with each run.
        shown = outcome.machine
        machine = f"{shown.get('cpu', 'unknown')}, {shown.get('cores', '?')} cores, {shown.get('memory', '?')}"
        runs.setdefault(machine, []).append(f"{outcome.title[:1].lower()}{outcome.title[1:]} ({outcome.target})")
    if not runs:
        return "Nothing was measured yet."
    usual = max(runs, key=lambda machine: len(runs[machine]))
    if set(runs) == {usual}:
        return f"All runs were on one machine: {usual}."
    others = "; ".join(f"on {machine}, {' and '.join(which)}" for machine, which in runs.items() if machine != usual)
    return (
        f"The runs were on {len(runs)} machines, so that only figures of one run compare: {others}; "
        f"all others on {usual}."
    )


def _link(source: Outcome | None, directory: str) -> str:
    return f"[{source.server}]({directory}{result_name(source)}.md)" if source else ""


def _loud(verdict: str) -> str:
    return f"**{verdict}**" if verdict in (REACHED, MISSED) else verdict


def markdown(newest: Newest) -> str:
    """The page of the results."""
    rows = all_rows(newest)
    lines = ["# Results", "", _LEGEND, "", machines_text(newest), "", goals_table(rows)]
    lines += ["", "![How long each work took with each program](summary.svg)"]
    held = [(row.work, row.step, row.contestant, *memory_text(row.held)) for row in memory_rows(newest)]
    rule = "The peak over idle of ours; allowed are 128 MiB, the bytes in flight, and 3 KiB for each file. MiB."
    head = ("work", "step", "contestant", "over idle", "allowed", "rule is")
    lines += ["", "## Memory", "", rule, "", *(table(head, held) if held else ["not measured"])]
    lines += ["", "## Where the figures are from", ""]
    for outcome in newest.values():
        machine = ", ".join(f"{name} {value}" for name, value in outcome.machine.items())
        versions = ", ".join(f"{name} {version}" for name, version in sorted(outcome.versions.items()))
        name = result_name(outcome)
        lines.append(
            f"- [{name}]({name}.json): {outcome.title}; {outcome.began_at}, {outcome.server}, {outcome.rounds} rounds. "
            f"Machine: {machine}. Versions: {versions}."
        )
    return "\n".join(lines) + "\n"


def put_between_marks(text: str, content: str) -> str:
    """A page with other content between its marks; as it is if it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{content}\n{end}{after}" if end else text


def main() -> None:
    """Write the page of the results, the plot, and the table in the README beside them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=README, help="gets the table between its marks")
    parser.add_argument("--front", type=Path, default=FRONT, help="gets the table of programs between its marks")
    parser.add_argument("--any-scale", action="store_true", help="take scaled runs too, and leave both README alone")
    options = parser.parse_args()
    newest = load_newest(options.results, any_scale=options.any_scale)
    options.results.mkdir(parents=True, exist_ok=True)
    for outcome in newest.values():
        report.write(outcome, options.results, bench_replay.plot_curve if outcome.work == "replay" else None)
    page = options.results / "README.md"
    page.write_text(markdown(newest), encoding="utf-8")
    sys.stdout.write(goals_table(all_rows(newest)) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        sys.stdout.write("no plot: matplotlib is not installed\n")
    else:
        from benchmarks.peers.plot import plot_panels  # noqa: PLC0415  # matplotlib is in an extra

        plot_panels(charted(newest), options.results / "summary.svg")
    if not options.any_scale:
        shown = f"{goals_table(all_rows(newest), 'results/')}\n\n{machines_text(newest)}"
        for page, content in ((options.readme, shown), (options.front, programs_table(newest))):
            if page.exists():
                page.write_text(put_between_marks(page.read_text(encoding="utf-8"), content), encoding="utf-8")


if __name__ == "__main__":
    main()
