"""The verb `keys`: what is in the RocksDB of a snapshot."""

import shlex
import tempfile
from pathlib import Path
from typing import Final

import click
import msgspec

from engine.cli.config import CommitChoice
from engine.cli.options import (
    DIRECTORY,
    Parsed,
    commit_options,
    limit_option,
    scope_options,
    store_options,
    transfer_options,
)
from engine.cli.output import CommitView, view_commit
from engine.cli.session import Session, choose_stores, verb
from engine.errors import UsageError
from engine.inspect.browse import (
    FoundKeys,
    KeyPlace,
    KeyRange,
    escape_bytes,
    find_keys,
    is_checkpoint_backup,
    opened_snapshot,
    parse_bytes,
    parse_place,
    write_place,
)
from index.display import count, human_bytes, printable, shortened
from index.plan.commits import Commit
from index.snapshot.model import Scope, StoreReference

KEYS_MAX: Final = 100
VALUE_SHOWN_MAX: Final = 160
KEY: Final = Parsed("key", parse_bytes)
PLACE: Final = Parsed("place", parse_place)

_MERGES: Final = {"comma": b",", "none": b"", "bar": b"|"}


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """One key, as escaped text and as hexadecimal; its value, if asked for, too."""

    family: str
    key: str
    key_hex: str
    value_bytes: int
    value: str | None = None
    value_hex: str | None = None


class KeysView(msgspec.Struct, frozen=True, kw_only=True):
    """`keys`."""

    commit: CommitView
    task: str
    store: str
    # Those of the range.
    families: tuple[str, ...]
    keys: tuple[KeyView, ...]
    # Of the whole range; null without --count.
    count: int | None
    # The key that comes next, as escaped text, and its column family; null: these are all.
    next_key: str | None
    next_family: str | None
    # What --resume takes to go on there.
    resume: str | None
    # What was fetched for it.
    restored_bytes: int


class KeysOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which keys of which store, and how to print them."""

    scope: Scope
    task: str
    store: str
    choice: CommitChoice
    wanted: KeyRange
    resume: KeyPlace | None
    limit: int
    values: bool
    counted: bool
    form: str
    merge: str | None
    scratch: Path | None


@verb("keys", "Browse the keys of a snapshot's RocksDB.", prints=(KeysView,))
@scope_options()
@store_options(default=True)
@commit_options
@click.option("--prefix", type=KEY, metavar="K", help=r"Keys that begin so: text with \xNN, or 0x and hex.")
@click.option("--from", "start", type=KEY, metavar="K", help="From this key on, in the order of bytes.")
@click.option("--to", "stop", type=KEY, metavar="K", help="Up to this key, and without it.")
@click.option("--family", metavar="NAME", help="One column family.  [default: all]")
@click.option("--resume", type=PLACE, metavar="F:K", help="Go on in family F at key K, as `more:` shows it.")
@limit_option(KEYS_MAX, 1_000_000, at_least=0, text="Maximum number of keys.")
@click.option("--values", is_flag=True, help="Values too; text is cut after 160 characters.")
@click.option("--count", "counted", is_flag=True, help="Count the whole range, which reads all of it.")
@click.option(
    "--format", "form", type=click.Choice(["text", "hex", "json"]), default="text", help="json: one object a line."
)
@click.option("--merge", type=click.Choice(list(_MERGES)), help="Delimiter between merged operands.")
@click.option("--scratch", type=DIRECTORY, metavar="DIR", help="Where to restore to.")
@transfer_options
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
        session.explaining(repository, scope),
        repository.find_pinned(scope, purpose="keys", **session.choose(repository, options.choice)) as (commit, _),
    ):
        if is_checkpoint_backup(commit.record.offsets):
            raise UsageError(
                "is the backup of a Spark checkpoint",
                operation="keys",
                subject=f"commit {commit.pointer.number} of {commit.scope}",
                hint='read its state as rows: spark.read.format("tidemark_state"), as docs/how-to/spark.md shows',
            )
        reference = choose_stores(commit, task=options.task, store=options.store, operation="keys")[0]
        opened = repository.asynchronous
        with (
            session.progress("keys") as progress,
            repository.inside(opened_snapshot(opened.opened, reference, where, progress=progress)) as directory,
        ):
            found = find_keys(
                directory,
                options.wanted,
                keys_max=options.limit,
                resume=options.resume,
                values=options.values,
                counted=options.counted,
                merge_delimiter=_MERGES[options.merge] if options.merge is not None else None,
            )
    view = _view_keys(commit, reference, found)
    session.show(view, _lines(view, options.form))


def _view_keys(commit: Commit, reference: StoreReference, found: FoundKeys) -> KeysView:
    following = found.next
    keys = [
        KeyView(
            family=one.family,
            key=escape_bytes(one.key),
            key_hex=one.key.hex(),
            value_bytes=one.value_bytes,
            value=escape_bytes(one.value) if one.value is not None else None,
            value_hex=one.value.hex() if one.value is not None else None,
        )
        for one in found.keys
    ]
    return KeysView(
        commit=view_commit(commit),
        task=reference.task,
        store=reference.store,
        families=found.families,
        keys=tuple(keys),
        count=found.count,
        next_key=escape_bytes(following.key) if following is not None else None,
        next_family=following.family if following is not None else None,
        resume=write_place(KeyPlace(following.family, following.key)) if following is not None else None,
        restored_bytes=reference.size_bytes,
    )


def _lines(view: KeysView, form: str) -> list[str]:
    if form == "json":
        return [msgspec.json.encode(key).decode() for key in view.keys]
    place = printable(f"{view.task}/{view.store}")
    lines = [f"{view.commit.line}: {place}, {human_bytes(view.restored_bytes)}"]
    family = None
    for key in view.keys:
        if len(view.families) > 1 and key.family != family:
            family = key.family
            lines.append(f"column family {printable(family)}")
        shown, value = (key.key_hex, key.value_hex) if form == "hex" else (key.key, key.value)
        if value is not None:
            shown += f"  {value if form == 'hex' else shortened(value, VALUE_SHOWN_MAX)}"
        lines.append(shown)
    if view.count is not None:
        lines.append(count(view.count, "key"))
    if view.next_key is not None and view.resume is not None:
        # Behind the same command line either goes on. With several families --from would begin in all of them.
        option, place = ("--resume", view.resume) if len(view.families) > 1 else ("--from", view.next_key)
        lines.append(f"more: {option} {shlex.quote(place)}")
    return lines
