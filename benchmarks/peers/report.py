"""An outcome as Markdown, JSON and a plot."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.peers.contestants import OURS
from benchmarks.peers.figures import MIB, Key, Ratio, Sample, good, memory, percentile, quartiles, ratio
from benchmarks.peers.outcome import Outcome

_LEGEND = (
    "Times are medians [quartiles] in seconds, without starting and ending the process and opening what it works "
    "on, which are below. `x` is how many times longer than tidemark, the median of the ratios of each round; "
    "`=` where quartiles overlap. CPU is user and system of the client. Memory is the peak of the whole process; "
    "over idle is the highest peak above the lowest of the runs with nothing to do, or of a warm process before "
    "all work. Whole is the process from start to end: where that is mostly start and opening, as restic's is "
    "when little has changed, the wall time beside it is a difference of two noisy figures."
)


def result_name(outcome: Outcome) -> str:
    """`<work>-<server>-<target>-<date>`, and more if it is not a whole run: it never takes the place of one."""
    name = f"{outcome.work}-{outcome.server.split()[0].lower()}-{outcome.target}-{outcome.began_at[:10]}"
    name += f"-scale-{outcome.scale:g}" if outcome.scale != 1 else ""
    name += f"-only-{outcome.only}" if outcome.only else ""
    return name + "".join(f"-{key}-{value}" for key, value in outcome.settings.items())


def write(outcome: Outcome, directory: Path, plot: Callable[[Outcome, Path], None] | None = None) -> Path:
    """Write a result as Markdown, JSON and a plot, of bars if no other is given; the path of the first."""
    directory.mkdir(parents=True, exist_ok=True)
    name = result_name(outcome)
    text = directory / f"{name}.md"
    text.write_text(markdown(outcome), encoding="utf-8")
    (directory / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(outcome)) + b"\n")
    # matplotlib is in an extra.
    if importlib.util.find_spec("matplotlib") is not None:
        from benchmarks.peers.plot import plot_bars  # noqa: PLC0415  # as above

        (plot or plot_bars)(outcome, directory / f"{name}.svg")
    return text


def markdown(outcome: Outcome) -> str:
    """The tables of one work."""
    machine = ", ".join(f"{name} {value}" for name, value in outcome.machine.items())
    versions = ", ".join(f"{name} {version}" for name, version in sorted(outcome.versions.items()))
    scale = "" if outcome.scale == 1 else f" Scaled to {outcome.scale:g}: no figure to quote."
    if outcome.settings:
        scale += f" Settings of ours: {', '.join(f'{name} = {value}' for name, value in outcome.settings.items())}."
    lines = [
        f"# {outcome.title}",
        "",
        f"{outcome.began_at}, {outcome.rounds} rounds in turn, {outcome.server}, restored to {outcome.target}.{scale}",
        f"Machine: {machine}.",
        f"Versions: {versions}.",
        "",
        _LEGEND,
        "",
        f"![Seconds of each]({result_name(outcome)}.svg)",
    ]
    for step in outcome.steps():
        lines += ["", f"## {step}", "", *_step_table(outcome, step)]
    lines += _opening(outcome) + _requests(outcome) + _memory(outcome)
    lines += ["", "## Who does what", ""]
    lines += [f"- {name}: {about}." for name, about in outcome.contestants.items()]
    lines += [f"- {name}: MISSING: {why}" for name, why in outcome.missing.items()]
    if outcome.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in outcome.notes)]
    return "\n".join(lines) + "\n"


def _step_table(outcome: Outcome, step: str) -> list[str]:
    head = (
        "contestant",
        "wall",
        "x",
        "with sync",
        "x",
        "CPU s",
        "CPU s/GB",
        "x",
        "MB/s",
        "peak MiB",
        "over idle",
        "whole s",
    )
    rows = []
    failures = []
    ours = outcome.of(step, OURS)
    for name in dict.fromkeys(s.contestant for s in outcome.samples if s.step == step):
        samples = outcome.of(step, name)
        failures += [f"{name}, round {s.round}: NOT COUNTED: {s.error}" for s in samples if s.error]
        counted = good(samples)
        if not counted:
            rows.append((name, "failed", *[""] * (len(head) - 2)))
            continue
        held, peak_bytes = memory(counted, outcome.in_flight_bytes), max(s.peak_bytes for s in counted)
        wall = quartiles([s.work_s for s in counted]).median
        rows.append(
            (
                name,
                _spread(counted, lambda s: s.work_s),
                _times(ratio(ours, samples, lambda s: s.work_s), name),
                _spread(counted, lambda s: s.durable_s),
                _times(ratio(ours, samples, lambda s: s.durable_s), name),
                f"{quartiles([s.cpu_s for s in counted]).median:.2f}",
                f"{quartiles([s.cpu_s_per_gb for s in counted]).median:.2f}",
                _times(ratio(ours, samples, lambda s: s.cpu_s), name),
                f"{counted[0].size_bytes / wall / 1e6:.0f}" if counted[0].size_bytes else "",
                f"{peak_bytes / MIB:.0f}" if peak_bytes else "",
                f"{held.over_idle_bytes / MIB:.0f}" if held else "",
                f"{quartiles([s.wall_s for s in counted]).median:.3f}",
            )
        )
        if len(counted) >= 100:
            shown = ", ".join(f"p{p} {percentile([s.work_s for s in counted], p):.3f} s" for p in (50, 95, 99))
            failures.append(f"{name}: {shown}")
    return table(head, rows) + ([""] if failures else []) + [f"- {failure}" for failure in failures]


def _opening(outcome: Outcome) -> list[str]:
    if not outcome.starts_s:
        return []
    rows = []
    for name, starts_s in outcome.starts_s.items():
        opens = [s for s in outcome.samples if s.contestant == name and s.open_s]
        opened = quartiles([s.open_s for s in opens]).median if opens else 0.0
        cpu = quartiles([s.open_cpu_s for s in opens]).median if opens else 0.0
        start = quartiles(starts_s).median
        rows.append((name, f"{start:.2f}", f"{max(opened - start, 0):.2f}", f"{cpu:.2f}"))
    head = ("contestant", "process start and end s", "opening s", "CPU s of both")
    shown = "Opening is a listing or the repository's record; for restic it is the derivation of its key."
    return ["", "## Apart: start, end and opening", "", shown, "", *table(head, rows)]


def _requests(outcome: Outcome) -> list[str]:
    rows = [
        (r.step, r.contestant, str(r.total), ", ".join(f"{n} {count}" for n, count in sorted(r.counts.items())))
        for r in outcome.requests
    ]
    head = ("step", "contestant", "requests", "of which")
    return ["", "## Requests, on the wire, opening included", "", *table(head, rows)] if rows else []


def _memory(outcome: Outcome) -> list[str]:
    """Ours beside the rule of the project."""
    rows = []
    for step in outcome.steps():
        for name in outcome.contestants:
            held = memory(outcome.of(step, name), outcome.in_flight_bytes) if name.startswith(OURS) else None
            if held is not None:
                rows.append((step, name, f"{held.over_idle_bytes / MIB:.0f}", f"{held.allowed_bytes / MIB:.0f}"))
    head = ("step", "contestant", "peak over idle, MiB", "allowed, MiB")
    shown = "Allowed: 128 MiB, the bytes in flight, and 3 KiB for each file."
    return ["", "## Memory of ours", "", shown, "", *table(head, rows)] if rows else []


def _spread(samples: Sequence[Sample], key: Key) -> str:
    low, middle, high = quartiles([key(sample) for sample in samples])
    return f"{middle:.3f} [{low:.3f}-{high:.3f}]"


def _times(found: Ratio | None, name: str) -> str:
    if found is None or name == OURS:
        return ""
    return f"{found.quartiles.median:.2f}{' =' if found.equal else ''}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]
