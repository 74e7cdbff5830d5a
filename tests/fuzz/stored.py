"""Targets for what a repository holds, and for what is beside it on this machine."""

import hashlib
from collections.abc import Callable
from typing import Any, Final

import msgspec

from blobstore.s3.settings import decode_profile, encode_profile
from blobstore.wrappers.by_id import decode_entry
from engine.cli.cmd.commit import read_result
from engine.cli.config import read_config
from engine.collect.policy import read_policy
from engine.drill.drill import decode_line as decode_drill
from engine.drill.drill import read_history
from engine.local.digests import DigestCache, hash_content
from index.errors import CorruptIndexError, FormatError, SamzaFormatError, UnsafeNameError
from index.java_text import decode_json
from index.plan import plan_format
from index.samza.format import decode_samza_index, encode_samza_index, from_samza, parse_samza_checkpoint_id
from index.snapshot import codec, keys
from index.snapshot.codec import (
    decode_boundary,
    decode_commit,
    decode_index,
    decode_name,
    decode_pin,
    decode_repository,
    encode_index,
    encode_record,
)
from index.snapshot.delta import resolve_deltas
from index.snapshot.model import IndexDelta, SnapshotIndex, StoredRecord
from index.spark.checkpoint import decode_checkpoint_backup
from tests.fuzz.target import Scratch, Target, check_refusal

SUBJECT: Final = "fuzzed"
MIB: Final = 1024 * 1024
_HEAD_BYTES: Final = 20
_CACHE_MAGIC_BYTES: Final = 8
_scratch = Scratch()


def sealed(kind: bytes, payload: bytes) -> bytes:
    """An envelope that is whole, around anything: what somebody with intent would store."""
    return codec.seal(kind, payload, bytes_max=64 * MIB, raw_bytes_max=64 * MIB)


def run_envelope(data: bytes) -> None:
    """As it is, and once more with the hash that its bytes should have: nobody guesses a SHA-256."""
    letter = data[8:9] or codec.KIND_INDEX
    kind = letter if letter in codec.KINDS else codec.KIND_INDEX
    head, stored = data[:_HEAD_BYTES], data[codec.HEADER_BYTES :]
    mended = head + hashlib.sha256(head + stored).digest() + stored if len(head) == _HEAD_BYTES else data
    for bytes_ in (mended, data):
        payload = codec.unseal(bytes_, kind, bytes_max=MIB, raw_bytes_max=MIB, subject=SUBJECT)
        again = codec.seal(kind, payload, bytes_max=2 * MIB, raw_bytes_max=MIB)
        assert codec.unseal(again, kind, bytes_max=2 * MIB, raw_bytes_max=MIB, subject=SUBJECT) == payload


def run_index(payload: bytes) -> None:
    index = decode_index(sealed(codec.KIND_INDEX, payload), subject=SUBJECT)
    assert decode_index(encode_index(index), subject=SUBJECT) == index


def run_delta(data: bytes) -> None:
    """Two payloads, the length of the first before them: a whole index and a delta on it."""
    length = int.from_bytes(data[:2], "big")
    whole = decode_index(sealed(codec.KIND_INDEX, data[2 : 2 + length]), subject=SUBJECT)
    delta = decode_index(sealed(codec.KIND_INDEX, data[2 + length :]), subject=SUBJECT)
    if isinstance(whole, SnapshotIndex) and isinstance(delta, IndexDelta):
        index = resolve_deltas(whole, [delta])
        assert decode_index(encode_index(index), subject=SUBJECT) == index


def record(kind: bytes, decode: Callable[..., StoredRecord]) -> Callable[[bytes], None]:
    """A target for records of a kind."""

    def run(payload: bytes) -> None:
        found = decode(sealed(kind, payload), subject=SUBJECT)
        assert decode(encode_record(found), subject=SUBJECT) == found

    return run


def run_keys(data: bytes) -> None:
    """Every key that is taken is the only spelling of what it says (design 0001, K6)."""
    text = data.decode("utf-8", "surrogateescape")
    for parse, make in _KEYS:
        try:
            parsed = parse(text)
        except UnsafeNameError as error:
            check_refusal(error)
            continue
        assert make(parsed) == text, parse
    keys.check_file_name(text)
    assert "/" not in text
    assert text not in {".", ".."}


_KEYS: Final[tuple[tuple[Callable[[str], Any], Callable[[Any], str]], ...]] = (
    (keys.decode_component, keys.encode_component),
    (keys.decode_scope, keys.encode_scope),
    (keys.parse_upload_key, lambda key: keys.upload_key(key.prefix, key.scope, key.session, key.counter)),
    (
        keys.parse_log_key,
        lambda key: (keys.commit_key if key.kind == "commit" else keys.boundary_key)(key.scope, key.number),
    ),
    (keys.parse_name_key, lambda key: keys.name_key(*key)),
    (keys.parse_pin_key, keys.pin_key),
    (keys.parse_run_key, lambda key: keys.run_key(*key)),
    (keys.parse_audit_key, keys.audit_key),
)


def run_plan(data: bytes) -> None:
    for decode in (plan_format.decode_plan_header, plan_format.decode_plan_summary):
        try:
            found = decode(data, subject=SUBJECT)
        except FormatError as error:
            check_refusal(error)
            continue
        assert decode(plan_format.encode_indented(found), subject=SUBJECT) == found
    lines = list(plan_format.decode_lines(data, subject=SUBJECT))
    again = b"".join(map(plan_format.encode_line, lines))
    assert list(plan_format.decode_lines(again, subject=SUBJECT)) == lines


def run_run_header(data: bytes) -> None:
    header = plan_format.decode_run_header(data, subject=SUBJECT)
    assert plan_format.decode_run_header(plan_format.encode_run_header(header), subject=SUBJECT) == header


def run_audit(data: bytes) -> None:
    found = plan_format.decode_audit(data, subject=SUBJECT)
    assert plan_format.decode_audit(plan_format.encode_indented(found), subject=SUBJECT) == found


def run_samza(data: bytes) -> None:
    index = decode_samza_index(data, blob_id=SUBJECT)
    assert decode_samza_index(encode_samza_index(index), blob_id=SUBJECT) == index
    parse_samza_checkpoint_id(index.snapshot_metadata.checkpoint_id)
    try:
        snapshot = from_samza(index)
    except SamzaFormatError:
        return
    assert all(sum(run.size_bytes for run in file.blobs) == file.size_bytes for file in snapshot.files)


def run_checkpoint_backup(data: bytes) -> None:
    """What a caller's offsets say: any text at all, and most of them no backup."""
    backup = decode_checkpoint_backup(data.decode("utf-8", "surrogatepass"))
    assert backup is None or decode_checkpoint_backup(backup.encode()) == backup


def run_entry(data: bytes) -> None:
    entry = decode_entry(data, "blobs/k")
    assert decode_entry(msgspec.json.encode(entry), "blobs/k") == entry
    assert entry.size_bytes >= 0


def run_profile(data: bytes) -> None:
    profile = decode_profile(data)
    assert decode_profile(encode_profile(profile)) == profile


def run_digest_cache(payload: bytes) -> None:
    """A cache file that is whole by its own hash. Nothing of it may stop a backup."""
    directory = _scratch.directory / "cached"
    DigestCache().save(_scratch.directory, directory)
    (path,) = _scratch.directory.glob("*.digests")
    path.write_bytes(path.read_bytes()[:_CACHE_MAGIC_BYTES] + hash_content(payload) + payload)
    cache = DigestCache.load(_scratch.directory, directory)
    cache.save(_scratch.directory, directory)


def run_history(data: bytes) -> None:
    """A line that cannot be read is reported, and stops nobody from reading the others."""
    history = read_history(_scratch.file(data))
    for error in history.broken:
        check_refusal(error)
    for line in data.split(b"\n")[:4]:
        try:
            entry = decode_drill(line, SUBJECT)
        except FormatError as error:
            check_refusal(error)
            continue
        assert decode_drill(msgspec.json.encode(entry), SUBJECT) == entry


def run_result(data: bytes) -> None:
    read_result(_scratch.file(data), repository_id="0" * 20)


def run_settings(data: bytes) -> None:
    read_config(_scratch.file(data), {"": {"store": False, "json": False}, "backup": {"job": False, "files": True}})


def run_policy(data: bytes) -> None:
    read_policy(_scratch.file(data)).resolve(1_800_000_000_000)


class _Anything(msgspec.Struct):
    schema: int = 0


def run_json(data: bytes) -> None:
    decode_json(data, _Anything, CorruptIndexError, "is nothing", subject=SUBJECT)


TARGETS: Final = (
    Target(name="envelope", run=run_envelope, covers=(codec.unseal,)),
    Target(name="index", run=run_index, covers=(decode_index,)),
    Target(name="delta", run=run_delta, covers=(decode_index,)),
    Target(name="commit", run=record(codec.KIND_COMMIT, decode_commit), covers=(decode_commit,)),
    Target(name="boundary", run=record(codec.KIND_BOUNDARY, decode_boundary), covers=(decode_boundary,)),
    Target(name="pin", run=record(codec.KIND_PIN, decode_pin), covers=(decode_pin,)),
    Target(name="name", run=record(codec.KIND_NAME, decode_name), covers=(decode_name,)),
    Target(name="repository", run=record(codec.KIND_REPOSITORY, decode_repository), covers=(decode_repository,)),
    Target(name="keys", run=run_keys, covers=(*(parse for parse, _ in _KEYS), keys.check_file_name), bytes_max=512),
    Target(
        name="plan",
        run=run_plan,
        covers=(
            plan_format.decode_plan_header,
            plan_format.decode_plan_summary,
            plan_format.decode_line,
            plan_format.decode_lines,
        ),
    ),
    Target(name="run", run=run_run_header, covers=(plan_format.decode_run_header,), bytes_max=512),
    Target(name="audit", run=run_audit, covers=(plan_format.decode_audit,)),
    Target(name="json", run=run_json, covers=(decode_json,), bytes_max=2048),
    Target(name="samza", run=run_samza, covers=(decode_samza_index, from_samza, parse_samza_checkpoint_id)),
    Target(
        name="checkpoint_backup",
        run=run_checkpoint_backup,
        covers=(decode_checkpoint_backup,),
        refuses=(UnicodeDecodeError,),
        bytes_max=2048,
    ),
    Target(name="entry", run=run_entry, covers=(decode_entry,), bytes_max=1024),
    Target(name="profile", run=run_profile, covers=(decode_profile,), bytes_max=2048),
    Target(name="digest-cache", run=run_digest_cache, covers=(DigestCache.load,)),
    Target(name="history", run=run_history, covers=(read_history, decode_drill)),
    Target(name="result", run=run_result, covers=(read_result,)),
    Target(name="settings", run=run_settings, covers=(read_config,)),
    Target(name="policy", run=run_policy, covers=(read_policy,)),
)
