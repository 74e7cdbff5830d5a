"""The verbs `spark survey` (design 0005, W1 to W4) and `spark collect` (design 0014)."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from engine.blocking import run_in_loop
from engine.checkpoint import collect, survey
from engine.cli import options as cli
from engine.cli.output import Column, tabulate
from engine.cli.session import Session, verb
from engine.errors import TargetError
from engine.text import table
from index.display import count, human_bytes, human_duration
from index.spark.waste import Collectable

# A whole bucket: beside it are those of others.
_BUCKET: Final = re.compile(r"s3[an]?://[^/]*/*", re.IGNORECASE)


class CollectArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What is taken, where to, and by which of the two looks."""

    plan: Path
    quarantine: str | None = None
    older_than: int
    stopped: bool
    at_most: float
    undo: bool
    dry_run: bool


@verb(
    "spark collect",
    "Move what a checkpoint leaves behind to a quarantine.",
    collect.CheckpointCollected,
    needs_repository=False,
)
@click.argument("checkpoint", metavar="CHECKPOINT")
@cli.option("--plan FILE", "Keeps what the first look has found.", cli.FILE, required=True)
@cli.option("--quarantine URL", "Where files go.  [default: CHECKPOINT.quarantine]")
@cli.option(
    "--older-than TIME",
    "Take only files that are older than the newest one by this.",
    cli.DURATION,
    default=f"{collect.DAY_MS // 3_600_000}h",
)
@cli.option("--stopped", "Nothing runs here: two looks at one batch are enough; orphans go too.")
@cli.option(
    "--at-most SHARE",
    "Refuse to take a larger share of the bytes of state.",
    cli.SHARE,
    default=f"{collect.TAKEN_SHARE_MAX:.0%}",
)
@cli.option("--undo", "Move all that is in the quarantine back.")
@cli.option("-n --dry-run", "Move and write nothing; show what a second look would take.")
def spark_collect(session: Session, checkpoint: str, options: CollectArguments) -> None:
    """Find state of CHECKPOINT that nobody needs, and move it to a quarantine once two looks agree.

    The first run writes what it has found to the plan file and moves nothing. The next one, after the query has
    committed another batch, moves what both have found: snapshots and changelogs of attempts that lost, and operators
    and partitions of no commit; with --stopped also SSTs and logs that no snapshot names. Delete the quarantine later.

    Example: tidemark spark collect /checkpoints/flights --plan flights.plan
    """
    if options.quarantine is None and _BUCKET.fullmatch(checkpoint):
        raise session.refusal("a bucket has nothing beside it", "name a quarantine with --quarantine", checkpoint)
    aside = options.quarantine or f"{checkpoint.rstrip('/')}.quarantine"
    settings = session.store_settings()
    if options.undo:
        if options.dry_run:
            raise session.refusal("is not for --undo", "leave it out: what is there again is not replaced", "--dry-run")
        back = run_in_loop(collect.undo_collection(checkpoint, aside, settings))
        session.say(f"{count(len(back), 'file')} moved back from {aside}")
        return
    choice = collect.CollectChoice(
        older_than_ms=options.older_than,
        is_stopped=options.stopped,
        taken_share_max=options.at_most,
        store_settings=settings,
    )
    before = collect.read_look(options.plan)
    with session.progress("collect") as progress:
        work = collect.collect_checkpoint(checkpoint, aside, before, choice, dry_run=options.dry_run, progress=progress)
        found, look = run_in_loop(work)
    if not options.dry_run:
        try:
            collect.write_look(options.plan, look)
        except OSError as error:
            subject = str(options.plan)
            raise TargetError(error.strerror or str(error), operation="spark collect", subject=subject) from error
    session.show(found, _lines(found, aside, dry_run=options.dry_run))


def _lines(found: collect.CheckpointCollected, aside: str, *, dry_run: bool) -> list[str]:
    since = "" if found.batch_before is None else f", first look at batch {found.batch_before}"
    lines = [f"{found.location}: batch {found.batch}{since}"]
    if found.waits_for:
        lines += [*_table(found.found), f"nothing was moved: this waits for {found.waits_for}"]
    elif not found.taken:
        lines += [*_table(()), "nothing was moved"]
    elif dry_run:
        lines += [*_table(found.taken), f"would be moved to {aside}"]
    else:
        lines += [*_table(found.taken), f"moved to {aside}; --undo brings it back"]
    return lines


def _table(files: Sequence[Collectable]) -> list[str]:
    if not files:
        return ["found nothing that nobody needs"]
    counts, sizes = Counter[str](each.reason for each in files), defaultdict[str, int](int)
    for each in files:
        sizes[each.reason] += each.size_bytes
    cells = [(reason, f"{counts[reason]:,}", human_bytes(sizes[reason])) for reason in sorted(counts)]
    return table(("what", "files", "size"), cells, right=("files", "size"))


@verb("spark survey", "List the checkpoints below a place.", survey.Survey, needs_repository=False)
@click.argument("location", metavar="URL")
def spark_survey(session: Session, location: str) -> None:
    """List every checkpoint below URL, a directory or s3://bucket/prefix: its query, newest batch, size and price.

    Nothing is written, and queries may run. Waste is what no query needs by names and the newest commit alone: state of
    operators and partitions that are no more, of attempts that lost, and of a history that was left; there may be more.
    Prices are list prices of S3 Standard; `~` where only that of the storage is known.

    Example: tidemark spark survey s3://bucket/checkpoints
    """
    with session.progress("survey") as progress:
        found = run_in_loop(
            survey.survey_checkpoints(location, store_settings=session.store_settings(), progress=progress)
        )
    session.show(found, _survey_lines(found))


def _survey_lines(found: survey.Survey) -> list[str]:
    every = found.checkpoints
    lines = tabulate(every, _COLUMNS) if every else []
    for each in every:
        lines += [f"{each.path}: {finding}" for finding in each.findings]
        lines += [f"{each.path}: {human_bytes(n)} of a {why}" for why, n in each.waste_bytes.items()]
    stored = human_bytes(sum(each.size_bytes for each in every))
    listed = f"{count(found.files, 'file')} with {human_bytes(found.size_bytes)}"
    return [*lines, f"{count(len(every), 'checkpoint')} with {stored}; listed {listed}"]


def _price(each: survey.SurveyedCheckpoint) -> str:
    requests_usd = each.requests_usd_per_month
    return f"{'~' if requests_usd is None else ''}{(requests_usd or 0) + each.stored_usd_per_month:,.2f}"


_COLUMNS: Final[Mapping[str, Column]] = {
    "checkpoint": "path",
    ">batch": lambda each: str(each.batch) if each.batch >= 0 else "",
    ">age": lambda each: human_duration(each.age_ms) if each.age_ms >= 0 else "",
    ">state": "state_bytes",
    ">waste": lambda each: human_bytes(sum(each.waste_bytes.values())) if each.waste_bytes else "",
    ">$ a month": _price,
    "provider": lambda each: each.provider + (f" V{each.format_version}" if each.format_version else ""),
}
