"""The history of rehearsals: a line of JSON for each, only ever appended to (design 0009, H1 to H4)."""

import fcntl
import os
from pathlib import Path
from typing import Final

import msgspec

from engine.drill.model import SCHEMA, Entry
from index.errors import FormatError, UnknownFormatError

HISTORY_NAME: Final = "rehearsals.jsonl"
LINE_BYTES_MAX: Final = 64 * 1024

_HINT: Final = "look at this line: it is kept as it is, and left out of the report"


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says, in its order, and which of its lines say nothing."""

    entries: tuple[Entry, ...]
    broken: tuple[FormatError, ...]


class _Head(msgspec.Struct):
    schema: int = 0


_DECODER: Final[msgspec.json.Decoder[Entry]] = msgspec.json.Decoder(Entry)
_HEAD_DECODER: Final = msgspec.json.Decoder(_Head)


def append(path: Path, entry: Entry) -> None:
    """Add a line, durably; what stands there is not touched.

    One write under a lock, so that two rehearsals at a time do not mix; behind half a line that a crash has left a
    new one is begun.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = msgspec.json.encode(entry) + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes and os.pread(descriptor, 1, size_bytes - 1) != b"\n":
            line = b"\n" + line
        with os.fdopen(os.dup(descriptor), "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    finally:
        os.close(descriptor)


def read_history(path: Path) -> History:
    """Read all lines; those that cannot be read are told, and stay.

    Raises:
        OSError: The file cannot be read; one that is not there has no lines.
    """
    entries: list[Entry] = []
    broken: list[FormatError] = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return History(entries=(), broken=())
    with file:
        number = 0
        while line := file.readline(LINE_BYTES_MAX + 1):
            number += 1
            subject = f"{path}, line {number}"
            try:
                entries.append(decode_line(line, subject))
            except FormatError as error:
                broken.append(error)
            while line and not line.endswith(b"\n"):
                line = file.readline(LINE_BYTES_MAX)  # the rest of one that is too long
    return History(entries=tuple(entries), broken=tuple(broken))


def decode_line(line: bytes, subject: str) -> Entry:
    """One line of a history.

    Raises:
        UnknownFormatError: A newer tidemark wrote it.
        FormatError: It is no rehearsal.
    """
    if len(line) > LINE_BYTES_MAX:
        raise FormatError("exceeds 64 KiB", subject=subject, hint=_HINT)
    try:
        schema = _HEAD_DECODER.decode(line).schema
        if schema > SCHEMA:
            raise UnknownFormatError(f"is of schema {schema}", subject=subject, hint="read it with a newer tidemark")
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"is no rehearsal: {error}", subject=subject, hint=_HINT) from None
