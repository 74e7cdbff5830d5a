"""Going back in time on the command line: history, forks from a moment, and the keys of a snapshot."""

import json
import shlex
from pathlib import Path

import pytest
import rocksdict

from blobstore.opening import open_store
from blobstore.wrappers.forwarding import MeteredStore
from engine.cli.run import ExitCode
from engine.repository.repository import Repository
from engine.rocksdb.store import StoreWriter
from index.snapshot.model import Scope
from tests.integration.conftest import FIRST, SECOND, Shell, content


def test_history_reports_what_is_new_what_became_of_it_and_how_to_restore_it(two_commits: Shell) -> None:
    shell = two_commits
    shell.run("name", "1", "before-upgrade")
    shell.run("rewind", "1")
    shown = shell.result("history")
    assert [(e["number"], e["kind"], e["rewound_by"], e["new_files"], e["names"]) for e in shown["entries"]] == [
        (3, "rewind", None, 0, []),
        (2, "commit", 3, 3, []),
        (1, "commit", None, 4, ["before-upgrade"]),
    ]
    # 400,000 bytes of an SST were there already; CURRENT is in the index.
    assert (shown["entries"][1]["new_bytes"], shown["entries"][1]["retained_bytes"]) == (307_011, 400_000)
    for entry in shown["entries"]:
        shell.run("restore", f"target-{entry['number']}", *entry["restore_options"].split())
    assert content(shell.directory / "target-2") == SECOND
    text = shell.run("history").stdout
    assert "left behind by 3" in text
    assert "rewind to 1" in text
    assert "restore one: tidemark restore TARGET --number 3" in text


def test_history_since_a_moment_and_with_a_limit(two_commits: Shell) -> None:
    shell = two_commits
    newest = shell.result("list")["commits"][0]["committed_at"]
    since = shell.result("history", "--since", newest, "--no-sizes")
    assert [(e["number"], e["new_bytes"]) for e in since["entries"]] == [(2, None)]
    limited = shell.result("history", "--limit", "1")
    assert (len(limited["entries"]), limited["older_count"]) == (1, 1)
    assert "1 older record" in shell.run("history", "--limit", "1").stdout
    assert "no commits since" in shell.refused("history", "--since", "2100-01-01", code=7)["message"]
    assert shell.refused("history", "--job", "absent", code=7)["hint"] == "the repository has flights"


def test_a_damaged_record_is_reported_in_its_place(two_commits: Shell) -> None:
    shell = two_commits
    record = next(p for p in sorted((shell.directory / "repository").rglob("*1.commit*")) if p.is_file())
    record.write_bytes(b"no record")
    entries = shell.result("history")["entries"]
    assert [(e["number"], e["state"], e["restore_options"]) for e in entries] == [
        (2, "open", "--number 2"),
        (1, "damaged", ""),
    ]
    assert "DAMAGED" in shell.run("history").stdout


def test_a_name_saves_what_a_damaged_record_had(two_commits: Shell) -> None:
    shell = two_commits
    shell.run("name", "1", "golden")
    record = next(p for p in sorted((shell.directory / "repository").rglob("*1.commit*")) if p.is_file())
    record.write_bytes(b"no record")
    entry = shell.result("history")["entries"][1]
    assert (entry["state"], entry["names"], entry["version"]) == ("damaged", ["golden"], 8)
    shell.run("restore", "target", *entry["restore_options"].split())
    assert content(shell.directory / "target") == FIRST
    assert "DAMAGED, held by golden" in shell.run("history").stdout


def test_a_fork_from_a_moment_copies_no_byte(two_commits: Shell) -> None:
    shell = two_commits
    first = shell.result("list")["commits"][1]["committed_at"]
    blobs = sorted((shell.directory / "repository" / "blobs").rglob("*"))
    shown = shell.result("fork", f"@{first}", "yesterday")
    assert (shown["source_number"], shown["commit"]["version"]) == (1, 8)
    assert sorted((shell.directory / "repository" / "blobs").rglob("*")) == blobs


async def test_a_fork_puts_nothing_but_its_record_and_its_pin(two_commits: Shell) -> None:
    store = MeteredStore(open_store(two_commits.environment["TIDEMARK_REPOSITORY"]))
    async with await Repository.open(store) as repository:
        commit = await repository.find(Scope("flights"), version=8)
        store.meter.reset()
        await repository.fork(commit, Scope("yesterday"))
    # The pin, and its release; the record. No blob, no index.
    puts = {name: number for name, number in store.meter.requests.items() if name.startswith(("put", "get"))}
    assert puts.get("put", 0) <= 2
    assert puts["put_if_absent"] == 1
    assert store.meter.bytes_out < 10_000


@pytest.fixture
def keyed(shell: Shell) -> Shell:
    """A repository with two versions of a RocksDB of keys user-0 to user-4."""
    shell.run("init")
    with StoreWriter.open(shell.directory / "state") as store:
        for number in range(5):
            store.put(b"user-%d" % number, b"first")
        store.put(b"\x00\x1b[31m", b"\xff")
        store.checkpoint(shell.directory / "one")
        store.put(b"user-1", b"second")
        store.checkpoint(shell.directory / "two")
    shell.run("backup", "one")
    shell.run("backup", "two")
    return shell


def test_keys_of_a_snapshot(keyed: Shell) -> None:
    text = keyed.run("keys", "--values").stdout.splitlines()
    assert text[1:] == [
        "\\x00\\x1b[31m  \\xff",
        "user-0  first",
        "user-1  second",
        *(f"user-{n}  first" for n in (2, 3, 4)),
    ]
    shown = keyed.result("keys", "--version", "1", "--prefix", "user-1", "--values")
    assert [(k["key"], k["key_hex"], k["value"]) for k in shown["keys"]] == [("user-1", b"user-1".hex(), "first")]
    ranged = keyed.run("keys", "--from", "user-1", "--to", "user-4", "--limit", "2", "--count").stdout.splitlines()
    assert ranged[1:] == ["user-1", "user-2", "3 keys", "more: --from user-3"]
    assert keyed.run("keys", "--prefix", "0x001b", "--format", "hex").stdout.splitlines()[1:] == ["001b5b33316d"]
    lines = keyed.run("keys", "--format", "json", "--limit", "1").stdout.splitlines()
    assert [json.loads(line)["key_hex"] for line in lines] == ["001b5b33316d"]
    assert keyed.run("keys", "--limit", "0", "--count").stdout.splitlines()[-2:] == [
        "6 keys",
        "more: --from '\\x00\\x1b[31m'",
    ]
    assert not list(keyed.directory.rglob("tidemark-keys-*"))


@pytest.fixture
def families(shell: Shell) -> Shell:
    """A repository with a RocksDB of three column families of three keys each; the first key of `b: 2` is empty."""
    shell.run("init")
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(create_if_missing=True)
    db = rocksdict.Rdict(str(shell.directory / "state"), options)
    for name, keys in (("a", (b"k", b"l", b"zz")), ("b: 2", (b"", b"m", b"zz"))):
        family = db.create_column_family(name, rocksdict.Options(raw_mode=True))
        for key in keys:
            family[key] = b"v"
        family.close()
    for key in (b"a", b"b", b"c"):
        db[key] = b"v"
    db.close()
    shell.run("backup", "state")
    return shell


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_every_key_is_listed_when_the_hints_are_followed(families: Shell, limit: int) -> None:
    everything = [(k["family"], k["key"]) for k in families.result("keys")["keys"]]
    assert len(everything) == 9
    shown, hint = [], ""
    for page in range(-(-9 // limit)):
        words = ("keys", "--limit", str(limit), *shlex.split(hint.removeprefix("more: ")))
        view = families.result(*words)
        shown += [(k["family"], k["key"]) for k in view["keys"]]
        hint = families.run(*words).stdout.splitlines()[-1]
        is_last = len(shown) == 9
        assert hint.startswith("more: ") is not is_last, page
        assert [view[name] is None for name in ("next_key", "next_family", "resume")] == [is_last] * 3
    assert shown == everything


def test_keys_go_on_at_a_place_only(families: Shell) -> None:
    assert families.run("keys", "--limit", "3").stdout.splitlines()[-1] == "more: --resume 'b\\x3a 2:'"
    assert "not a place" in families.refused("keys", "--resume", "b", code=2)["message"]
    assert families.refused("keys", "--resume", "absent:", code=7)["hint"] == "it has a, b: 2, default"


def test_keys_that_cannot_be_browsed(keyed: Shell) -> None:
    assert keyed.refused("keys", "--family", "absent", code=7)["hint"] == "it has default"
    assert "not a key" in keyed.refused("keys", "--prefix", "\\q", code=2)["message"]
    backup = '{"kind":"spark-checkpoint","format":1,"queryId":"q","batch":1,"oldestBatch":1}'
    keyed.run("backup", str(keyed.directory / "one"), "--offsets", backup, "--job", "query")
    assert "tidemark_state" in keyed.refused("keys", "--job", "query", code=2)["hint"]


def test_what_is_no_rocksdb_says_how_to_look_at_it(two_commits: Shell) -> None:
    (Path(two_commits.directory) / "source" / "CURRENT").unlink()
    two_commits.run("backup", "source")
    refused = two_commits.refused("keys", code=7)
    assert "not a RocksDB directory" in refused["message"]
    assert "tidemark show --files" in refused["hint"]


def test_keys_are_looked_up_one_by_one_and_nothing_is_restored(families: Shell) -> None:
    key = families.result("keys", "--family", "default", "--limit", "1", "--values")["keys"][0]
    assert families.run("get", key["key"]).stdout == f"{key['value']}\n"
    assert families.run("get", key["key"], "--restore").stdout == f"{key['value']}\n"
    assert families.run("get", f"0x{key['key_hex']}", "--format", "hex").stdout == f"{key['value_hex']}\n"
    both = families.run("get", key["key"], key["key"]).stdout.splitlines()
    assert both == [f"{key['key']}  {key['value']}"] * 2
    shown = families.result("get", key["key"])
    assert shown["cost"]["restored_bytes"] == 0
    assert families.result("get", key["key"], "--restore")["cost"]["restored_bytes"] > 0
    partly = families.run("get", key["key"], "absent", code=ExitCode.PARTIAL)
    assert (partly.stdout, "has no key absent" in partly.stderr) == (f"{key['key']}  {key['value']}\n", True)
    refused = families.refused("get", "absent", code=ExitCode.NOT_FOUND)
    assert "has no key absent" in refused["message"]
    assert "tidemark keys" in refused["hint"]
    refused = families.refused("get", key["key"], "--family", "nix", code=ExitCode.NOT_FOUND)
    assert "no column family 'nix'" in refused["message"]
