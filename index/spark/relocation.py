"""Paths in the files of a checkpoint that stands somewhere else now (design 0005, R5).

Spark writes two kinds of absolute paths into a checkpoint: those of schema files, in the metadata of operators, and
those of the files that a file source has seen. Everything here is pure.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from index.errors import BatchLogError
from index.snapshot.keys import check_file_name
from index.spark.java_text import encode_jackson
from index.spark.query_logs import decode_operator

_SCHEMA_PATH: Final = re.compile(r"(?P<root>.*)/state/(?P<operator>[0-9]+)/_stateSchema/(?P<rest>.+)", re.DOTALL)
_SCHEME: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?P<slashes>/*)(?P<rest>.*)", re.DOTALL)
_S3_SCHEMES: Final = frozenset({"s3", "s3a", "s3n"})
_FILE: Final = "file"
# What java.net.URI leaves as it is in a path.
_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~!*'(),;:$&+=@/")
_VERSION: Final = re.compile(rb"v[0-9]+\r?\n")


def relocate_operator(data: bytes, target: str, *, exact: bool = False, subject: str) -> bytes:
    """The metadata of an operator in a checkpoint whose root is `target`.

    Args:
        data: `_metadata/v2/<batch>`, as Spark wrote it.
        target: An absolute path, or `s3://bucket/prefix`.
        exact: Whether Spark is to see `target` as it is. Otherwise it gets the scheme that the file has, if that is one
            of the same kind of store, else the one that Spark knows: `file:` or `s3a:`.
        subject: What to call the file in an error.

    Returns:
        The file; the same bytes if it names no path.

    Raises:
        BatchLogError: It is not what Spark writes, or names what is no schema file of a checkpoint.
        UnsafeNameError: A part of what stays of a path is no safe name.
    """
    if not any(store.schema_paths for store in decode_operator(data, subject=subject).stores):
        return data
    first, newline, text = data.partition(b"\n")
    parsed: dict[str, Any] = msgspec.json.decode(text)
    for store in parsed["stateStoreInfo"]:
        paths: list[str] = store.get("stateSchemaFilePaths", [])
        store["stateSchemaFilePaths"] = [_relocate_schema(path, target, exact=exact, subject=subject) for path in paths]
    return first + newline + encode_jackson(parsed)


def _relocate_schema(path: str, target: str, *, exact: bool, subject: str) -> str:
    m = _SCHEMA_PATH.fullmatch(path)
    if m is None:
        raise BatchLogError(f"names {path!r}, which is no schema file of a checkpoint", subject=subject)
    for name in m["rest"].split("/"):
        check_file_name(name)
    root = target.rstrip("/") if exact else _as_spark_writes(target, m["root"])
    return f"{root}/state/{m['operator']}/_stateSchema/{m['rest']}"


def _as_spark_writes(target: str, before: str) -> str:
    """The root of a checkpoint in the form that another root has, as far as both are of the same kind of store."""
    target = target.rstrip("/")
    old, new = _SCHEME.fullmatch(before), _SCHEME.fullmatch(target)
    if new is None:
        if old is None and before.startswith("/"):
            return target
        # Spark writes one slash; some other writers three.
        is_long = old is not None and old["scheme"] == _FILE and len(old["slashes"]) > 1
        return f"{_FILE}:{'//' if is_long else ''}{target}"
    if new["scheme"] not in _S3_SCHEMES:
        return target
    scheme = old["scheme"] if old is not None and old["scheme"] in _S3_SCHEMES else "s3a"
    return f"{scheme}://{new['rest']}"


class PathMap:
    """Where the inputs of a query stand now: prefixes of paths, by prefixes of paths, at whole components.

    Args:
        prefixes: From old to new. Without a scheme each is a path of a local file system, as people write it; with
            one it is a part of a URL, as Spark writes it. Of two that match the longer one counts.

    Attributes:
        unused: The old ones that have matched nothing yet.
    """

    def __init__(self, prefixes: Mapping[str, str]) -> None:
        named = {_canonical(old): (old, _written(new)) for old, new in prefixes.items()}
        self._prefixes = sorted(named.items(), key=lambda item: -len(item[0]))
        self.unused = set(prefixes)

    def relocate(self, path: str) -> str:
        """The path of an input file, where it is now."""
        found = _canonical_url(path)
        for old, (given, new) in self._prefixes:
            if found == old or found.startswith(f"{old}/"):
                self.unused.discard(given)
                return new + found[len(old) :]
        return path

    def relocate_log(self, data: bytes) -> bytes:
        """An entry of a file source's log, `sources/<n>/<k>` or `<k>.compact`; what is none comes back as it is."""
        if not self._prefixes or _VERSION.match(data) is None:
            return data
        first, *lines = data.split(b"\n")
        return b"\n".join([first, *map(self._relocate_line, lines)])

    def _relocate_line(self, line: bytes) -> bytes:
        try:
            entry = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return line
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            return line
        moved = self.relocate(entry["path"])
        return line if moved == entry["path"] else encode_jackson({**entry, "path": moved})


def _written(path: str) -> str:
    """A prefix as Spark writes it: a URL, percent-encoded if it was a local path."""
    path = path.rstrip("/")
    return path if _SCHEME.fullmatch(path) else f"{_FILE}://{_quoted(path)}"


def _canonical(path: str) -> str:
    return _canonical_url(_written(path))


def _canonical_url(url: str) -> str:
    """The same for `file:/a` and `file:///a`."""
    m = _SCHEME.fullmatch(url)
    if m is None or m["scheme"] != _FILE:
        return url
    return f"{_FILE}:///{m['rest']}"


def _quoted(path: str) -> str:
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in path.encode())
