"""The verb `init`."""

import click
import msgspec

from engine.cli.options import DURATION
from engine.cli.session import Session, verb
from index.display import human_duration, printable


class InitView(msgspec.Struct, frozen=True, kw_only=True):
    """`init`."""

    repository_id: str
    ttl_ms: int
    margin_ms: int
    collection_period_ms: int


@verb("init", prints=(InitView,))
@click.option("--ttl", type=DURATION, default="24h", help="Life of an upload that is not committed.")
@click.option("--margin", type=DURATION, default="1h", help="How much of it a commit must have left.")
@click.option("--collection-period", type=DURATION, default="24h", help="How often collect will run.")
def init(session: Session, *, ttl: int, margin: int, collection_period: int) -> None:
    """Make a store a repository.

    The TTL must be longer than the longest backup with its commit takes. The three times are in the repository and
    hold for everybody who uses it.

    Example: tidemark init -r file:///backups --ttl 2d
    """
    with session.initialised(ttl_ms=ttl, margin_ms=margin, collection_period_ms=collection_period) as repository:
        record = repository.record
    view = InitView(
        repository_id=record.id,
        ttl_ms=record.ttl_ms,
        margin_ms=record.margin_ms,
        collection_period_ms=record.collection_period_ms,
    )
    times = f"TTL {human_duration(record.ttl_ms)}, margin {human_duration(record.margin_ms)}"
    period = f"collect every {human_duration(record.collection_period_ms)}"
    session.show(view, [f"repository {printable(record.id)}: {times}, {period}"])
