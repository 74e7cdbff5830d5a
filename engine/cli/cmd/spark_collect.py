"""The verb `spark collect`: what a checkpoint leaves behind, into a quarantine (design 0014)."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from engine.checkpoint.collect import (
    DAY_MS,
    TAKEN_SHARE_MAX,
    CheckpointCollected,
    CollectChoice,
    collect_checkpoint,
    read_look,
    undo_collection,
    write_look,
)
from engine.cli import options as cli
from engine.cli.session import Session, verb
from engine.errors import TargetError
from engine.text import table
from index.display import count, human_bytes
from index.spark.waste import Collectable


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
    needs_repository=False,
    prints=(CheckpointCollected,),
)
@click.argument("checkpoint", metavar="CHECKPOINT")
@cli.option("--plan FILE", "Keeps what the first look has found.", cli.FILE, required=True)
@cli.option("--quarantine URL", "Where files go.  [default: CHECKPOINT.quarantine]")
@cli.option(
    "--older-than TIME",
    "Take only files that are older than the newest one by this.",
    cli.DURATION,
    default=f"{DAY_MS // 3_600_000}h",
)
@cli.option("--stopped", "Nothing runs here: two looks at one batch are enough; orphans go too.")
@cli.option(
    "--at-most SHARE",
    "Refuse to take a larger share of the bytes of state.",
    cli.SHARE,
    default=f"{TAKEN_SHARE_MAX:.0%}",
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
    aside = options.quarantine or f"{checkpoint.rstrip('/')}.quarantine"
    settings = session.store_settings()
    if options.undo:
        back = asyncio.run(undo_collection(checkpoint, aside, settings))
        session.say(f"{count(len(back), 'file')} moved back from {aside}")
        return
    choice = CollectChoice(
        older_than_ms=options.older_than,
        is_stopped=options.stopped,
        taken_share_max=options.at_most,
        store_settings=settings,
    )
    before = read_look(options.plan)
    with session.progress("collect") as progress:
        work = collect_checkpoint(checkpoint, aside, before, choice, dry_run=options.dry_run, progress=progress)
        found, look = asyncio.run(work)
    if not options.dry_run:
        try:
            write_look(options.plan, look)
        except OSError as error:
            subject = str(options.plan)
            raise TargetError(error.strerror or str(error), operation="spark collect", subject=subject) from error
    session.show(found, _lines(found, aside, dry_run=options.dry_run))


def _lines(found: CheckpointCollected, aside: str, *, dry_run: bool) -> list[str]:
    since = "" if found.batch_before is None else f", first look at batch {found.batch_before}"
    lines = [f"{found.location}: batch {found.batch}{since}"]
    if found.waits_for:
        lines += [*_table(found.found), f"nothing was moved: this waits for {found.waits_for}"]
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
