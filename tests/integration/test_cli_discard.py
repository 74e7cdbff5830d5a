"""Damaged records at the command line: named by `verify`, kept apart by `collect`, removed by `discard`."""

from pathlib import Path

import pytest

from tests.integration.conftest import Shell

KEY = "log/flights/00000000000000000001.commit"


def test_a_damaged_record_is_named_and_discarded(two_commits: Shell) -> None:
    place = Path(two_commits.environment["TIDEMARK_REPOSITORY"].removeprefix("file://")) / KEY
    whole = place.read_bytes()
    place.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    shown = two_commits.result("verify", code=4)
    assert [(p["kind"], p["key"]) for p in shown["problems"]] == [("unreadable", KEY)]
    assert [c["number"] for c in two_commits.result("list")["commits"]] == [2]
    planned = two_commits.result("collect", "-n", "--keep-last", "1", code=4)
    assert (planned["damaged"], planned["protected"]) == (True, ["*"])
    refused = two_commits.refused("collect", "--keep-last", "1", code=4)
    assert KEY in refused["message"]
    assert "discard" in refused["hint"]
    assert two_commits.refused("discard", KEY, code=2)["hint"] == "say --yes to do it"
    assert two_commits.result("discard", KEY, "-n")["boundary_number"] == 1
    assert place.is_file()
    assert "is lost" in two_commits.run("discard", KEY, "--yes").stdout
    assert not place.is_file()
    assert not two_commits.result("verify")["damaged"]
    two_commits.run("collect", "--keep-last", "1")


@pytest.mark.parametrize("key", ["../repository", "/etc/passwd", "", "names/"])
def test_what_is_no_key_is_no_fault_of_tidemark(two_commits: Shell, key: str) -> None:
    assert "not a key" in two_commits.refused("discard", key, "--yes", code=2)["message"]
