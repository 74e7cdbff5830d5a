"""The verbs `spark follow` and `spark cutover`: a replica of a running query, and the move to it (design 0011)."""

import asyncio
import contextlib

import click
import msgspec

from engine.blocking import run_in_loop
from engine.checkpoint import cutover, follower, replica
from engine.cli import options as cli
from engine.cli.cmd.spark import partitioner
from engine.cli.errors import describe
from engine.cli.output import extend, lines_if
from engine.cli.session import EVERY_S_MIN, Session, refuse_given, verb
from engine.errors import MisplacedKeyError, TargetBusyError, TargetError, UsageError
from index.display import count, human_bytes, human_duration
from index.errors import PartitionKeyError
from tidemark.errors import TidemarkError

# What is the same the next time.
_FINAL = (TargetError, UsageError, MisplacedKeyError, PartitionKeyError)


class QueryFollowView(replica.QueryFollowStatus, frozen=True, kw_only=True):
    """`spark follow`; of one that went on until it was ended, as it was last."""

    # The last step; null if none was taken.
    step: follower.QueryStep | None = None


class QueryFollowArguments(follower.FollowChoice, frozen=True, kw_only=True):
    """How a query is followed, and which of the verb's ways."""

    every: int
    once: bool
    status: bool


@verb("spark follow", "Keep a replica of a running query's checkpoint.", QueryFollowView, needs_repository=False)
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.argument("target", metavar="TARGET")
@cli.option("--partitions M", "Number of state partitions of TARGET.", cli.POSITIVE)
@cli.option("--provider", "Of TARGET, where the state is HDFS-backed.", click.Choice(["rocksdb"]))
@cli.option(
    "--snapshot-every N", "Batches between two snapshots of a store.  [default: 10]", click.IntRange(min=1, max=500)
)
@cli.option("--scratch DIR", "Of a bucket: where files are gathered, and loaded for snapshots.", cli.DIRECTORY_THERE)
@cli.option("--every TIME", "Time between two looks.", cli.DURATION, default="1s")
@cli.option("--once", "Bring TARGET to the newest batch, and end.")
@cli.option("--status", "Change nothing; show the batch of TARGET and the lag.")
def spark_follow(session: Session, checkpoint: str, target: str, options: QueryFollowArguments) -> None:
    """Keep TARGET, a new directory or s3://bucket/prefix, a replica of CHECKPOINT while its query runs.

    First all state is copied, then only the changelogs of each batch: let the query write them
    (rocksdb.changelogCheckpointing.enabled). Spark refuses to start a query at TARGET until `tidemark spark cutover`;
    its state can be read there. Ends with 6 once it was cut over, and with 0 when it is interrupted.

    Example: tidemark spark follow /checkpoints/old /checkpoints/new --partitions 16
    """
    if options.once and options.status:
        raise session.refusal("--once and --status", "give one of them")
    settings = session.store_settings()
    if options.status:
        refuse_given("partitions provider snapshot_every scratch every", "does not go with --status", "leave it out")
        found = run_in_loop(replica.read_status(checkpoint, target, settings))
        session.show(extend(QueryFollowView, found), _lines(found))
        return
    options = msgspec.structs.replace(options, store_settings=settings)
    views: list[QueryFollowView] = []
    try:
        asyncio.run(_follow(session, checkpoint, target, options, views))
    except KeyboardInterrupt:
        # It has done what it was started for: it followed until it was stopped.
        session.say("stopped")
    if views:
        session.show(views[-1], _lines(views[-1]))


async def _follow(
    session: Session, checkpoint: str, target: str, options: QueryFollowArguments, views: list[QueryFollowView]
) -> None:
    """Take steps until interrupted, or one; the newest view is the last of `views`."""
    every_s, warned = max(EVERY_S_MIN, options.every / 1000), ""
    with contextlib.ExitStack() as bar:
        progress = bar.enter_context(session.progress("copy"))
        opening = follower.opened_follower(checkpoint, target, options, partitioner=partitioner(), progress=progress)
        async with opening as following:
            if not options.once:
                session.say(f"following {checkpoint} every {human_duration(round(every_s * 1000))}; end it with Ctrl-C")
            while True:
                try:
                    step = await following.step()
                    found = extend(QueryFollowView, await following.status(), step=step)
                except TidemarkError as error:
                    is_final = isinstance(error, _FINAL) and not isinstance(error, TargetBusyError)
                    # What is wrong from the start is not waited for.
                    if is_final or not views:
                        raise
                    if (message := describe(error, session.verb).message) != warned:
                        session.warn(f"stays at batch {views[-1].batch}: {message}")
                    warned = message
                else:
                    warned = ""
                    views[:] = [found]
                    if options.once:
                        return
                    bar.close()
                    if step.batches or step.copied or step.snapshots:
                        session.say("; ".join(_lines(views[-1])))
                await asyncio.sleep(every_s)


def _lines(found: replica.QueryFollowStatus) -> list[str]:
    partitions = f", {count(found.partitions, 'partition')}" if found.partitions else ""
    batch = "no batch yet" if found.batch is None else f"batch {found.batch}"
    lines = [f"{found.location}: {batch}{partitions}, of {found.source}"]
    step = found.step if isinstance(found, QueryFollowView) else None
    if step is not None:
        changes = f"{count(step.records, 'change')}, {human_bytes(step.changelog_bytes)} of changelogs"
        lines += lines_if(
            (step.copied, f"copied all state: {step.copied}"),
            (step.batches and not step.copied, f"{count(step.batches, 'batch', 'batches')}: {changes}"),
            (step.snapshots, f"{count(step.snapshots, 'snapshot')} made"),
        )
    return [*lines, f"lag {found.lag}"]


class CutoverArguments(cutover.CutoverChoice, frozen=True, kw_only=True):
    """How a query is cut over, and how long a planned batch may take, in milliseconds."""

    wait: int


@verb(
    "spark cutover",
    "Close a followed checkpoint, and let its query go on at the replica.",
    cutover.Cutover,
    cutover.CutoverPlan,
    needs_repository=False,
)
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.argument("target", metavar="TARGET")
@cli.option(
    "--wait TIME",
    "How long a batch that has begun may take; then it is repeated at TARGET.",
    cli.DURATION,
    default="10s",
)
@cli.option("--source-lost", "CHECKPOINT is gone; go on with what TARGET has.")
@cli.option("-n --dry-run", "Change nothing; show what would be done.")
def spark_cutover(session: Session, checkpoint: str, target: str, options: CutoverArguments, *, dry_run: bool) -> None:
    """Make TARGET, a replica of CHECKPOINT by `tidemark spark follow`, the checkpoint with which its query goes on.

    End the follower first. CHECKPOINT is closed by an entry in its logs: a query that still runs there ends with an
    error when it plans its next batch, and cannot be started again. Stop it before, if you can. Then start the query
    with TARGET as its checkpointLocation: it goes on with the next batch. One that had begun is repeated under its
    number.

    Example: tidemark spark cutover /checkpoints/old /checkpoints/new
    """
    options = msgspec.structs.replace(options, wait_s=options.wait / 1000, store_settings=session.store_settings())
    found: cutover.CutoverPlan
    if dry_run:
        found = run_in_loop(cutover.plan_cutover(checkpoint, target, options))
    else:
        with session.progress("cutover") as progress:
            found = run_in_loop(
                cutover.cut_over(checkpoint, target, options, partitioner=partitioner(), progress=progress)
            )
    session.show(found, _cutover_lines(found))
    if not found.closed:
        session.warn(f"{found.source} is not closed: see that no query goes on there")


def _cutover_lines(found: cutover.CutoverPlan) -> list[str]:
    done = found if isinstance(found, cutover.Cutover) else None
    becomes = f"{'' if done else 'would be '}the checkpoint of query {found.query_id} after batch {found.batch}"
    first = "is repeated there" if done else "is waited for, or repeated there"
    end = f"{count(found.batches, 'batch', 'batches')} to follow; nothing was written"
    if done is not None:
        end = (
            f"closed for {done.pause_s:.1f} s; " if found.closed else ""
        ) + "start the query with this checkpointLocation"
    return lines_if(
        (True, f"{found.location}: {becomes}"),
        (found.planned_batch is not None, f"batch {found.planned_batch} has begun and {first}"),
        (found.closed, f"{found.source} {'is' if done else 'would be'} closed for its query"),
        (True, end),
    )
