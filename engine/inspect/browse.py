"""Read the keys of a snapshot's RocksDB: in place, or restored to a directory that is removed afterwards."""

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import ClassVar, Final, TypeAlias

import msgspec
from typing_extensions import override

from blobstore.concurrency import run_blocking
from engine.errors import NotFoundError, UsageError
from engine.local.scratch import scratch_dir
from engine.records.repository import OpenRepository
from engine.restore.ranges import SnapshotRanges
from engine.restore.restore import read_index_of, restore_store
from engine.rocksdb.in_place import StoreInPlace, end_of_prefix
from engine.rocksdb.store import RocksDbSettings, list_families, open_family
from engine.runtime import NO_PROGRESS, Progress
from index.display import DisplayMixin
from index.errors import FormatError
from index.snapshot.model import StoreReference
from index.spark.checkpoint import decode_checkpoint_backup

SCRATCH_PREFIX: Final = "tidemark-keys-"
# The file that every RocksDB directory has.
_CURRENT: Final = "CURRENT"
# An escape; a backslash alone is none.
_ESCAPED: Final = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|\\)?")


class KeyRange(msgspec.Struct, frozen=True, kw_only=True):
    """Which keys: those with a prefix, from one on and before another, in the order of their bytes."""

    prefix: bytes = b""
    start: bytes = b""
    # None: to the end.
    stop: bytes | None = None
    # The column family; None: all, one after the other.
    family: str | None = None


class KeyPlace(msgspec.Struct, frozen=True):
    """Where to continue: at a key of a column family, and then in the families behind it."""

    family: str
    key: bytes


class NamedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key, and its value if there is one; in JSON both as escaped text and as hexadecimal."""

    json_omitted: ClassVar = ("key", "value")
    json_properties: ClassVar = {"key": "text", "key_hex": "key", "value": "value_text", "value_hex": "value"}

    key: bytes
    value: bytes | None = None

    @property
    def text(self) -> str:
        return escape_bytes(self.key)

    @property
    def value_text(self) -> str | None:
        return escape_bytes(self.value) if self.value is not None else None


class FoundKey(NamedKey, frozen=True, kw_only=True):
    """One key of a store, with its value if that was asked for."""

    family: str
    value_bytes: int

    @property
    def place(self) -> str:
        return write_place(KeyPlace(self.family, self.key))


class FoundKeys(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """The first keys of a range."""

    keys: tuple[FoundKey, ...]
    # Number of keys of the range, those that are listed among them; None: not counted.
    count: int | None
    # The key that comes next, and its family; None: these are all.
    next: FoundKey | None = None
    # Those of the range; nothing is listed of the ones before the place to continue at.
    families: tuple[str, ...]

    @override
    def _figures(self) -> dict[str, str]:
        return {
            "keys": f"{len(self.keys):,}",
            "of": "" if self.count is None else f"{self.count:,}",
            "more": "yes" if self.next is not None else "",
            "column families": ", ".join(self.families),
        }


class RestoredRows:
    """The rows of a directory that nobody has open, read by RocksDB in raw mode as `StoreInPlace` does; it blocks."""

    def __init__(self, directory: Path) -> None:
        self.families = list_families(directory)
        self.location = str(directory)
        self._directory = directory

    async def chunks(
        self, family: str, *, start: bytes, stop: bytes | None, merge_delimiter: bytes | None
    ) -> AsyncGenerator[list[tuple[bytes, bytes]], None]:
        with open_family(self._directory, family, RocksDbSettings(merge_delimiter=merge_delimiter)) as reader:
            for row in reader.items(start=start):
                if stop is not None and row[0] >= stop:
                    break
                yield [row]

    async def get(self, key: bytes, family: str, *, merge_delimiter: bytes | None) -> bytes | None:
        with open_family(self._directory, family, RocksDbSettings(merge_delimiter=merge_delimiter)) as reader:
            return reader.get(key)


Rows: TypeAlias = StoreInPlace | RestoredRows


@contextlib.asynccontextmanager
async def opened_rows(
    repository: OpenRepository,
    reference: StoreReference,
    restore_to: Path | None = None,
    *,
    progress: Progress = NO_PROGRESS,
) -> AsyncIterator[tuple[Rows, SnapshotRanges]]:
    """Open the RocksDB of a pinned commit for reading, in place or restored, with what counts its requests.

    In place, blocks are fetched as they are needed, and nothing is on a disk (design 0013). With `restore_to` it is
    restored whole to a fresh directory there, which is removed when the block ends.

    Raises:
        NotFoundError: The snapshot is not a RocksDB directory. The others are as in `StoreInPlace.open`, or in
            `restore_store`.
    """
    index, _ = await read_index_of(repository.store, reference)
    files = SnapshotRanges(repository.store, index)
    # Before a byte of it is fetched.
    if _CURRENT not in files.names():
        subject, hint = f"{index.metadata.task}/{index.metadata.store}", "see what it is with `tidemark show --files`"
        raise NotFoundError("is not a RocksDB directory", operation="keys", subject=subject, hint=hint)
    if restore_to is None:
        yield await StoreInPlace.open(files), files
        return
    await run_blocking(restore_to.mkdir, mode=0o700, parents=True, exist_ok=True)
    async with scratch_dir(restore_to, SCRATCH_PREFIX, may_stay=True) as directory:
        await restore_store(repository.without_digests(), reference, directory / "store", progress=progress)
        yield RestoredRows(directory / "store"), files


def is_checkpoint_backup(offsets: str) -> bool:
    """Return whether a commit with these offsets is the backup of a checkpoint: its keys are not read like this."""
    try:
        return decode_checkpoint_backup(offsets) is not None
    except FormatError:
        return True


async def find_keys(
    store: Rows,
    wanted: KeyRange,
    *,
    keys_max: int,
    resume: KeyPlace | None = None,
    values: bool = False,
    counted: bool = False,
    merge_delimiter: bytes | None = None,
) -> FoundKeys:
    """Find the first keys of a range.

    Args:
        store: Whose keys.
        keys_max: 0 with `counted` lists none.
        resume: Where the range begins, if not in the first of its families.
        counted: Whether all keys of the range are counted, which reads all of it.
        merge_delimiter: As in `RocksDbSettings`.

    Raises:
        NotFoundError: There is no such column family.
        DamagedError: The store is damaged.
        UsageError: It holds operands, and there is no delimiter to put them together.
    """
    there = store.families
    families = there if wanted.family is None else _from_family(wanted.family, there, store.location)[:1]
    first = max(wanted.start, wanted.prefix)
    stop = min((end for end in (wanted.stop, end_of_prefix(wanted.prefix)) if end is not None), default=None)
    keys: list[FoundKey] = []
    count, following = 0, None
    for name in families if resume is None else _from_family(resume.family, families, store.location):
        # It begins later in the family to continue in.
        start = max(first, resume.key) if resume is not None and name == resume.family else first
        chunks = store.chunks(name, start=start, stop=stop, merge_delimiter=merge_delimiter)
        async with contextlib.aclosing(chunks) as rows:
            async for key, value in _each(rows):
                if len(keys) < keys_max:
                    kept = value if values else None
                    keys.append(FoundKey(family=name, key=key, value_bytes=len(value), value=kept))
                elif following is None:
                    following = FoundKey(family=name, key=key, value_bytes=len(value))
                    if not counted:
                        break
                count += 1
        if following is not None and not counted:
            break
    return FoundKeys(keys=tuple(keys), count=count if counted else None, next=following, families=families)


async def _each(chunks: AsyncIterator[list[tuple[bytes, bytes]]]) -> AsyncIterator[tuple[bytes, bytes]]:
    async for rows in chunks:
        for row in rows:
            yield row


def _from_family(family: str, families: tuple[str, ...], location: str) -> tuple[str, ...]:
    if family not in families:
        hint = f"it has {', '.join(families)}"
        raise NotFoundError(f"has no column family {family!r}", operation="keys", subject=location, hint=hint)
    return families[families.index(family) :]


def escape_bytes(data: bytes) -> str:
    r"""Return bytes as text that `parse_bytes` reads back: UTF-8 where a terminal shows it, else `\xNN`."""

    def escape(character: str) -> str:
        if character.isprintable():
            return character.replace("\\", "\\\\")
        return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))

    text = "".join(map(escape, data.decode("utf-8", "surrogateescape")))
    # This would be read back as hexadecimal.
    return f"\\x30{text[1:]}" if text.startswith("0x") else text


def parse_bytes(text: str) -> bytes:
    r"""Return bytes from text as `escape_bytes` writes it, or from hexadecimal behind `0x`; else a `UsageError`."""
    if text.startswith("0x"):
        try:
            return bytes.fromhex(text[2:])
        except ValueError:
            raise _no_key(text) from None

    def unescape(escaped: re.Match[bytes]) -> bytes:
        if escaped[0] == b"\\":
            raise _no_key(text)
        return bytes.fromhex(escaped[1].decode()) if escaped[1] else b"\\"

    return _ESCAPED.sub(unescape, text.encode("utf-8", "surrogateescape"))


def write_place(place: KeyPlace) -> str:
    r"""Return a place as text that `parse_place` reads back: family, colon and key, each as `escape_bytes` says."""
    family = escape_bytes(place.family.encode("utf-8", "surrogateescape")).replace(":", "\\x3a")
    return f"{family}:{escape_bytes(place.key)}"


def parse_place(text: str) -> KeyPlace:
    """Return a place from text as `write_place` writes it; refuse another with a `UsageError`."""
    family, colon, key = text.partition(":")
    if not colon:
        raise UsageError(f"not a place: {text!r}", operation="read", hint="write FAMILY:KEY, as `more:` shows it")
    return KeyPlace(parse_bytes(family).decode("utf-8", "surrogateescape"), parse_bytes(key))


def _no_key(text: str) -> UsageError:
    hint = r"write text with \xNN for bytes and \\ for a backslash, or hexadecimal behind 0x"
    return UsageError(f"not a key: {text!r}", operation="read", hint=hint)
