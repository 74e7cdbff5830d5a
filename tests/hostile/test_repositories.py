"""Whole repositories of an attacker's, at the command line: each is refused with what is wrong, and touches nothing.

The rules H1 to H9 are in design/architecture.md. Parsers by themselves are fuzzed (`tests/fuzz`); here is what
is behind them.
"""

import json
import shutil
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest

from index.snapshot.codec import KIND_COMMIT, KIND_INDEX
from index.snapshot.keys import BLOBS, INDEXES, upload_key
from index.snapshot.model import (
    BlobKey,
    Boundary,
    CommitPointer,
    DirIndex,
    FileMetadata,
    IndexReference,
    LineageItem,
    NameRecord,
    Pack,
    Pin,
    Scope,
    ScopeLayout,
    UniqueId,
    WriteId,
)
from tests.hostile.forger import SCOPE, SESSION, Forger, a_delta, a_file, an_index, in_blob, metadata, sealed

DAMAGED: Final = 4
# What can be made of a repository: what writes to this machine, what reads, and what deletes.
COLLECT: Final = ("collect", "--keep-last", "1")
READ: Final = (("restore", "target"), ("verify",), COLLECT)
ALL: Final = (*READ, ("restore", "target", "--all"), ("show", "--files"))

Attack = Callable[[Forger], object]
BLOB: Final = upload_key(BLOBS, SCOPE, SESSION, 7)
NAMES: Final = {
    "parent": "..",
    "itself": ".",
    "nothing": "",
    "absolute": "/etc/cron.d/x",
    "climbing": "../escaped",
    "below": "a/b",
    "backslash": "a\\..\\b",
    "nul": "a\0b",
    "too long": "x" * 256,
    "too long in bytes": "\N{SNOWMAN}" * 86,
    "a drive": "C:\\x",
}


def refused_everywhere(forger: Forger, attack: Attack, *, verbs: tuple[tuple[str, ...], ...] = READ) -> list[Any]:
    """Run each verb on an attacked repository: it is damaged, the error says where, and nothing changes (H1)."""
    attack(forger)
    before = forger.everything()
    failures = []
    for words in verbs:
        failures.append(refusal(forger, words))
        check_untouched(before, forger.everything())
        assert not forger.target.exists() or not any(path.is_file() for path in forger.target.rglob("*"))
    return failures


def refusal(forger: Forger, words: tuple[str, ...]) -> dict[str, Any]:
    """What a run says of damage: an error, or of verbs that go on with the rest, a report."""
    result = forger.shell.run(*words, "--json", code=DAMAGED)
    shown: dict[str, Any] = json.loads(result.stderr or result.stdout)
    if "error" in shown:
        assert shown["subject"], words
        assert shown["message"], words
        assert shown["hint"], words
    else:
        assert shown["verb"] == "verify" or any(store["failure"] for store in shown["stores"]), shown
    return shown


def check_untouched(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    """All that was there is still there; what may join it is a reader's pin, and a collection's evidence."""
    assert {name: after.get(name) for name in before} == before
    added = set(after) - set(before)
    assert all(name.startswith(("repository/pins/", "repository/audit/")) for name in added), added


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_name_that_is_no_component_is_written_nowhere(forger: Forger, name: str, kind: str) -> None:
    """H4: `UnsafeNameError`; the root may have no other name than none, and everything below it no such one."""
    directory = DirIndex("", (a_file(name),)) if kind == "file" else DirIndex("", (), (DirIndex(name, (a_file("f"),)),))
    verbs = ALL if name == ".." else READ
    failures = refused_everywhere(forger, lambda f: f.commit(an_index(dir=directory)), verbs=verbs)
    assert failures[0]["error"] == "UnsafeNameError"
    assert any("while reading indexes/" in cause for cause in failures[0]["causes"])


def test_unicode_tricks_are_names_like_others_and_never_steer_the_terminal(forger: Forger) -> None:
    """H4: what looks alike is distinguished by its bytes, and is spelled out where it is printed."""
    names = sorted(["a\u0308", "\u00e4", "A", "a", "CON", "aux.", "x\u202egpj.exe", "\u2024\u2024", "\uff0e\uff0e"])
    forger.commit(an_index(*map(a_file, names)))
    forger.shell.run("restore", "target")
    assert sorted(path.name for path in forger.target.iterdir()) == names
    said = forger.shell.run("show", "--files").stdout
    assert "\u202e" not in said
    assert "\\u202e" in said


def test_names_that_differ_in_case_alone_are_two_files(forger: Forger) -> None:
    forger.commit(an_index(a_file("CURRENT"), a_file("current")))
    forger.shell.run("restore", "target")
    assert sorted(path.name for path in forger.target.iterdir()) == ["CURRENT", "current"]


KEYS: Final = {
    "a climbing key": f"blobs/../../{SESSION}-000001",
    "an absolute key": "/etc/passwd",
    "the repository record": "repository",
    "an index": upload_key(INDEXES, SCOPE, SESSION, 7),
    "a commit record": "log/flights/00000000000000000001.commit",
    "another shard": BLOB[:6] + f"{(int(BLOB[6:8], 16) + 1) % 256:02x}" + BLOB[8:],
    "a url": "s3://other/blobs/00/j/x",
    "a hidden scope": f"blobs/00/.ttl/{SESSION}-000001",
    "a newline": BLOB + "\n",
    "not Unicode at all": "blobs/\udc80",
}


def _index_of_key(key: str) -> bytes:
    """A sealed index of a file in a blob of this key: its bytes stand in for others, as msgspec writes Unicode only."""
    raw = key.encode("utf-8", "surrogateescape")
    stand_in = b"?" * len(raw)
    payload = msgspec.msgpack.encode(an_index(in_blob("f", stand_in.decode())))
    assert payload.count(stand_in) == 1
    return sealed(KIND_INDEX, msgspec.Raw(payload.replace(stand_in, raw)))


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
def test_a_file_whose_blob_stands_elsewhere_is_not_fetched(forger: Forger, key: str) -> None:
    """H5: a key of an index is an upload in `blobs/` and nothing else, so no GET leaves the area of blobs."""
    refused_everywhere(forger, lambda f: f.commit(f.put_bytes(_index_of_key(key))))


def test_an_index_that_stands_elsewhere_is_not_fetched(forger: Forger) -> None:
    """H5, M16: the index of a store is an upload in `indexes/`."""
    bad = IndexReference(key=BlobKey("../../etc/passwd"), sha256=bytes(32), size_bytes=10)
    refused_everywhere(forger, lambda f: f.commit(bad))


def test_the_blob_of_another_job_is_read_and_compared_like_any_other(forger: Forger) -> None:
    """H5: a fork shares blobs, so another job's key is not a crime; it leads to bytes that the hash has to fit."""
    others = upload_key(BLOBS, Scope("secrets"), SESSION, 3)
    forger.put(others, b"secret")
    forger.commit(an_index(in_blob("f", others)))
    failure = forger.shell.refused("restore", "target", code=DAMAGED)
    assert "secret" not in str(failure).replace(others, "")
    assert not forger.target.exists()


SIZES: Final[dict[str, Attack]] = {
    "more bytes inline than there are": lambda f: f.commit(
        an_index(a_file("f", metadata=FileMetadata(1 << 40, 0o644, 1)))
    ),
    "a negative size": lambda f: f.commit(an_index(a_file("f", metadata=FileMetadata(-1, 0o644, 1)))),
    "sizes that overflow": lambda f: f.commit(
        an_index(
            *(in_blob(name, upload_key(BLOBS, SCOPE, SESSION, n), size_bytes=2**62) for n, name in enumerate("abc"))
        )
    ),
    "a run beyond its pack": lambda f: f.commit(
        an_index(in_blob("f", BLOB, offset=5, size_bytes=10), packs=(Pack(BLOB, 12),))
    ),
    "one blob with two sizes": lambda f: f.commit(
        an_index(in_blob("a", BLOB, size_bytes=3), in_blob("b", BLOB, size_bytes=4))
    ),
    "a mode that is none": lambda f: f.commit(an_index(a_file("f", metadata=FileMetadata(6, 0o200644, 1)))),
    "a hash of no length": lambda f: f.commit(an_index(a_file("f", blake3=b""))),
    "directories without end": lambda f: f.commit(an_index(dir=_nested(200))),
    "a file and a directory of one name": lambda f: f.commit(
        an_index(dir=DirIndex("", (a_file("x"),), (DirIndex("x"),)))
    ),
    "a file twice": lambda f: f.commit(an_index(a_file("x"), a_file("x"))),
}


def _nested(depth: int) -> DirIndex:
    found = DirIndex("d", (a_file("f"),))
    for _ in range(depth):
        found = DirIndex("d", (), (found,))
    return DirIndex("", (), (found,))


@pytest.mark.parametrize("attack", SIZES.values(), ids=SIZES.keys())
def test_a_claim_that_contradicts_itself_is_refused_before_it_is_believed(forger: Forger, attack: Attack) -> None:
    """H2: sizes, offsets, counts and modes."""
    refused_everywhere(forger, attack)


def test_a_time_that_no_file_system_has_is_a_typed_error(forger: Forger) -> None:
    """H2: the rules of an index let a time be any of 63 bits; a kernel may not."""
    for number, time_ns in enumerate((-(2**63), 2**63 - 1), start=1):
        forger.commit(an_index(a_file("f", metadata=FileMetadata(6, 0o644, time_ns))), number=number)
        result = forger.shell.run("restore", "target", "--replace", "--number", str(number), code=0)
        assert result.exit_code == 0
        forger.shell.run("show", "--files", str(number))


def test_what_is_read_of_a_blob_is_what_the_index_says_and_nothing_else(forger: Forger) -> None:
    """H2: the size bounds what is read however much there is, and the bytes have to fit the hash."""
    for data in (b"for", b"", b"FORGED", b"FORGED" * 1000):
        forger.put(BLOB, data)
        forger.commit(an_index(in_blob("f", BLOB)))
        failure = forger.shell.refused("restore", "target", code=DAMAGED)
        assert BLOB in str(failure)
        assert not forger.target.exists()
    forger.put(BLOB, b"forged" * 1000)
    forger.shell.run("restore", "target")
    assert (forger.target / "f").read_bytes() == b"forged"


def test_a_delta_that_stands_on_itself_ends(forger: Forger) -> None:
    """H6: nobody makes a hash that names itself, so the reference is a lie; and depths only ever count down."""
    lie = IndexReference(key=upload_key(INDEXES, SCOPE, SESSION, 1), sha256=bytes(32), size_bytes=400)
    refused_everywhere(forger, lambda f: f.commit(a_delta(lie, depth=1)))


@pytest.mark.parametrize("depths", [(1, 1), (2, 2), (16, 15, 14), (2, 1, 1), (17,), (0,), (-1,), (1, 2, 3)])
def test_a_chain_of_deltas_whose_depths_do_not_count_down_ends(forger: Forger, depths: tuple[int, ...]) -> None:
    """H6."""

    def attack(f: Forger) -> None:
        reference = f.put_index(an_index(a_file("f")))
        for depth in reversed(depths):
            reference = f.put_index(a_delta(reference, depth=depth))
        f.commit(reference)

    if depths == (1,):
        return
    refused_everywhere(forger, attack)


LINEAGES: Final = {
    "in a circle": (LineageItem(1, UniqueId("u-1")), LineageItem(1, UniqueId("u-1"))),
    "descending": (LineageItem(5, UniqueId("a")), LineageItem(4, UniqueId("b"))),
    "above itself": (LineageItem(9, UniqueId("a")),),
    "negative": (LineageItem(-1, UniqueId("a")),),
    "without end": tuple(LineageItem(n, UniqueId("a")) for n in range(5000)),
    "an id without end": (LineageItem(0, UniqueId("a" * 5000)),),
}


@pytest.mark.parametrize("lineage", LINEAGES.values(), ids=LINEAGES.keys())
def test_a_lineage_that_does_not_ascend_is_refused(forger: Forger, lineage: tuple[LineageItem, ...]) -> None:
    """H6, M13."""
    refused_everywhere(forger, lambda f: f.commit(an_index(a_file("f"), metadata=metadata(lineage=lineage))))


def _point(number: int) -> CommitPointer:
    return CommitPointer(number, WriteId(f"w-{number}"))


RECORDS: Final[dict[str, Attack]] = {
    "its own predecessor": lambda f: f.commit(an_index(a_file("f")), predecessor=_point(1)),
    "a predecessor that is newer": lambda f: f.commit(an_index(a_file("f")), predecessor=_point(9)),
    "a rewind to itself": lambda f: f.commit(an_index(a_file("f")), kind="rewind", source=_point(1)),
    "a rewind to nowhere": lambda f: f.commit(an_index(a_file("f")), kind="rewind"),
    "a fork of nobody": lambda f: f.commit(an_index(a_file("f")), kind="fork", source=_point(1)),
    "an unknown kind": lambda f: f.put_record({"scope": {"job": "flights"}, "kind": "x"}),
    "another job": lambda f: f.commit(an_index(a_file("f")), scope=Scope("other")),
    "a climbing job": lambda f: f.commit(an_index(a_file("f")), scope=Scope("../x\0")),
    "another number": lambda f: f.put_record(
        msgspec.structs.replace(f.commit(an_index(a_file("f"))), number=7),
        key="log/flights/00000000000000000001.commit",
    ),
    "number 0": lambda f: f.commit(an_index(a_file("f")), number=0),
    "a layout of nothing": lambda f: f.commit(an_index(a_file("f")), layout=ScopeLayout(tasks_count=-4)),
    "an index where a record is": lambda f: f.put(
        "log/flights/00000000000000000001.commit", sealed(KIND_INDEX, an_index(a_file("f")))
    ),
    "rubbish": lambda f: f.put("log/flights/00000000000000000001.commit", b"rubbish"),
    "nothing": lambda f: f.put("log/flights/00000000000000000001.commit", b""),
    "nests without end": lambda f: f.put(
        "log/flights/00000000000000000001.commit", _sealed_bytes(b"\x81\xa1x" + b"\x91" * 100_000 + b"\x90")
    ),
    "counts without end": lambda f: f.put(
        "log/flights/00000000000000000001.commit", _sealed_bytes(b"\x81\xa6stores\xdd\xff\xff\xff\xff")
    ),
}


def _sealed_bytes(payload: bytes) -> bytes:
    return sealed(KIND_COMMIT, msgspec.Raw(payload))


@pytest.mark.parametrize("attack", RECORDS.values(), ids=RECORDS.keys())
def test_a_record_that_contradicts_itself_is_refused(forger: Forger, attack: Attack) -> None:
    """H6 for the chain of commits, H1 for everything else; a collection that meets one deletes nothing."""
    forger.put(BLOB, b"precious")
    refused_everywhere(forger, attack)


def test_store_names_that_climb_make_no_directory(forger: Forger) -> None:
    """H4: task and store become directories where many stores are restored side by side."""
    for number, (task, store) in enumerate((("..", "default"), ("0", "../../x"), ("/", "/")), start=1):
        record = forger.commit(an_index(a_file("f"), metadata=metadata(task=task, store=store)), number=number)
        stores = tuple(msgspec.structs.replace(s, task=task, store=store) for s in record.stores)
        forger.put_record(msgspec.structs.replace(record, stores=stores))
        before = forger.everything()
        forger.shell.run("restore", "target", "--all", "--number", str(number))
        restored = {name for name in forger.everything() if name.startswith("target/")}
        assert len(restored) == 1
        assert all(".." not in name.split("/") for name in restored)
        check_untouched(before, {name: data for name, data in forger.everything().items() if name not in restored})
        shutil.rmtree(forger.target)


LEASES: Final[dict[str, Attack]] = {
    "a boundary that keeps what is newer": lambda f: f.put_boundary(Boundary(scope=SCOPE, number=1, kept=(_point(9),))),
    "a boundary that descends": lambda f: f.put_boundary(
        Boundary(scope=SCOPE, number=3, kept=(_point(2), _point(1))), number=3
    ),
    "a boundary of another job": lambda f: f.put_boundary(Boundary(scope=Scope("other"), number=1)),
    "a pin that is not a pin": lambda f: f.put_pin({"id": "../x"}),
    "a pin of another id": lambda f: f.put_pin(
        Pin(id="../../etc/passwd", scope=SCOPE, source=_point(1), duration_ms=1, purpose="x")
    ),
    "a name that climbs": lambda f: f.put_name(
        NameRecord(scope=SCOPE, name="a\0/../..", source=_point(0), version=1, committed_at_ms=1)
    ),
}


@pytest.mark.parametrize("attack", LEASES.values(), ids=LEASES.keys())
def test_a_collection_deletes_nothing_beside_what_it_cannot_read(forger: Forger, attack: Attack) -> None:
    """H1 and 0002, D9: names, pins and boundaries are roots, and a root that cannot be read may keep anything."""
    forger.put(BLOB, b"precious")
    forger.commit(an_index(a_file("f")))
    refused_everywhere(forger, attack, verbs=(COLLECT,))


def test_foreign_keys_in_the_log_are_shown_and_left_alone(forger: Forger) -> None:
    """H5: a key that the grammar would not make is none of ours (design 0002, D9)."""
    forger.commit(an_index(a_file("f")))
    forger.put("log/flights/1.commit", b"x")
    report = json.loads(forger.shell.run(*COLLECT, "--json").stdout)
    assert report["foreign"] == ["log/flights/1.commit"]
    assert (forger.shell.directory / "repository/log/flights/1.commit").read_bytes() == b"x"


def test_an_index_above_its_cap_is_not_fetched(forger: Forger) -> None:
    """H2: the size is in the reference, and is looked at before the first byte."""
    reference = forger.put_index(an_index(a_file("f")))
    refused_everywhere(forger, lambda f: f.commit(msgspec.structs.replace(reference, size_bytes=1 << 40)))
