"""Samza's table `TestDirDiffUtilAreSameFile` for its own rule, and the rule of design 0002, I1."""

import msgspec
import pytest

from index.snapshot.dir_diff import LocalFile, is_same_file, is_same_file_samza_v1
from index.snapshot.model import FileIndex, SstIdentity
from tests.unit.index.builders import file_index, local_file

SMALL = b"x" * 100
OTHER = b"y" * 100
MIB = 1024 * 1024
SESSION_A = SstIdentity("RCQT39JY6E1U4N923P4Y", 17)
SESSION_B = SstIdentity("RCQT39JY6E1U4N923P4X", 17)


def local_of(size_bytes: int = 100, *, name: str = "000017.sst", mode: int = 0o644, **changes: object) -> LocalFile:
    file = local_file(name, SMALL)
    metadata = msgspec.structs.replace(
        file.metadata,
        size_bytes=size_bytes,
        mode=mode,
        **{k: v for k, v in changes.items() if k in {"owner", "group", "modified_at_ns", "created_at_ms"}},
    )
    facts = {k: v for k, v in changes.items() if k in {"sst", "blake3", "crc32"}}
    return msgspec.structs.replace(file, metadata=metadata, **facts)


def remote_of(size_bytes: int = 100, *, mode: int = 0o644, crc32: int | None = None) -> FileIndex:
    file = file_index("000017.sst", SMALL, mode=mode)
    metadata = msgspec.structs.replace(file.metadata, size_bytes=size_bytes)
    return msgspec.structs.replace(file, metadata=metadata, crc32=file.crc32 if crc32 is None else crc32)


# Samza's test or rule, local, remote, large files compared, owners compared, same
SAMZA = [
    ("SameFile", local_of(), remote_of(), False, True, True),
    ("DifferentFile", local_of(name="000018.sst"), remote_of(), False, True, False),
    ("DifferentCrc", local_of(), remote_of(crc32=1), True, True, False),
    ("SmallFile_DifferentCrc", local_of(), remote_of(crc32=1), False, True, False),
    ("DifferentSize", local_of(101), remote_of(), False, True, False),
    ("DifferentOwner", local_of(owner="root"), remote_of(), False, True, False),
    ("DifferentGroup", local_of(group="root"), remote_of(), False, True, False),
    ("IgnoreDifferentOwner", local_of(owner="root"), remote_of(), False, False, True),
    ("IgnoreDifferentGroup", local_of(group="root"), remote_of(), False, False, True),
    ("DifferentOwnerRead", local_of(mode=0o244), remote_of(), False, True, False),
    ("DifferentOwnerWrite", local_of(mode=0o444), remote_of(), False, True, False),
    ("DifferentOwnerExecute", local_of(mode=0o744), remote_of(), False, True, False),
    ("LargeFile_DifferentCrc", local_of(MIB + 1), remote_of(MIB + 1, crc32=1), False, True, True),
    ("a large file when asked", local_of(MIB + 1), remote_of(MIB + 1, crc32=1), True, True, False),
    ("a file of exactly 1 MiB", local_of(MIB), remote_of(MIB, crc32=1), False, True, False),
    ("an SST is no exception", local_of(MIB, sst=SESSION_A), remote_of(MIB, crc32=1), False, True, False),
    ("group and other bits", local_of(mode=0o677), remote_of(), False, True, True),
    ("set-id and sticky bits", local_of(mode=0o7644), remote_of(), False, True, True),
    ("times never count", local_of(modified_at_ns=5, created_at_ms=5), remote_of(), False, True, True),
    ("0 bytes, dummy checksum 0", local_of(0, crc32=None), remote_of(0, crc32=0), False, True, True),
    ("unknown checksum", local_of(crc32=None), remote_of(), False, True, False),
    ("large file unread", local_of(MIB + 1, crc32=None), remote_of(MIB + 1), False, True, True),
]


@pytest.mark.parametrize("_rule,local,remote,large,owners,same", SAMZA, ids=[row[0] for row in SAMZA])
def test_file_is_compared_as_samza_compares_it(
    _rule: str, local: LocalFile, remote: FileIndex, large: bool, owners: bool, same: bool
) -> None:
    predicate = is_same_file_samza_v1(compare_large_file_checksums=large, compare_file_owners=owners)
    assert predicate(local, remote) is same


# what it shows, local, remote, same
OURS = [
    ("same content", local_file("f", SMALL), file_index("f", SMALL), True),
    ("same size, other content", local_file("f", OTHER), file_index("f", SMALL), False),
    ("another size", local_file("f", SMALL + b"x"), file_index("f", SMALL), False),
    ("hash not known", local_file("f", SMALL, identified=False), file_index("f", SMALL), False),
    ("both empty, nothing read", local_file("f", identified=False), file_index("f"), True),
    ("mode never counts", local_file("f", SMALL, mode=0o400), file_index("f", SMALL), True),
    ("owner and times never count", local_file("f", SMALL, owner="x", modified_at_ns=1), file_index("f", SMALL), True),
    (
        "SST of the same session and number, unread",
        local_file("1.sst", SMALL, sst=SESSION_A, identified=False),
        file_index("1.sst", SMALL, sst=SESSION_A),
        True,
    ),
    (
        "SST of another session, same number and size",
        local_file("1.sst", SMALL, sst=SESSION_B),
        file_index("1.sst", SMALL, sst=SESSION_A),
        False,
    ),
    (
        "SST of the same session, another number",
        local_file("1.sst", SMALL, sst=SstIdentity(SESSION_A.session_id, 18)),
        file_index("1.sst", SMALL, sst=SESSION_A),
        False,
    ),
    (
        "SST of the same session and number, another size",
        local_file("1.sst", SMALL + b"x", sst=SESSION_A),
        file_index("1.sst", SMALL, sst=SESSION_A),
        False,
    ),
    (
        "identity on the remote side only: the hash decides",
        local_file("1.sst", SMALL),
        file_index("1.sst", SMALL, sst=SESSION_A),
        True,
    ),
    (
        "identity on the local side only: the hash decides",
        local_file("1.sst", OTHER, sst=SESSION_A),
        file_index("1.sst", SMALL),
        False,
    ),
    (
        "identity on one side, no hash",
        local_file("1.sst", SMALL, sst=SESSION_A, identified=False),
        file_index("1.sst", SMALL),
        False,
    ),
]


@pytest.mark.parametrize("_shows,local,remote,same", OURS, ids=[row[0] for row in OURS])
def test_file_is_the_same_by_session_or_by_content(
    _shows: str, local: LocalFile, remote: FileIndex, same: bool
) -> None:
    """Design 0002, I1."""
    assert is_same_file(local, remote) is same
