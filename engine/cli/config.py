"""Settings from files, and the words that people choose commits with.

A settings file is TOML. A key at its top is an option of every verb that has it, a table named after a verb is for
that verb alone, `[transfer]` has the fields of `TransferSettings`, and `[s3]` those of `S3Settings`. An option that may
be repeated takes a list, or a text, which is one value.

Credentials are not settings: a key that could hold one is refused.
"""

import difflib
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from blobstore.errors import InvalidRequestError
from blobstore.opening import local_path_of
from blobstore.s3.settings import S3Settings
from engine.errors import UsageError, bare_message
from engine.settings import TransferSettings
from engine.text import Moment, parse_moment
from index.snapshot.model import UniqueId

CONFIG_BYTES_MAX: Final = 1024 * 1024
TRANSFER: Final = "transfer"
TRANSFER_KEYS: Final = TransferSettings.__struct_fields__
S3: Final = "s3"
S3_KEYS: Final = S3Settings.__struct_fields__
LATEST: Final = "latest"

Scalar = str | int | float | bool
# Several: of an option that may be repeated.
Value = Scalar | tuple[Scalar, ...]

_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_VERSION: Final = re.compile(r"v([0-9]{1,18})")
_VERSION_UNIQUE_ID: Final = re.compile(r"([0-9]{1,18})_(.+)")
# What people call a credential: aws_access_key_id, secret_key, session_token, password, credential_process, ...
_CREDENTIAL: Final = re.compile(r"access_?key|secret|session_?token|^token|passw|passphrase|credential", re.IGNORECASE)


class CommitChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which commit is meant; the newest where nothing is given."""

    number: int | None = None
    version: int | None = None
    unique_id: UniqueId | None = None
    at: Moment | None = None
    name: str | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What a settings file says: the values of each table, those at its top under the empty name."""

    path: Path | None = None
    tables: Mapping[str, Mapping[str, Value]] = {}

    def place(self, table: str, option: str) -> tuple[str, str] | None:
        """Return the table and the key that an option of a verb is read from: first the table of the verb."""
        places = ((table, option), shared_place(option))
        return next(((name, key) for name, key in places if key in self.tables.get(name, {})), None)


def shared_place(option: str) -> tuple[str, str]:
    """Return the table, empty for the top, and the key that a setting of all verbs has in a settings file."""
    if option in TRANSFER_KEYS:
        return TRANSFER, option
    table, _, key = option.partition("_")
    return (S3, key) if table == S3 and key in S3_KEYS else ("", option)


def config_paths(environment: Mapping[str, str], directory: Path) -> tuple[Path, ...]:
    """Return where a settings file may be; the first that is there is the only one read."""
    of_user = user_dir(environment, "XDG_CONFIG_HOME", ".config")
    return (directory / "tidemark.toml", *([of_user / "config.toml"] if of_user else []))


def user_dir(environment: Mapping[str, str], variable: str, below_home: str) -> Path | None:
    """Return the directory of this user that a variable names, or the default; None on a machine without a home."""
    home = environment.get("HOME", "")
    of_user = environment.get(variable) or (f"{home}/{below_home}" if home else "")
    return Path(of_user) / "tidemark" if of_user else None


def read_config(path: Path, keys: Mapping[str, Mapping[str, bool]], *, is_named: bool = True) -> Config:
    """Read a settings file; `UsageError` if it cannot be read, or has a key that nobody would ever look at.

    `keys` has those of each table, those of the top under the empty name, and whether one may have several values:
    these are a tuple in the settings, also where the file has only one. Unless the user named the file, it has to be
    the user's own: it may send requests, signed, wherever its writer likes.
    """
    tables: dict[str, dict[str, Value]] = {}
    for name, value in _read_toml(path, is_named=is_named).items():
        table, entries = (name, value) if isinstance(value, dict) else ("", {name: value})
        if isinstance(value, dict) and (not name or name not in keys):
            raise _unknown(path, name, f"table {name!r}", {known: f"[{known}]" for known in keys if known})
        for key, entry in entries.items():
            if key not in keys[table]:
                everywhere = {k: f"{k} in [{t}]" if t else k for t, known in keys.items() for k in sorted(known)}
                here = {known: known for known in keys[table]}
                what = f"key {key!r} in [{table}]" if table else f"key {key!r}"
                raise _unknown(path, key, what, here if table else everywhere)
            shown = f"{table}.{key}" if table else key
            read = _values if keys[table][key] else _scalar
            tables.setdefault(table, {})[key] = read(path, shown, entry)
    return Config(path=path, tables=tables)


def _read_toml(path: Path, *, is_named: bool) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            _check_owner(path, os.fstat(file.fileno()), is_named=is_named)
            data = file.read(CONFIG_BYTES_MAX + 1)
        if len(data) > CONFIG_BYTES_MAX:
            raise _refused(path, "exceeds 1 MiB", "this is not a settings file")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}", "check --config") from error
    except RecursionError as error:
        raise _refused(path, "is nested too deeply", "this is not a settings file") from error
    # Not UTF-8, not TOML, or a number with thousands of digits.
    except ValueError as error:
        raise _refused(path, f"not TOML: {error}", "correct it") from error


def _refused(path: Path, message: str, hint: str) -> UsageError:
    return UsageError(message, operation="settings", subject=str(path), hint=hint)


def _check_owner(path: Path, found: os.stat_result, *, is_named: bool) -> None:
    """Refuse a file that others may have written; of one that was not named, also its group or another user."""
    if is_named and not stat.S_ISREG(found.st_mode):
        return  # a pipe, or the process's own input
    if not is_named and found.st_uid not in {os.geteuid(), 0}:
        message = f"belongs to another user (uid {found.st_uid})"
        raise _refused(path, message, f"if you trust it, name it: --config {path}")
    if found.st_mode & (stat.S_IWOTH if is_named else stat.S_IWGRP | stat.S_IWOTH):
        message = f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
        raise _refused(path, message, f"run `chmod go-w {path}`")


def _unknown(path: Path, key: str, what: str, places: Mapping[str, str]) -> UsageError:
    """Refuse a name; the hint is the place of the known name that is nearest to it."""
    if _CREDENTIAL.search(key):
        hint = (
            "take it out, and change it if it is real; the standard chain finds credentials: AWS_PROFILE, "
            "AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY, ~/.aws, or the role of this machine"
        )
        return _refused(path, f"{what} looks like a credential, and those are not settings", hint)
    # A cutoff of 0 always finds one: the nearest name says more than a list of thirty.
    nearest = difflib.get_close_matches(key, sorted(places), n=1, cutoff=0)
    return _refused(path, f"unknown {what}", f"did you mean `{places[nearest[0]]}`?" if nearest else "remove it")


def _values(path: Path, key: str, value: object) -> tuple[Scalar, ...]:
    return tuple(_scalar(path, key, one) for one in (value if isinstance(value, list) else [value]))


def _scalar(path: Path, key: str, value: object) -> Scalar:
    if isinstance(value, str | int | float | bool):
        return value
    # TOML has dates of its own; the options take text.
    raise _refused(path, f"{key} is a {type(value).__name__}", "write text, a number, true or false")


def parse_target(text: str) -> Path:
    """Parse a place on this machine, a path or a `file:` URL; `UsageError` if it reads like one elsewhere."""
    try:
        path = local_path_of(text)
    except InvalidRequestError as error:
        raise UsageError(bare_message(error), operation="read", subject=repr(text), hint=error.hint) from None
    if path is None:
        hint = "write a path, or ./ before it if that is its name"
        raise UsageError("names no place on this machine", operation="read", subject=repr(text), hint=hint)
    return path


def parse_store(text: str) -> tuple[str, str]:
    """Parse `TASK/STORE`; `UsageError` if it is none."""
    task, slash, store = text.partition("/")
    if not (task and slash and store):
        raise UsageError("not a store of a task", operation="read", subject=repr(text), hint="write TASK/STORE")
    return task, store


def parse_version(text: str) -> CommitChoice:
    """Parse a version, `8` or `8_<uid>`, the form of Spark's lineage; `UsageError` if it is neither."""
    if _NUMBER.fullmatch(text):
        return CommitChoice(version=int(text))
    if match := _VERSION_UNIQUE_ID.fullmatch(text):
        return CommitChoice(version=int(match[1]), unique_id=UniqueId(match[2]))
    raise UsageError("not a version", operation="read", subject=repr(text), hint="write 8, or 8_<unique id>")


def parse_commit(text: str) -> CommitChoice:
    """Parse `latest`, a number, `v8`, `8_<uid>`, `@TIME`, or a name; `UsageError` if it is empty, or no time."""
    if not text:
        hint = "write a number, v8, 8_<uid>, a name or latest"
        raise UsageError("an empty text chooses no commit", operation="read", hint=hint)
    if text == LATEST:
        return CommitChoice()
    if text.startswith("@"):
        return CommitChoice(at=parse_moment(text[1:]))
    if _NUMBER.fullmatch(text):
        return CommitChoice(number=int(text))
    if match := _VERSION.fullmatch(text):
        return CommitChoice(version=int(match[1]))
    if _VERSION_UNIQUE_ID.fullmatch(text):
        return parse_version(text)
    return CommitChoice(name=text)


def check_new_name(name: str) -> str:
    """Return a name for a commit; `UsageError` if `parse_commit` would read it as something else."""
    if not name or name.startswith("@") or parse_commit(name).name is None:
        message, hint = "reads like a number, a version or a time", "choose a name such as before-upgrade"
        raise UsageError(message, operation="name", subject=repr(name), hint=hint)
    return name
