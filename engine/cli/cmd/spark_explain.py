"""The verb `spark explain`: what a query's state is made of, and what it costs."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

import click
import msgspec

from engine.checkpoint.explain import ExplainChoice, StateExplained, explain_backup, explain_checkpoint
from engine.cli import options as cli
from engine.cli.cmd.spark import is_repository
from engine.cli.session import Session, spark_session, verb
from engine.text import table
from index.display import count, human_bytes, human_duration, iso_time
from index.spark.requests import Prices
from index.spark.state_figures import Method, OperatorFigures, StoreFigures
from index.spark.state_rows import HOUR_MS, FamilyFigures

# Of each operator, the heaviest first; JSON has all of them.
_PARTITIONS_SHOWN: Final = 5
_GROUPS_SHOWN: Final = 5
_BY: Final = {
    "counted": "counted",
    "snapshot": "as snapshots say",
    "properties": "as SSTs say",
    "estimated": "estimated",
}


class ExplainArguments(ExplainChoice, frozen=True, kw_only=True):
    """What is explained, with prices as options."""

    usd_per_1000_writes: float
    usd_per_gb_month: float
    no_renames: bool


@verb(
    "spark explain",
    "Show what the state of a query is made of, and what it costs.",
    StateExplained,
    needs_repository=False,
)
@click.argument("checkpoint", metavar="CHECKPOINT|BACKUP")
@cli.option("--full", "Read every row: exact figures, column families, heaviest keys and ages.")
@cli.option("--batch N", "As batch N left it.  [default: the newest]", cli.NATURAL)
@cli.option("--since N", "Show how much it has grown since batch N.", cli.NATURAL)
@cli.option("--job -j JOB", "Of a repository.  [default: the only job with checkpoints]")
@cli.option("--no-renames", "The query's file manager writes without renames: one PUT a file.")
@cli.option(
    "--usd-per-1000-writes USD",
    "Price of 1,000 PUT or COPY requests; look yours up.",
    click.FloatRange(min=0),
    default=Prices().usd_per_1000_writes,
)
@cli.option(
    "--usd-per-gb-month USD", "Price of 1 GB for a month.", click.FloatRange(min=0), default=Prices().usd_per_gb_month
)
@cli.option("--scratch DIR", "Where stores are loaded.", cli.DIRECTORY_THERE)
@cli.on_spark_option
def spark_explain(
    session: Session, checkpoint: str, options: ExplainArguments, *, job: str | None, on_spark: bool
) -> None:
    """Explain the state of CHECKPOINT, or of a backup of one in a repository; it is only read, and its query may run.

    Quick, by the listing, the logs, and what snapshots and SSTs say of themselves: about two requests a store. A
    snapshot may be some batches old. With --full every row is read. Each figure says how it was found.

    Example: tidemark spark explain /checkpoints/flights --full
    """
    choice = msgspec.structs.replace(
        options,
        store_settings=session.store_settings(),
        renames=not options.no_renames,
        prices=Prices(usd_per_1000_writes=options.usd_per_1000_writes, usd_per_gb_month=options.usd_per_gb_month),
    )
    if asyncio.run(is_repository(checkpoint, choice.store_settings)):
        if on_spark:
            hint = "leave out --on-spark, or restore the backup and explain that"
            raise session.refusal("is for checkpoints", hint, "--on-spark")
        session.common = msgspec.structs.replace(session.common, repository=checkpoint)
        with session.open() as repository, session.progress("explain") as progress:
            work = explain_backup(repository.asynchronous, checkpoint, choice, job=job, progress=progress)
            found = repository.loop.run(work)
    elif on_spark:
        from engine.spark.checkpoint import explain_checkpoint as explain_on_spark  # noqa: PLC0415

        with spark_session() as spark:
            found = explain_on_spark(spark, checkpoint, choice)
    else:
        with session.progress("explain") as progress:
            found = asyncio.run(explain_checkpoint(checkpoint, choice, progress=progress))
    session.show(found, list(_lines(found)))
    for problem in found.problems:
        session.warn(problem)


def _lines(found: StateExplained) -> Iterator[str]:
    watermark = f", watermark {iso_time(found.watermark_ms)}" if found.watermark_ms else ", no watermark"
    yield f"{found.location}: batch {found.batch}{watermark}"
    for operator in found.operators:
        stores = [of for of in found.stores if of.operator == operator.operator]
        yield f"operator {operator.operator}, {operator.name}"
        for lines in (_operator_lines(operator, stores, found.batch), *map(_family_lines, operator.families)):
            yield from (f"  {line}" for line in lines)
    yield from _cost_lines(found)
    for of in found.advice:
        saves = f": -{of.requests_per_day:,.0f} requests a day, -${of.usd_per_day:,.2f}" if of.usd_per_day else ""
        yield f"{of.setting}{saves}"
        yield f"  {of.reason}"


def _operator_lines(of: OperatorFigures, stores: Sequence[StoreFigures], batch: int) -> Iterator[str]:
    internal = f" and {of.internal_rows:,} internal ones" if of.internal_rows else ""
    sizes = f"{_size(of.row_bytes)} of keys and values{_by(of.row_bytes_by)}"
    unknown = "rows unknown; --full counts them"
    yield unknown if of.rows is None else f"{of.rows:,} rows{internal}{_by(of.rows_by)}, {sizes}"
    batches = sorted({store.batch for store in stores if store.batch is not None})
    if batches and batches[0] < batch:
        later = f"{count(of.changelogs_after, 'changelog')} of {human_bytes(of.changelogs_after_bytes)}"
        yield f"as {_batches(batches[0], batches[-1])} left it in snapshots; {later} came later"
    levels = ", ".join(f"L{each.level} {human_bytes(each.size_bytes)} in {each.files}" for each in of.levels)
    yield f"SSTs {levels or 'unknown'}; all files {human_bytes(of.stored_bytes)}"
    if of.entries is not None:
        yield f"{_known(of.tombstones)} of {_known(of.entries)} entries are tombstones{_by(of.entries_by)}"
    if (growth := of.growth) is not None:
        grown = [_known(n, "+,") for n in (growth.rows, growth.row_bytes, growth.sst_bytes)]
        since = _batches(growth.since_batch, growth.since_batch_last)
        yield f"since {since}: {grown[0]} rows, {grown[1]} B of them, {grown[2]} B of SSTs"
    if of.never:
        yield f"{of.never:,} rows have no time that a watermark reaches: they stay"
    for name, skew in (("rows", of.row_skew), ("bytes", of.byte_skew)):
        if skew is not None and of.partitions > 1:
            largest = f"partition {skew.partition} has {skew.ratio:.2f} times the mean"
            yield f"skew of {name}: {largest}; Gini {skew.gini:.2f}"
    shown = sorted(stores, key=lambda of: (-(of.row_bytes or of.sst_bytes or of.stored_bytes), of.id))[
        :_PARTITIONS_SHOWN
    ]
    cells = [
        (str(of.id), _known(of.rows), _size(of.row_bytes), _size(of.sst_bytes), _known(of.tombstones), _known(of.batch))
        for of in shown
    ]
    headers = ("store", "rows", "bytes", "SSTs", "tombstones", "batch")
    yield from table(headers, cells, right=headers[1:])
    if more := len(stores) - len(shown):
        yield f"and {count(more, 'more store')}, which JSON has"


def _family_lines(of: FamilyFigures) -> Iterator[str]:
    internal = " (internal)" if of.is_internal else ""
    yield f"{of.name}{internal}: {count(of.rows, 'row')}, {human_bytes(of.size_bytes)}"
    if of.unread and of.rows and not of.is_internal:
        yield f"  only counted: {of.unread}"
    if (ages := of.ages) is not None and ages.oldest_ms is not None and ages.newest_ms is not None:
        between = f"{iso_time(ages.oldest_ms)} to {iso_time(ages.newest_ms)}"
        yield f"  {ages.column} from {between}"
        never = f", {ages.without:,} never" if ages.without else ""
        after = f"now {ages.due:,}, in 1 h {ages.within_1h:,}, in 1 d {ages.within_1d:,}, later {ages.later:,}{never}"
        yield f"  rows that the watermark {'takes away' if ages.expires else 'reaches'}: {after}"
        if ages.expires and ages.due:
            yield "  (in complete mode it takes none)"
    for group in of.heaviest[:_GROUPS_SHOWN]:
        yield f"  {group.key}: {count(group.rows, 'row')}, {human_bytes(group.size_bytes)}"
    if of.heaviest and of.heaviest_error_bytes:
        yield f"  each of these, and any other, may have up to {human_bytes(of.heaviest_error_bytes)} more"


def _cost_lines(found: StateExplained) -> Iterator[str]:
    if (cost := found.cost) is None:
        yield f"requests a day: unknown; {found.cost_unknown}"
        return
    rate = cost.rate
    window = f"{_batches(rate.first_batch, rate.newest_batch)} in {human_duration(rate.window_ms)}"
    yield f"a day on an object store, by the times of files ({window})"
    written = ", ".join(f"{kind} {rate.per_day(n):,.0f}" for kind, n in sorted(rate.written.items()))
    yield f"  {cost.puts_per_day:,.0f} PUTs: {written}"
    yield f"  {cost.copies_per_day:,.0f} COPYs, by which files get their names"
    yield f"  ${cost.requests_usd_per_day:,.2f} for these, ${cost.stored_usd_per_day:,.2f} for all files"
    yield "  not seen: LISTs, GETs, HEADs and repeated requests, which leave no object"
    if rate.window_ms < HOUR_MS:
        yield "  that is a short time: another hour may be unlike it"
    if 2 * rate.longest_pause_ms > rate.window_ms:
        yield f"  with a pause of {human_duration(rate.longest_pause_ms)}: while the query runs, a day costs more"


def _known(number: int | None, form: str = ",") -> str:
    return "?" if number is None else format(number, form)


def _size(size_bytes: int | None) -> str:
    return "?" if size_bytes is None else human_bytes(size_bytes)


def _by(method: Method) -> str:
    return "" if method == "unknown" else f" ({_BY[method]})"


def _batches(first: int, last: int) -> str:
    return f"batch {first}" if first == last else f"batches {first} to {last}"
