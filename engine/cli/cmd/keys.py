"""The verb `keys`: what is in the RocksDB of a snapshot."""

import shlex
import tempfile
from pathlib import Path
from typing import ClassVar, Final

import click
import msgspec

from engine.cli import options as cli
from engine.cli.config import CommitChoice
from engine.cli.output import CommitView, to_json, view_commit
from engine.cli.session import Session, verb
from engine.errors import UsageError
from engine.inspect import browse
from index.display import count, human_bytes, printable, shortened
from index.snapshot.model import Scope, StoreReference

KEYS_MAX: Final = 100
VALUE_SHOWN_MAX: Final = 160
KEY: Final = cli.Parsed("key", browse.parse_bytes)
PLACE: Final = cli.Parsed("place", browse.parse_place)

_MERGES: Final = {"comma": b",", "none": b"", "bar": b"|"}


class KeysView(msgspec.Struct, frozen=True, kw_only=True):
    """`keys`. The key that comes next, in `next_...`, is null if these are all; `resume` is what --resume takes."""

    json_omitted: ClassVar = ("reference", "found")
    json_properties: ClassVar = {
        **{name: f"reference.{name}" for name in ("task", "store")},
        # What was fetched for it.
        "restored_bytes": "reference.size_bytes",
        **{name: f"found.{name}" for name in ("families", "keys", "count")},
        "next_key": "found.next.text",
        "next_family": "found.next.family",
        "resume": "found.next.place",
    }

    commit: CommitView
    reference: StoreReference
    found: browse.FoundKeys


class KeysOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which keys of which store, and how to print them."""

    scope: Scope
    task: str
    store: str
    choice: CommitChoice
    wanted: browse.KeyRange
    resume: browse.KeyPlace | None
    limit: int
    values: bool
    counted: bool
    form: str
    merge: str | None
    scratch: Path | None


@verb("keys", "Browse the keys of a snapshot's RocksDB.", prints=(KeysView,))
@cli.scope_options()
@cli.store_options(default=True)
@cli.commit_options
@click.option("--prefix", type=KEY, metavar="K", help=r"Keys that begin so: text with \xNN, or 0x and hex.")
@click.option("--from", "start", type=KEY, metavar="K", help="From this key on, in the order of bytes.")
@click.option("--to", "stop", type=KEY, metavar="K", help="Up to this key, and without it.")
@click.option("--family", metavar="NAME", help="One column family.  [default: all]")
@click.option("--resume", type=PLACE, metavar="F:K", help="Go on in family F at key K, as `more:` shows it.")
@cli.limit_option(KEYS_MAX, 1_000_000, at_least=0, text="Maximum number of keys.")
@click.option("--values", is_flag=True, help="Values too; text is cut after 160 characters.")
@click.option("--count", "counted", is_flag=True, help="Count the whole range, which reads all of it.")
@click.option(
    "--format", "form", type=click.Choice(["text", "hex", "json"]), default="text", help="json: one object a line."
)
@click.option("--merge", type=click.Choice(list(_MERGES)), help="Delimiter between merged operands.")
@cli.directory_option("--scratch", "Where to restore to.")
@cli.transfer_options
def keys(session: Session, options: KeysOptions) -> None:
    """Browse the keys of a store, as a commit has it. Nothing in the repository changes.

    The store is restored whole, to a fresh directory below the cache that is removed again: RocksDB opens no part of
    one. State of a Spark query is read as rows with the data source `tidemark_state`.

    Example: tidemark keys -r file:///backups -j flights --at 36h --prefix user- --values
    """
    scope = options.scope
    where = options.scratch or session.cache_dir() or Path(tempfile.gettempdir())
    with (
        session.open() as repository,
        session.explaining(scope),
        repository.find_pinned(scope, purpose="keys", **session.choose(options.choice)) as (commit, _),
    ):
        if browse.is_checkpoint_backup(commit.record.offsets):
            subject = f"commit {commit.pointer.number} of {commit.scope}"
            hint = 'read its state as rows: spark.read.format("tidemark_state"), as docs/how-to/spark.md shows'
            raise UsageError("is the backup of a Spark checkpoint", operation="keys", subject=subject, hint=hint)
        reference = session.choose_stores(commit, options.task, options.store)[0]
        opened = repository.asynchronous
        with (
            session.progress("keys") as progress,
            repository.inside(browse.opened_snapshot(opened.opened, reference, where, progress=progress)) as directory,
        ):
            found = browse.find_keys(
                directory,
                options.wanted,
                keys_max=options.limit,
                resume=options.resume,
                values=options.values,
                counted=options.counted,
                merge_delimiter=_MERGES[options.merge] if options.merge is not None else None,
            )
    view = KeysView(commit=view_commit(commit), reference=reference, found=found)
    session.show(view, _lines(view, options.form))


def _lines(view: KeysView, form: str) -> list[str]:
    found = view.found
    if form == "json":
        return [msgspec.json.encode(to_json(key)).decode() for key in found.keys]
    place = printable(f"{view.reference.task}/{view.reference.store}")
    lines = [f"{view.commit.line}: {place}, {human_bytes(view.reference.size_bytes)}"]
    family = None
    for key in found.keys:
        if len(found.families) > 1 and key.family != family:
            family = key.family
            lines.append(f"column family {printable(family)}")
        shown = key.key.hex() if form == "hex" else key.text
        if key.value is not None:
            shown += f"  {key.value.hex() if form == 'hex' else shortened(key.value_text or '', VALUE_SHOWN_MAX)}"
        lines.append(shown)
    if found.count is not None:
        lines.append(count(found.count, "key"))
    if found.next is not None:
        # Behind the same command line either goes on. With several families --from would begin in all of them.
        several = len(found.families) > 1
        option, place = ("--resume", found.next.place) if several else ("--from", found.next.text)
        lines.append(f"more: {option} {shlex.quote(place)}")
    return lines
