"""`tidemark spark check`: whether all that a streaming checkpoint has committed is there (design 0005, section 4)."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from engine.checkpoint.check.check import check_checkpoint
from engine.checkpoint.findings import CheckLevel, CheckReport
from engine.cli.exit_codes import ExitCode
from engine.cli.options import DIRECTORY_THERE, on_spark_option
from engine.cli.output import extend
from engine.cli.session import Session, spark_session, verb
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


@verb(
    "check",
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
    help="quick: logs, zips and changelogs; full: every block of every SST, too, and the newest version is loaded.",
)
@click.option("--strict", is_flag=True, help="End with 3 if there are warnings.")
@click.option(
    "--scratch",
    type=DIRECTORY_THERE,
    metavar="DIR",
    help="Where stores are loaded.  [default: this machine's place for temporary files]",
)
@on_spark_option
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
    view = extend(
        SparkCheckView,
        report,
        sound=report.is_sound,
        damaged=len(report.of_kind("damage")),
        warnings=len(report.of_kind("warning")),
        waste=len(report.of_kind("waste")),
    )
    session.show(view, list(_lines(view)))
    if not view.sound:
        return ExitCode.DAMAGED
    return ExitCode.PARTIAL if strict and view.warnings else ExitCode.OK


def _lines(view: SparkCheckView) -> Iterator[str]:
    rows: list[tuple[str, str, str, str]] = []
    hints: list[str] = []
    for kind in ("damage", "warning", "waste"):
        found = view.of_kind(kind)
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
    verdict = [
        "sound" if view.sound else f"DAMAGED: {count(view.damaged, 'finding')}",
        "SSTs not read" if view.level == "quick" else "",
        count(view.warnings, "warning") if view.warnings else "",
        f"{human_bytes(view.waste_bytes)} of waste" if view.waste_bytes else "",
    ]
    what = (
        f"{count(view.batches, 'batch', 'batches')}, {count(view.stores, 'store')}, {count(view.versions, 'version')}"
    )
    read = f"{count(view.files, 'file')}, {human_bytes(view.size_bytes)}, {count(view.blocks, 'block')} of SSTs read"
    yield f"{', '.join(filter(None, verdict))}: {what}; {read} in {human_duration(int(view.seconds * 1000))}"
