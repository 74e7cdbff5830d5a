"""`tidemark spark check`: whether all that a streaming checkpoint has committed is there (design 0005, section 4)."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from engine.checkpoint.check.check import check_checkpoint
from engine.checkpoint.findings import CheckLevel, CheckReport
from engine.cli.exit_codes import ExitCode
from engine.cli.options import Verb, common_options, on_spark_option
from engine.cli.output import extend
from engine.cli.session import Session, spark_session, with_session
from engine.text import table
from index.text import count, human_bytes, human_duration, printable

# Findings of each kind that are printed; JSON has all of them.
FINDINGS_SHOWN_MAX: Final = 50


class SparkCheckView(CheckReport, frozen=True, kw_only=True):
    """`spark check`."""

    sound: bool
    damaged: int
    warnings: int
    waste: int


@click.command(
    "check",
    cls=Verb,
    group="spark",
    needs_repository=False,
    short_help="Check that all committed state is there and whole.",
    prints=(SparkCheckView,),
    example="tidemark spark check /checkpoints/flights --json",
)
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option(
    "--level",
    type=click.Choice(["quick", "full"]),
    default="full",
    show_default=True,
    help="quick: logs, zips and changelogs; full: every block of every SST, too, and the newest version is loaded.",
)
@click.option("--strict", is_flag=True, help="End with 3 if there are warnings.")
@click.option(
    "--scratch",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where stores are loaded.  [default: this machine's place for temporary files]",
)
@on_spark_option
@common_options
@with_session
def spark_check(
    session: Session, *, checkpoint: str, level: CheckLevel, strict: bool, scratch: Path | None, on_spark: bool
) -> ExitCode:
    """Check CHECKPOINT, a directory or s3://bucket/prefix, without changing it; its query may run.

    Every committed batch has to be there whole, block by block. Ends with 4 if something is damaged. Warnings and waste
    are shown, and do not count, unless --strict says that warnings do.
    """
    settings = session.store_settings()
    if on_spark:
        # PySpark takes a second to import, which a check without it need not wait for.
        from engine.spark.checkpoint.check import check_checkpoint as check_on_spark  # noqa: PLC0415

        with spark_session() as spark:
            report = check_on_spark(spark, checkpoint, level=level, scratch=scratch, store_settings=settings)
    else:
        with session.progress("check") as progress:
            report = asyncio.run(
                check_checkpoint(checkpoint, level=level, scratch=scratch, store_settings=settings, progress=progress)
            )
    session.show(_view(report), list(_lines(report)))
    if not report.is_sound:
        return ExitCode.DAMAGED
    return ExitCode.PARTIAL if strict and report.of_kind("warning") else ExitCode.OK


def _view(report: CheckReport) -> SparkCheckView:
    return extend(
        SparkCheckView,
        report,
        sound=report.is_sound,
        damaged=len(report.of_kind("damage")),
        warnings=len(report.of_kind("warning")),
        waste=len(report.of_kind("waste")),
    )


def _lines(report: CheckReport) -> Iterator[str]:
    rows: list[tuple[str, str, str, str]] = []
    hints: list[str] = []
    for kind in ("damage", "warning", "waste"):
        found = report.of_kind(kind)
        for f in found[:FINDINGS_SHOWN_MAX]:
            size = human_bytes(f.size_bytes) if f.size_bytes else ""
            rows.append((f.kind, printable(f.path), size, printable(f.message)))
            hints.append(printable(f.hint))
        if len(found) > FINDINGS_SHOWN_MAX:
            rows.append((kind, f"and {len(found) - FINDINGS_SHOWN_MAX} more", "", ""))
            hints.append(hints[-1])
    if rows:
        header, *lines = table(("finding", "file", "size", "what is wrong"), rows, right=("size",))
        yield header
        for line, hint, following in zip(lines, hints, [*hints[1:], ""], strict=True):
            yield line
            if hint != following:
                # What to do about the lines above, back to the last such sentence.
                yield f"         {hint}"
    read = f"{count(report.files, 'file')}, {human_bytes(report.size_bytes)}, {count(report.blocks, 'block')} of SSTs"
    what = f"{count(report.batches, 'batch', 'batches')}, {count(report.stores, 'store')}, "
    what += f"{count(report.versions, 'version')}; {read} read in {human_duration(int(report.seconds * 1000))}"
    damaged = len(report.of_kind("damage"))
    verdict = "sound" if report.is_sound else f"DAMAGED: {count(damaged, 'finding')}"
    others = [
        "SSTs not read" if report.level == "quick" else "",
        count(len(report.of_kind("warning")), "warning") if report.of_kind("warning") else "",
        f"{human_bytes(report.waste_bytes)} of waste" if report.waste_bytes else "",
    ]
    yield f"{', '.join(filter(None, (verdict, *others)))}: {what}"
