"""A reader of a repository in a directory that knows nothing of Tidemark but `design/0001-snapshot-format.md`.

It keeps that document honest: anyone who writes another one, in any language, has what this had. It brings
back the newest commit of a job, every byte compared with its hash.

    python examples/outsider.py REPOSITORY JOB TARGET

What it leaves out is in the design documents too: names and pins, stores other than a directory (0003), and how a
reader keeps a collection from overtaking it (0002). Numbers in brackets are rules of 0001.
"""

import hashlib
import sys
import zlib
from pathlib import Path, PurePosixPath
from typing import Any, Final

import blake3
import msgspec

ENVELOPE_BYTES: Final = 52
INDEX_BYTES_MAX: Final = 2**30
RECORD_BYTES_MAX: Final = 2**27
NAME_BYTES_MAX: Final = 255
FILE_FIELDS_LEAST: Final = 4
Entries = dict[str, list[Any]]


class FormatError(Exception):
    """The repository is not as the document says."""


def main() -> int:
    """Restore the newest commit of a job: TARGET/<task>/<store>/..."""
    repository, job, target = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    commit = newest_commit(repository, job)
    print(f"commit {commit['number']}, version {commit.get('version', 0)}")
    for store in commit.get("stores", []):
        index = read_index(repository, store["index"])
        place = target / component(store["task"]) / component(store["store"])
        count = restore_dir(repository, index["dir"], place)
        print(f"{place}: {count} files")
    return 0


def newest_commit(repository: Path, job: str) -> dict[str, Any]:
    """Return the record with the highest number that no boundary has closed and that is not void [K4, section 4]."""
    log = repository / "log" / encode(job)
    boundaries = [read(path, "B", RECORD_BYTES_MAX) for path in log.glob("*.boundary")]
    for path in sorted(log.glob("*.commit"), reverse=True):
        record = read(path, "C", RECORD_BYTES_MAX)
        pointer = {"number": record["number"], "write_id": record["write_id"]}
        closed = any(record["number"] <= b["number"] and pointer not in b.get("kept", []) for b in boundaries)
        # A directory's clock is that of its file system: a record that came too late is void.
        void = path.stat().st_mtime_ns // 1_000_000 > record["valid_until_ms"]
        if not closed and not void:
            return record
    raise FormatError(f"no commit of {job}")


def read_index(repository: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """Read an index; a delta is applied to its base [X1, X2]."""
    path = repository / PurePosixPath(reference["key"])
    if not reference["key"].startswith("indexes/") or ".." in path.parts:
        raise FormatError(f"{reference['key']} is not a key of an index")
    if hashlib.sha256(path.read_bytes()).digest() != reference["sha256"]:
        raise FormatError(f"{path} is not what was referred to")
    index = read(path, "I", INDEX_BYTES_MAX)
    if index["kind"] == "snapshot":
        return index
    base = read_index(repository, index["base"])
    return {**index, "kind": "snapshot", "dir": apply_delta(base["dir"], index["dir"])}


def apply_delta(base: list[Any], delta: list[Any]) -> list[Any]:
    """One directory: names are dropped, then set, and the same below [X2]."""
    _, files, dirs = filled(base, 3)
    _, files_set, files_dropped, dirs_set, dirs_dropped = filled(delta, 5)
    new_files = {file[0]: file for file in files if file[0] not in files_dropped}
    new_files |= {file[0]: file for file in files_set}
    new_dirs = {sub[0]: sub for sub in dirs if sub[0] not in dirs_dropped}
    for sub in dirs_set:
        new_dirs[sub[0]] = apply_delta(new_dirs.get(sub[0], [sub[0]]), sub)
    return [delta[0], [new_files[n] for n in sorted(new_files)], [new_dirs[n] for n in sorted(new_dirs)]]


def restore_dir(repository: Path, directory: list[Any], target: Path) -> int:
    """Write the files of a directory and of those below; how many they are."""
    target.mkdir(parents=True)
    _, files, dirs = filled(directory, 3)
    for file in files:
        name, (_, mode, *_), digest, *_ = file
        body = read_file(repository, file)
        if blake3.blake3(body).digest() != digest:
            raise FormatError(f"{target / component(name)} is not what was backed up")
        (target / component(name)).write_bytes(body)
        (target / component(name)).chmod(mode)
    return len(files) + sum(restore_dir(repository, sub, target / component(sub[0])) for sub in dirs)


def read_file(repository: Path, file: list[Any]) -> bytes:
    """Return the bytes of a file: in the index, in blobs in the order given, or none [section 4, "To read a file"]."""
    # Fields at the end may be missing [F6].
    _, _, _, _, blobs, inline, *_ = (*file, [], None) if len(file) == FILE_FIELDS_LEAST else (*file, None)
    if inline is not None:
        return bytes(inline)
    body = b""
    for key, _, blob_offset, size, *_ in blobs:
        if not key.startswith("blobs/") or ".." in key.split("/"):
            raise FormatError(f"{key} is not a key of a blob")
        with (repository / key).open("rb") as blob:
            blob.seek(blob_offset)
            body += blob.read(size)
    return body


def read(path: Path, kind: str, raw_bytes_max: int) -> dict[str, Any]:
    """Return the payload of an envelope, in the order of F8."""
    stored = path.read_bytes()
    head, payload = stored[:ENVELOPE_BYTES], stored[ENVELOPE_BYTES:]
    if len(head) < ENVELOPE_BYTES or head[:8] != b"TIDEMARK" or head[8:9] != kind.encode():
        raise FormatError(f"{path} is not an object of kind {kind}")
    if head[9] != 1 or head[10] > 1 or head[11] != 0:
        raise FormatError(f"{path} is of a newer format")
    if hashlib.sha256(head[:20] + payload).digest() != head[20:]:
        raise FormatError(f"{path} is damaged")
    raw_bytes = int.from_bytes(head[12:20], "little")
    if raw_bytes > raw_bytes_max:
        raise FormatError(f"{path} says that it has {raw_bytes} bytes")
    if head[10] == 1:
        inflater = zlib.decompressobj()
        payload = inflater.decompress(payload, raw_bytes + 1)
    if len(payload) != raw_bytes:
        raise FormatError(f"{path} has {len(payload)} bytes, not {raw_bytes}")
    value: dict[str, Any] = msgspec.msgpack.decode(payload)
    return value


def filled(array: list[Any], length: int) -> list[Any]:
    """Return the first fields of an array; those that are missing are empty lists [F6]."""
    return [*array, *([[]] * length)][:length]


def encode(name: str) -> str:
    """Return a name as a component of a key [K1]."""
    letters = set(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
    text = "".join(chr(b) if b in letters else f"~{b:02X}" for b in name.encode())
    return f"~2E{text[1:]}" if text.startswith(".") else text


def component(name: str) -> str:
    """Return a name that may be joined to a path [N1]."""
    if not name or name in {".", ".."} or any(c in name for c in "/\\\0") or len(name.encode()) > NAME_BYTES_MAX:
        raise FormatError(f"{name!r} is not a name of a file")
    return name


if __name__ == "__main__":
    sys.exit(main())
