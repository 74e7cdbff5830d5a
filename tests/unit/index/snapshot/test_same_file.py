"""When a file on disk is the file of a snapshot: the rule of design 0002, I1."""

import pytest

from index.snapshot.dir_diff import LocalFile, is_same_file
from index.snapshot.model import FileIndex, SstIdentity
from tests.unit.index.builders import file_index, local_file

SMALL = b"x" * 100
OTHER = b"y" * 100
SESSION_A = SstIdentity("RCQT39JY6E1U4N923P4Y", 17)
SESSION_B = SstIdentity("RCQT39JY6E1U4N923P4X", 17)


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
