"""`tidemark rescale` as people run it, with a module of their own beside them (design 0010, T2, T7)."""

from pathlib import Path

import pytest

from engine.repository.repository import SyncRepository
from engine.rocksdb.store import StoreReader, StoreWriter
from index.snapshot.model import Scope, ScopeLayout
from index.spark.task_keys import KEY_HASH, TaskKeys
from tests.integration.conftest import Shell

LAYOUT = ScopeLayout(tasks_count=4, key_hash=KEY_HASH, key_columns=("word string",))
WORDS = {b"word %d" % n: b"%d" % n for n in range(40)}
MODULE = """
def right(key):
    return [key.decode()]

def wrong(key):
    return [key.decode().upper()]
"""


@pytest.fixture
def job(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A job of four tasks, and the module `word_keys` in the directory."""
    monkeypatch.chdir(shell.directory)
    (shell.directory / "word_keys.py").write_text(MODULE)
    (shell.directory / "broken.py").write_text("def right(")
    shell.run("init")
    commit(shell, "flights")
    return shell


def commit(shell: Shell, job: str) -> None:
    with SyncRepository.open(shell.environment["TIDEMARK_REPOSITORY"]) as repository:
        results = []
        for task in range(4):
            captured = shell.directory / f"{job}-{task}"
            with StoreWriter.open(shell.directory / f"{job}-{task}-db") as store:
                for word, seen in WORDS.items():
                    if TaskKeys(LAYOUT).partition_of([word.decode()], 4) == task:
                        store.put(word, seen)
                store.checkpoint(captured)
            results.append(repository.backup(Scope(job), captured, task=str(task), store="state"))
        repository.commit(Scope(job), results, offsets="month 1", layout=LAYOUT)


def rows(shell: Shell, tasks: int) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for task in range(tasks):
        target = f"restored-{tasks}-{task}"
        shell.run("restore", target, "--task", str(task), "--store", "state")
        with StoreReader.open(Path(shell.directory, target)) as reader:
            found |= dict(reader.items())
    return found


def test_a_job_gets_another_number_of_tasks(job: Shell) -> None:
    planned = job.result("rescale", "flights", "--tasks", "2", "--key", "word_keys:right", "--dry-run")
    assert (planned["dry_run"], planned["number"], planned["rows"], planned["checked"]) == (True, None, 40, True)
    lines = job.run("rescale", "flights", "--tasks", "2", "--key", "word_keys:right").stdout.splitlines()
    assert lines[:2] == ["flights: tasks 4 → 2, stores 4 → 2", "40 rows, each in its task"]
    assert "4 SSTs taken over as they are" in lines[2]
    assert lines[-1].startswith("commit 2 of flights, version 1: 2 stores")
    assert job.result("list")["commits"][0]["offsets"] == "month 1"
    assert rows(job, 2) == WORDS
    done = job.result("rescale", "flights", "--tasks", "3", "--key", "state=word_keys:right")
    assert (done["number"], done["tasks_before"], done["tasks"], done["files_linked"]) == (3, 2, 3, 0)
    assert rows(job, 3) == WORDS
    merged = job.run("rescale", "flights", "--tasks", "1", "--unchecked").stdout
    assert "of which no key was hashed" in merged
    assert (
        "shows nothing of the key function"
        in job.run("rescale", "flights", "--tasks", "5", "--key", "word_keys:right", "-n").stdout
    )


@pytest.mark.parametrize(
    "words, code, reason",
    [
        (("--tasks", "2", "--key", "word_keys:wrong"), 4, "belongs in task"),
        (("--tasks", "2", "--key", "typo=word_keys:right", "--unchecked"), 2, "has no store typo"),
        (("--tasks", "2", "--key", "state=word_keys:right", "--key", "state=word_keys:wrong"), 2, "given twice"),
        (("--tasks", "2", "--key", "broken:right"), 2, "SyntaxError"),
        (("--tasks", "2"), 2, "there is no key function for state"),
        (("--tasks", "3", "--unchecked"), 2, "splits its stores"),
        (("--tasks", "4", "--key", "word_keys:right"), 2, "is not another number"),
        (("--tasks", "2", "--key", "other=word_keys:right"), 2, "has no store other"),
        (("--tasks", "2", "--key", "word_keys:absent"), 2, "cannot be imported"),
        (("--tasks", "2", "--key", "nothing_there:right"), 2, "cannot be imported"),
        (("--tasks", "2", "--key", "word_keys"), 2, "cannot be imported"),
        (
            ("--tasks", "2", "--key", "word_keys:right", "--key", "a=word_keys:right"),
            2,
            "for every store and once more",
        ),
        (("--tasks", "2", "--key", "word_keys:right", "--key", "word_keys:wrong"), 2, "for every store and once more"),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(
    job: Shell, words: tuple[str, ...], code: int, reason: str
) -> None:
    assert reason in job.refused("rescale", "flights", *words, code=code)["message"]
    assert len(job.result("list")["commits"]) == 1
    assert rows(job, 4) == WORDS


def test_a_job_that_is_not_there_is_named(job: Shell) -> None:
    assert (
        "no such job" in job.refused("rescale", "trains", "--tasks", "2", "--key", "word_keys:right", code=7)["message"]
    )
