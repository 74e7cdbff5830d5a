"""The verbs `keys` and `get`: what is in the RocksDB of a snapshot."""

import contextlib
import json
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Final

import click
import msgspec

from engine.cli import options as cli
from engine.cli.config import CommitChoice
from engine.cli.output import CommitView, to_json, view_commit
from engine.cli.run import ExitCode
from engine.cli.session import Session, verb
from engine.errors import NotFoundError
from engine.inspect import browse
from engine.rocksdb.store import DEFAULT_FAMILY
from engine.runtime import NO_PROGRESS
from index.display import count, human_bytes, shortened
from index.plan.commits import Commit
from index.snapshot.model import Scope, StoreReference

KEYS_MAX: Final = 100
VALUE_SHOWN_MAX: Final = 160
KEY: Final = cli.Parsed("key", browse.parse_bytes)
PLACE: Final = cli.Parsed("place", browse.parse_place)

_MERGES: Final = {"comma": b",", "none": b"", "bar": b"|"}


class ReadCost(msgspec.Struct, frozen=True, kw_only=True):
    """What it took to read: requests for parts of files, and the bytes of a restore."""

    requests: int
    fetched_bytes: int
    restored_bytes: int


class KeysView(msgspec.Struct, frozen=True, kw_only=True):
    """`keys`. The key that comes next, in `next_...`, is null if these are all; `resume` is what --resume takes."""

    json_omitted: ClassVar = ("reference", "found")
    json_properties: ClassVar = {
        **{name: f"reference.{name}" for name in ("task", "store")},
        **{name: f"found.{name}" for name in ("families", "keys", "count")},
        "next_key": "found.next.text",
        "next_family": "found.next.family",
        "resume": "found.next.place",
    }

    commit: CommitView
    reference: StoreReference
    found: browse.FoundKeys
    cost: ReadCost


class GetView(msgspec.Struct, frozen=True, kw_only=True):
    """`get`. A key that is not there has the value null."""

    json_omitted: ClassVar = ("reference", "found")
    json_properties: ClassVar = {**{name: f"reference.{name}" for name in ("task", "store")}, "keys": "found"}

    commit: CommitView
    reference: StoreReference
    found: tuple[browse.NamedKey, ...]
    cost: ReadCost


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Which store of which commit, and how it is read."""

    scope: Scope
    task: str
    store: str
    choice: CommitChoice
    merge: str | None
    restore: bool
    scratch: Path | None


class KeysOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which keys, and how to print them."""

    wanted: browse.KeyRange
    resume: browse.KeyPlace | None
    limit: int
    values: bool
    counted: bool
    form: str


_place_options: Final = cli.together(
    cli.scope_options(),
    cli.store_options(default=True),
    cli.commit_options,
    cli.option("--merge", "Delimiter between merged operands.", click.Choice(list(_MERGES))),
    cli.option("--restore", "Restore the store, and read it with RocksDB: also what is not read in place."),
    cli.option("--scratch DIR", "Where to restore to; with --restore.", cli.DIRECTORY),
    cli.transfer_options,
)


@verb("keys", "Browse the keys of a snapshot's RocksDB.", KeysView)
@_place_options
@cli.option("--prefix K", r"Keys that begin so: text with \xNN, or 0x and hex.", KEY)
@cli.option("--from K", "From this key on, in the order of bytes.", KEY, to="start")
@cli.option("--to K", "Up to this key, and without it.", KEY, to="stop")
@cli.option("--family NAME", "One column family.  [default: all]")
@cli.option("--resume F:K", "Go on in family F at key K, as `more:` shows it.", PLACE)
@cli.option("--limit N", "Maximum number of keys.", click.IntRange(0, 1_000_000), default=KEYS_MAX)
@cli.option("--values", "Values too; text is cut after 160 characters.")
@cli.option("--count", "Count the whole range, which reads all of it.", to="counted")
@cli.option("--format", "json: one object a line.", click.Choice(["text", "hex", "json"]), to="form", default="text")
def keys(session: Session, place: Place, options: KeysOptions) -> None:
    """Browse the keys of a store, as a commit has it. Nothing in the repository changes.

    Only the blocks that have the keys are fetched; nothing is restored. State of a Spark query is read as rows with
    the data source `tidemark_state`.

    Example: tidemark keys -r file:///backups -j flights --at 36h --prefix user- --values
    """
    with _opened(session, place, "keys") as (commit, reference, rows, cost_of):
        reading = browse.find_keys(
            rows,
            options.wanted,
            keys_max=options.limit,
            resume=options.resume,
            values=options.values,
            counted=options.counted,
            merge_delimiter=_MERGES.get(place.merge or ""),
        )
        found, cost = session.repository.loop.run(reading), cost_of()
    view = KeysView(commit=view_commit(commit), reference=reference, found=found, cost=cost)
    session.show(view, _lines(view, options.form))


@verb("get", "Look up keys in a snapshot's RocksDB.", GetView)
@_place_options
@click.argument("names", type=KEY, nargs=-1, required=True, metavar="KEY...")
@cli.option("--family NAME", "The column family.", default=DEFAULT_FAMILY)
@cli.option("--format", "How values are shown.", click.Choice(["text", "hex"]), to="form", default="text")
def get(session: Session, place: Place, names: tuple[bytes, ...], family: str, form: str) -> ExitCode:
    r"""Print the values of keys of a store, as a commit has it, a line for each. Nothing in the repository changes.

    A KEY is text with \xNN for bytes, or 0x and hex. Only the blocks that may have a key are fetched; nothing is
    restored. Ends with 3 if some keys are not there, and with 7 if none is.

    Example: tidemark get -r file:///backups -j flights --at 36h user-17
    """
    with _opened(session, place, "get") as (commit, reference, rows, cost_of):
        values = [
            session.repository.loop.run(rows.get(key, family, merge_delimiter=_MERGES.get(place.merge or "")))
            for key in names
        ]
        found = tuple(browse.NamedKey(key=key, value=value) for key, value in zip(names, values, strict=True))
        cost = cost_of()
    view = GetView(commit=view_commit(commit), reference=reference, found=found, cost=cost)
    missing = ", ".join(of.text for of in found if of.value is None)
    there = [of for of in found if of.value is not None]
    if not there:
        hint = f"{view.commit.line} has other keys; `tidemark keys` lists them"
        raise NotFoundError(f"has no key {missing}", operation="get", subject=rows.location, hint=hint)
    shown = [(of.text, (of.value or b"").hex() if form == "hex" else of.value_text or "") for of in there]
    session.show(view, [value if len(found) == 1 else f"{key}  {value}" for key, value in shown])
    if not missing:
        return ExitCode.OK
    session.warn(f"{rows.location} has no key {missing}")
    return ExitCode.PARTIAL


@contextlib.contextmanager
def _opened(
    session: Session, place: Place, operation: str
) -> Iterator[tuple[Commit, StoreReference, browse.Rows, Callable[[], ReadCost]]]:
    """Open a store of a pinned commit, with what says the cost of what was read so far."""
    is_restored = place.restore or place.scratch is not None
    where = place.scratch or session.cache_dir() or Path(tempfile.gettempdir()) if is_restored else None
    with (
        session.open() as repository,
        session.explaining(place.scope),
        repository.find_pinned(place.scope, purpose=operation, **session.choose(place.choice)) as (commit, _),
    ):
        if browse.is_checkpoint_backup(commit.record.offsets):
            subject = f"commit {commit.pointer.number} of {commit.scope}"
            hint = 'read its state as rows: spark.read.format("tidemark_state"), as docs/how-to/spark.md shows'
            raise session.refusal("is the backup of a Spark checkpoint", hint, subject)
        reference = session.choose_stores(commit, place.task, place.store)[0]
        with (
            session.progress(operation) if is_restored else contextlib.nullcontext(NO_PROGRESS) as progress,
            repository.inside(
                browse.opened_rows(repository.asynchronous.opened, reference, where, progress=progress)
            ) as (rows, files),
        ):

            def cost_of() -> ReadCost:
                restored = reference.size_bytes if is_restored else 0
                return ReadCost(requests=files.requests, fetched_bytes=files.bytes_fetched, restored_bytes=restored)

            yield commit, reference, rows, cost_of


def safe_json(line: str) -> str:
    """Escape in a line of JSON what is not safe for a terminal, so that it stays JSON."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


def _lines(view: KeysView, form: str) -> list[str]:
    found = view.found
    if form == "json":
        return [safe_json(msgspec.json.encode(to_json(key)).decode()) for key in found.keys]
    place = f"{view.reference.task}/{view.reference.store}"
    lines = [f"{view.commit.line}: {place}, {human_bytes(view.reference.size_bytes)}"]
    family = None
    for key in found.keys:
        if len(found.families) > 1 and key.family != family:
            family = key.family
            lines.append(f"column family {family}")
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
