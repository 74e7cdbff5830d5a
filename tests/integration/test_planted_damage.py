"""From a planted damage to a restored directory, by nothing but the hints that are printed (design 0006, M1 to M3)."""

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import engine.records.indexes as index_io
import engine.records.leases as pins
from blobstore.base import BlobStore
from engine.cli import tidemark
from engine.repository.repository import SyncRepository
from index.plan.commits import Commit
from index.snapshot.model import Scope
from tests.integration.conftest import FIRST, SECOND, Shell, content

NEWEST, OLDER = 2, 1
OF_HINT = re.compile(r"`(tidemark [a-z]+|--[a-z-]+)[^`]*`")


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.unlink()


def objects(shell: Shell, prefix: str) -> list[Path]:
    """What is below a prefix, the oldest first."""
    found = [path for path in (shell.directory / "repository" / prefix).rglob("*") if path.is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def own(shell: Shell, prefix: str, number: int, size_bytes: int = 0) -> Path:
    """The object that a commit has brought: its index, its record, or its blob of a size."""
    (found, *_) = [p for p in objects(shell, prefix) if not size_bytes or p.stat().st_size == size_bytes][number - 1 :]
    return found


PLACES: dict[str, Callable[[Shell, int], Path]] = {
    # FIRST brings 000001.sst, SECOND 000002.sst, each as a blob of its own.
    "blob": lambda shell, number: own(shell, "blobs", 1, {OLDER: 400_000, NEWEST: 300_000}[number]),
    # Small files of the first commit share a pack; the one that changed alone is a blob of the second.
    "pack": lambda shell, number: own(shell, "blobs", 1, {OLDER: 11_000, NEWEST: 7_000}[number]),
    "index": lambda shell, number: own(shell, "indexes", number),
    "record": lambda shell, number: own(shell, "log", number),
}
HARMS = [alter, cut, remove]
THIRD = {**SECOND, "000003.sst": b"3" * 200_000}


class Hints:
    """An operator who runs what the last answer advised, and nothing else."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.transcript: list[str] = []

    def run(self, *words: str) -> Result:
        result = CliRunner().invoke(tidemark, list(words), env=self.shell.environment)
        assert "Traceback" not in result.output
        self.transcript += [f"$ tidemark {' '.join(words)}", result.stdout, result.stderr, f"({result.exit_code})"]
        return result

    def restored(self) -> dict[str, bytes] | None:
        """What a restore brings back in the end; None: an honest end without it."""
        result = self.run("restore", "target")
        if result.exit_code == 0:
            return content(Path("target"))
        advised = set(OF_HINT.findall(result.stderr))
        assert advised, result.stderr
        if "tidemark discard" in advised:
            (key,) = re.findall(r"`tidemark discard (\S+)`", result.stderr)
            assert self.run("discard", key, "--yes").exit_code == 0
            assert self.run("restore", "target").exit_code == 0
            return content(Path("target"))
        if "--or-newest-complete" in advised:
            assert self.run("restore", "target", "--or-newest-complete").exit_code == 0
            return content(Path("target"))
        if "tidemark repair" not in advised and "tidemark verify" not in advised:
            return None
        shown = self.run("repair")
        if keys := re.findall(r"`tidemark discard (\S+)`", shown.stdout):
            assert self.run("discard", keys[0], "--yes").exit_code == 0
        elif "--from DIR" in shown.stdout:
            assert "no commit is whole" in shown.stdout
            assert self.run("repair", "--from", "source").exit_code == 3
        assert self.run("restore", "target").exit_code == 0, self.transcript
        return content(Path("target"))


@pytest.mark.parametrize("number", [NEWEST, OLDER], ids=["newest", "older"])
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("what", sorted(PLACES))
def test_a_whole_state_comes_back_by_the_hints_alone(
    two_commits: Shell, what: str, harm: Callable[[Path], None], number: int
) -> None:
    harm(PLACES[what](two_commits, number))
    hints = Hints(two_commits)
    came_back = hints.restored()
    assert came_back in (FIRST, SECOND), "\n".join(hints.transcript)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("what", ["blob", "index"])
def test_the_job_is_whole_again_by_what_repair_offers(
    two_commits: Shell, what: str, harm: Callable[[Path], None]
) -> None:
    shell = two_commits
    harm(PLACES[what](shell, NEWEST))
    shown = shell.run("repair", code=4)
    assert "--from DIR" in shown.stdout
    assert "--rewind: makes commit 1 (version 8" in shown.stdout
    offsets = ("--offsets", "2013-08") if what == "index" else ()
    repaired = shell.result("repair", "--from", "source", *offsets, code=3)
    assert (repaired["commit"]["number"], repaired["commit"]["offsets"]) == (3, "2013-08")
    assert repaired["left"] == [2]
    assert shell.result("repair", "--drop", "--yes")["dropped"] == [2]
    shell.run("restore", "target")
    assert content(Path("target")) == SECOND
    shell.grow_old()
    assert shell.result("collect", "--keep-last", "9")["deleted_count"] > 0
    assert "no damage" in shell.run("verify", "--level", "content").stdout


def test_without_a_local_directory_the_newest_whole_commit_is_the_newest_again(two_commits: Shell) -> None:
    shell = two_commits
    remove(PLACES["blob"](shell, NEWEST))
    assert shell.result("repair", "--rewind", "--drop", "--yes")["left"] == []
    assert shell.result("show")["commit"]["offsets"] == "2013-07"
    shell.run("restore", "target")
    assert content(Path("target")) == FIRST


def test_a_directory_of_another_state_does_not_get_the_offsets_of_the_commit(two_commits: Shell) -> None:
    shell = two_commits
    alter(PLACES["blob"](shell, NEWEST))
    source = shell.tree("source", {**SECOND, "000003.sst": b"3"})
    refused = shell.refused("repair", "--from", str(source), code=2)
    assert "--offsets" in refused["hint"]
    shown = shell.result("repair", "--from", str(source), "--offsets", "2013-09", code=3)
    assert shown["commit"]["offsets"] == "2013-09"


def test_a_directory_with_much_less_is_taken_only_on_request(two_commits: Shell) -> None:
    shell = two_commits
    alter(PLACES["blob"](shell, NEWEST))
    source = ("repair", "--from", str(shell.tree("source", {"000009.sst": b"9"})), "--offsets", "2013-09")
    assert "--shrink-max 100%" in shell.refused(*source, code=10)["hint"]
    assert shell.result(*source, "--shrink-max", "100%", code=3)["commit"]["offsets"] == "2013-09"


@pytest.mark.parametrize("way", [("--from", "source"), ("--rewind",)])
def test_without_a_yes_to_dropping_nothing_else_is_done(two_commits: Shell, way: tuple[str, ...]) -> None:
    shell = two_commits
    alter(PLACES["blob"](shell, NEWEST))
    assert "--yes" in shell.refused("repair", *way, "--drop", code=2)["hint"]
    assert shell.result("show")["commit"]["number"] == 2
    assert shell.result("repair", "--drop", code=4)["dropped"] == []


def test_what_is_whole_needs_no_repair_and_drop_asks_first(two_commits: Shell) -> None:
    shell = two_commits
    assert "nothing that a commit needs is damaged" in shell.run("repair").stdout
    alter(PLACES["index"](shell, OLDER))
    shell.run("repair", code=3)
    assert "--yes" in shell.refused("repair", "--drop", code=2)["hint"]
    assert shell.refused("repair", "--from", "source", "--rewind", code=2)["hint"] == "choose one of the two"
    assert shell.refused("repair", "--offsets", "2013-09", code=2)["message"].endswith("--offsets goes with --from")


# ---------------------------------------------------------------------- the base of a delta


@pytest.fixture
def chain(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A commit with an index of its own, then FIRST, SECOND and THIRD: each index a delta on the one before."""
    monkeypatch.setattr(index_io, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(index_io, "DELTA_GAIN_MIN", 1)
    shell.run("init", "--margin", "30m")
    for number, files in enumerate(({"000009.sst": b"9" * 1000}, FIRST, SECOND, THIRD)):
        # Small files of their own, so that a delta is smaller than the whole.
        own = {f"{min(number, 1)}/{i:02}": bytes([i]) * 40 for i in range(20)}
        how = ("--shrink-max", "100%", "--offsets", str(number))
        shell.run("backup", str(shell.tree("source", {**files, **own})), *how)
    whole, base, delta, newest = (path.stat().st_size for path in objects(shell, "indexes"))
    assert max(delta, newest) < base
    assert whole > newest
    return shell


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("damaged, commits, whole", [(2, "2, 3", 1), (3, "3", 2)], ids=["first", "middle"])
def test_a_damaged_base_of_the_newest_delta_leaves_what_is_older(
    chain: Shell, damaged: int, commits: str, whole: int, harm: Callable[[Path], None]
) -> None:
    harm(own(chain, "indexes", damaged))
    newest = content(chain.directory / "source")
    hints = Hints(chain)
    came_back = hints.restored()
    assert came_back is not None
    assert ("000001.sst" in came_back) == (whole == 2)
    assert "2 of 4" in hints.run("repair").stdout or damaged == 2
    # It is one object, however many indexes are deltas on it.
    stopped = chain.run("collect", "--keep-last", "9", code=4).stderr
    assert "1 object cannot be read" in stopped
    assert "`tidemark repair`" in stopped
    assert chain.result("repair", "--from", "source", "--offsets", "3", code=3)["newest_whole"] == whole
    dropped = chain.run("repair", "--drop", "--yes").stdout
    assert f"{commits}, 4: `tidemark collect`" in dropped
    hints.run("restore", "again")
    assert content(Path("again")) == newest
    chain.grow_old()
    chain.run("collect", "--keep-last", "9")
    assert "no damage" in chain.run("verify", "--level", "content").stdout


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_base_of_older_deltas_leaves_what_is_newer(
    chain: Shell, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(index_io, "WHOLE_BYTES_MAX", 2**20)
    chain.run("backup", str(chain.tree("source", FIRST)), "--offsets", "4", "--shrink-max", "100%")
    harm(own(chain, "indexes", 2))
    hints = Hints(chain)
    assert hints.restored() == FIRST
    answer = hints.run("repair")
    assert answer.exit_code == 3
    assert "--drop: closes commits 2, 3, 4 for ever" in answer.stdout
    assert "--from" not in answer.stdout
    assert "`--or-newest-complete`" in hints.run("restore", "older", "--number", "4").stderr
    assert hints.run("restore", "older", "--number", "4", "--or-newest-complete").exit_code == 0
    assert content(Path("older")) == FIRST


# ---------------------------------------------------------------------- names


@pytest.fixture
def named(two_commits: Shell) -> Shell:
    """Two commits, of which the older one has the name `keep`."""
    two_commits.run("name", "1", "keep")
    return two_commits


def key_of(shell: Shell, path: Path) -> str:
    return str(path.relative_to(shell.directory / "repository"))


@pytest.mark.parametrize("harm", [alter, cut])
def test_the_commit_of_a_damaged_name_is_had_and_named_again(named: Shell, harm: Callable[[Path], None]) -> None:
    path = own(named, "names", 1)
    harm(path)
    key, hints = key_of(named, path), Hints(named)
    discard = f"`tidemark discard {key}` gives"
    # What the name does not concern goes on.
    assert hints.restored() == SECOND
    assert hints.run("backup", "source").exit_code == 0
    # What it concerns says where the commits are, and how to get rid of it.
    for words in (("restore", "byname", "--name", "keep"), ("name", "1", "keep"), ("unname", "keep", "--yes")):
        refused = hints.run(*words)
        assert refused.exit_code == 4
        assert {"tidemark list", "tidemark discard"} <= set(OF_HINT.findall(refused.stderr))
        assert discard in refused.stderr
    listed = hints.run("list")
    assert listed.exit_code == 0
    assert f"left out: {key}" in listed.stdout
    assert hints.run("restore", "byname", "--number", "1").exit_code == 0
    assert content(Path("byname")) == FIRST
    assert discard in hints.run("verify").stdout
    assert discard in hints.run("repair").stdout
    stopped = hints.run("collect", "--keep-last", "9")
    assert stopped.exit_code == 4
    assert discard in stopped.stderr
    assert "the name 'keep' of flights is released" in hints.run("discard", key, "-n").stdout
    assert hints.run("discard", key, "--yes").exit_code == 0
    assert hints.run("name", "1", "keep").exit_code == 0
    assert hints.run("collect", "--keep-last", "1").exit_code == 0
    assert hints.run("restore", "again", "--name", "keep").exit_code == 0
    assert content(Path("again")) == FIRST


def test_a_name_that_is_gone_is_given_again(named: Shell) -> None:
    remove(own(named, "names", 1))
    hints = Hints(named)
    refused = hints.run("restore", "byname", "--name", "keep")
    assert refused.exit_code == 7
    assert OF_HINT.findall(refused.stderr) == ["tidemark list"]
    assert "2013-07" in hints.run("list").stdout
    assert hints.run("name", "1", "keep").exit_code == 0
    assert hints.run("restore", "byname", "--name", "keep").exit_code == 0
    assert content(Path("byname")) == FIRST


def test_what_only_a_damaged_name_held_is_not_deleted_before_it_is_given_up(named: Shell) -> None:
    named.grow_old()
    named.run("collect", "--keep-last", "1", "--no-keep-named")
    path = own(named, "names", 1)
    whole = path.read_bytes()
    alter(path)
    hints = Hints(named)
    assert hints.run("collect", "--keep-last", "1").exit_code == 4
    assert "older version of this object" in hints.run("restore", "byname", "--name", "keep").stderr
    path.write_bytes(whole)
    assert hints.run("restore", "byname", "--name", "keep").exit_code == 0
    assert content(Path("byname")) == FIRST


# ---------------------------------------------------------------------- pins


@pytest.fixture
def pin(two_commits: Shell) -> Iterator[Path]:
    """The live pin of a reader of the older commit."""
    for path in objects(two_commits, "pins"):
        path.unlink()
    with (
        SyncRepository.open(two_commits.environment["TIDEMARK_REPOSITORY"]) as repository,
        repository.pinned(repository.find(Scope("flights"), number=1)),
    ):
        (path,) = objects(two_commits, "pins")
        yield path


@pytest.mark.parametrize("harm", [alter, cut])
def test_a_damaged_live_pin_stops_collections_alone_and_they_name_it(
    two_commits: Shell, pin: Path, harm: Callable[[Path], None]
) -> None:
    harm(pin)
    hints = Hints(two_commits)
    discard = f"`tidemark discard {key_of(two_commits, pin)}` gives"
    assert hints.restored() == SECOND
    assert hints.run("restore", "older", "--number", "1").exit_code == 0
    assert hints.run("backup", "source").exit_code == 0
    stopped = hints.run("collect", "--keep-last", "1")
    assert stopped.exit_code == 4
    assert "nothing was deleted of all jobs" in stopped.stderr
    assert discard in stopped.stderr
    # Of one job alone, too: nobody knows whose the pin is.
    for words in (("verify",), ("verify", "--job", "flights"), ("repair",)):
        answer = hints.run(*words)
        assert answer.exit_code == 4
        assert discard in answer.stdout
    assert hints.run("discard", key_of(two_commits, pin), "--yes").exit_code == 0
    assert hints.run("collect", "--keep-last", "1").exit_code == 0


@pytest.mark.parametrize("harm", HARMS)
def test_a_pin_that_is_over_or_gone_concerns_nobody(
    two_commits: Shell, pin: Path, harm: Callable[[Path], None]
) -> None:
    harm(pin)
    if pin.exists():
        then_s = time.time() - 9 * 86_400
        os.utime(pin, (then_s, then_s))
    hints = Hints(two_commits)
    for words in (("restore", "target"), ("verify",), ("repair",), ("collect", "--keep-last", "9")):
        assert hints.run(*words).exit_code == 0
    assert not pin.exists()


@pytest.mark.parametrize("wanted", [(), ("--number", "1")], ids=["newest", "older"])
def test_a_restore_whose_pin_is_deleted_chooses_again_or_says_what_is_left(
    two_commits: Shell, monkeypatch: pytest.MonkeyPatch, wanted: tuple[str, ...]
) -> None:
    shell, check_open = two_commits, pins.check_open
    # Nothing of what was chosen is left: the index, which is read while the pin is written, is not enough.
    other = {name: data[::-1] + b"!" for name, data in THIRD.items()}
    shell.tree("source", other)

    async def then_lose_it(store: BlobStore, commit: Commit) -> None:
        await check_open(store, commit)
        monkeypatch.setattr(pins, "check_open", check_open)
        for path in objects(shell, "pins"):
            path.unlink()
        shell.run("backup", "source")
        shell.grow_old()
        shell.run("collect", "--keep-last", "1")

    monkeypatch.setattr(pins, "check_open", then_lose_it)
    hints = Hints(shell)
    restored = hints.run("restore", "target", *wanted)
    if wanted:
        # It is not damaged: it is gone, as retention wants it.
        assert restored.exit_code == 7
        assert OF_HINT.findall(restored.stderr) == ["tidemark list"]
        assert hints.run("restore", "target").exit_code == 0
    assert content(Path("target")) == other


# ---------------------------------------------------------------------- several, and several machines


def test_a_blob_an_index_a_name_and_a_record_at_once(named: Shell) -> None:
    shell = named
    shell.run("backup", str(shell.tree("source", THIRD)), "--offsets", "2013-09")
    shell.run("backup", "source", "--offsets", "2013-10")
    alter(own(shell, "blobs", 1, 200_000))
    remove(own(shell, "indexes", 2))
    alter(own(shell, "log", 3))
    hints = Hints(shell)
    assert hints.restored() == FIRST
    answer = hints.run("repair").stdout
    assert "2 of 3 commits are damaged" in answer
    (key,) = re.findall(r"`tidemark discard (\S+)` gives", answer)
    # `--drop` says itself what has to go first.
    sent = hints.run("repair", "--from", "source")
    assert sent.exit_code == 4
    assert f"`tidemark discard {key}` gives" in sent.stdout
    assert f"`tidemark discard {key}` first" in hints.run("repair", "--drop", "--yes").stderr
    assert hints.run("discard", key, "--yes").exit_code == 0
    assert "nothing is left to repair" in hints.run("repair", "--drop", "--yes").stdout
    assert hints.run("collect", "--keep-last", "9").exit_code == 0
    assert hints.run("restore", "again").exit_code == 0
    assert content(Path("again")) == THIRD
    assert hints.run("restore", "byname", "--name", "keep").exit_code == 0
    assert content(Path("byname")) == FIRST


def test_a_dropped_commit_that_a_name_holds_is_still_damaged(named: Shell) -> None:
    alter(own(named, "indexes", 1))
    hints = Hints(named)
    dropped = hints.run("repair", "--drop", "--yes")
    assert dropped.exit_code == 3
    assert "still damaged: name keep" in dropped.stdout
    assert "`tidemark unname keep`" in dropped.stdout
    assert hints.run("collect", "--keep-last", "9").exit_code == 4
    assert hints.run("unname", "keep").exit_code == 0
    assert hints.run("collect", "--keep-last", "9").exit_code == 0


@pytest.mark.parametrize("how", ["--from", "--rewind", "backup"])
def test_what_another_machine_found_is_mended_for_the_one_of_the_job(two_commits: Shell, how: str) -> None:
    """Which blobs are damaged a machine notes in its own cache: that of the job has not met the damage."""
    shell, elsewhere = two_commits, {"TIDEMARK_CACHE_DIR": str(two_commits.directory / "elsewhere")}
    alter(PLACES["blob"](shell, NEWEST))
    # The job does not know, and builds on what is damaged.
    source = str(shell.tree("source", THIRD))
    shell.run("backup", source, "--offsets", "2013-09")
    found = shell.run("verify", "--level", "content", code=4, **elsewhere).stdout
    assert "`tidemark repair --job JOB`, on any machine," in found
    assert "on any machine" in shell.run("restore", "target", code=4, **elsewhere).stderr
    answer = shell.run("repair", code=4, **elsewhere).stdout
    assert "on another one only after `tidemark repair` there" in answer
    if how == "--from":
        shell.run("repair", "--from", source, code=3, **elsewhere)
    elif how == "--rewind":
        shell.run("repair", "--rewind", code=3, **elsewhere)
    else:
        shell.run("repair", code=4)
    shell.run("backup", source, "--offsets", "2013-10")
    shell.run("restore", "target")
    assert content(Path("target")) == THIRD
    shell.run("repair", code=3)
