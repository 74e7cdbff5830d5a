"""The verb `init`."""

from typing import ClassVar

import click
import msgspec

from engine.cli import options as cli
from engine.cli.session import Session, verb
from index.display import human_duration, printable
from index.snapshot.model import RepositoryRecord


class InitView(msgspec.Struct, frozen=True, kw_only=True):
    """`init`."""

    json_omitted: ClassVar = ("record",)
    json_properties: ClassVar = {
        "repository_id": "record.id",
        **{name: f"record.{name}" for name in ("ttl_ms", "margin_ms", "collection_period_ms")},
    }

    record: RepositoryRecord


@verb("init", prints=(InitView,))
@click.option("--ttl", type=cli.DURATION, default="24h", help="Life of an upload that is not committed.")
@click.option("--margin", type=cli.DURATION, default="1h", help="How much of it a commit must have left.")
@click.option("--collection-period", type=cli.DURATION, default="24h", help="How often collect will run.")
def init(session: Session, *, ttl: int, margin: int, collection_period: int) -> None:
    """Make a store a repository.

    The TTL must be longer than the longest backup with its commit takes. The three times are in the repository and
    hold for everybody who uses it.

    Example: tidemark init -r file:///backups --ttl 2d
    """
    with session.initialised(ttl_ms=ttl, margin_ms=margin, collection_period_ms=collection_period) as repository:
        record = repository.record
    times = f"TTL {human_duration(record.ttl_ms)}, margin {human_duration(record.margin_ms)}"
    period = f"collect every {human_duration(record.collection_period_ms)}"
    session.show(InitView(record=record), [f"repository {printable(record.id)}: {times}, {period}"])
