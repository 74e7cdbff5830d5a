"""The verb `spark survey`: every checkpoint below a place (design 0005, W1 to W4)."""

import asyncio
from collections.abc import Mapping
from typing import Final

import click

from engine.checkpoint.survey import Survey, SurveyedCheckpoint, survey_checkpoints
from engine.cli.output import Column, tabulate
from engine.cli.session import Session, verb
from index.display import count, human_bytes, human_duration


@verb("spark survey", "List the checkpoints below a place.", needs_repository=False, prints=(Survey,))
@click.argument("location", metavar="URL")
def spark_survey(session: Session, location: str) -> None:
    """List every checkpoint below URL, a directory or s3://bucket/prefix: its query, newest batch, size and price.

    Nothing is written, and queries may run. Waste is what no query needs by names and the newest commit alone: state of
    operators and partitions that are no more, of attempts that lost, and of a history that was left; there may be more.
    Prices are list prices of S3 Standard; `~` where only that of the storage is known.

    Example: tidemark spark survey s3://bucket/checkpoints
    """
    with session.progress("survey") as progress:
        found = asyncio.run(survey_checkpoints(location, store_settings=session.store_settings(), progress=progress))
    session.show(found, _lines(found))


def _lines(found: Survey) -> list[str]:
    every = found.checkpoints
    lines = tabulate(every, _COLUMNS) if every else []
    for each in every:
        lines += [f"{each.path}: {finding}" for finding in each.findings]
        lines += [f"{each.path}: {human_bytes(n)} of a {why}" for why, n in each.waste_bytes.items()]
    stored = human_bytes(sum(each.size_bytes for each in every))
    listed = f"{count(found.files, 'file')} with {human_bytes(found.size_bytes)}"
    return [*lines, f"{count(len(every), 'checkpoint')} with {stored}; listed {listed}"]


def _price(each: SurveyedCheckpoint) -> str:
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
