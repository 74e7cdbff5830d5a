import multiprocessing
import os
import signal
import threading
from pathlib import Path

import msgspec
import pytest

from engine.errors import TargetError, UsageError
from engine.spark import claims as store_claims
from engine.spark.claims import READERS, ReadyStore, StoreClaims, StoreState
from engine.spark.store_task import state_of
from index.snapshot.model import BlobKey, IndexReference, Scope, StoreReference, UniqueId

RUN, OTHER_RUN = "a" * 20, "b" * 20
STATE = StoreState(7, "6f1c2f3e-0000-4000-8000-000000000007")
OLD = StoreState(6, "6f1c2f3e-0000-4000-8000-000000000006")
NEWER = StoreState(8, "6f1c2f3e-0000-4000-8000-000000000008")
TWIN = StoreState(7, "6f1c2f3e-0000-4000-8000-0000000000ff")


@pytest.fixture
def claims(tmp_path: Path) -> StoreClaims:
    return StoreClaims(tmp_path, repository_id="repo", scope=Scope("job"), task="3", store="state")


def make_ready(claims: StoreClaims, state: StoreState, run: str = RUN, content: str = "content") -> None:
    with claims.begin() as attempt:
        attempt.directory.mkdir()
        (attempt.directory / "CURRENT").write_text(content)
        attempt.finish(state, run)


def entries(claims: StoreClaims) -> list[str]:
    return sorted(entry.name for entry in claims.directory.iterdir())


@pytest.mark.parametrize(
    "state, run, name",
    [
        (STATE, RUN, f"ready-7-{RUN}-6f1c2f3e-0000-4000-8000-000000000007"),
        (StoreState(0, "a/b c"), OTHER_RUN, f"ready-0-{OTHER_RUN}-a~2Fb~20c"),
        (StoreState(2**62, "x-y-z"), RUN, f"ready-{2**62}-{RUN}-x-y-z"),
    ],
)
def test_the_name_of_a_finished_store_says_which_state_it_is(state: StoreState, run: str, name: str) -> None:
    assert ReadyStore(state, run).encode() == name
    assert ReadyStore.decode(name) == ReadyStore(state, run)


@pytest.mark.parametrize(
    "name", ["ready-7", f"ready-x-{RUN}-u", f"ready-7-{RUN}-", f"attempt-{RUN}", "ready-7-short-u", "lost+found"]
)
def test_other_names_are_no_finished_store(name: str) -> None:
    assert ReadyStore.decode(name) is None


def test_a_finished_store_is_claimed_with_its_content_and_its_name_is_gone(claims: StoreClaims) -> None:
    make_ready(claims, STATE)
    with claims.begin() as attempt:
        assert attempt.claim(STATE) == ReadyStore(STATE, RUN)
        assert (attempt.directory / "CURRENT").read_text() == "content"
        assert claims.ready() == ()


@pytest.mark.parametrize("wanted", [OLD, NEWER, TWIN])
def test_another_version_or_index_is_not_claimed(claims: StoreClaims, wanted: StoreState) -> None:
    make_ready(claims, STATE)
    with claims.begin() as attempt:
        assert attempt.claim(wanted) is None
    assert [ready.state for ready in claims.ready()] == [STATE]


def test_of_many_attempts_exactly_one_claims(claims: StoreClaims) -> None:
    make_ready(claims, STATE)
    start = threading.Barrier(8)
    won: list[bool] = []

    def race() -> None:
        with claims.begin() as attempt:
            start.wait()
            won.append(attempt.claim(STATE) is not None)
            start.wait()

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]
    assert entries(claims) == []


def test_an_attempt_that_does_not_finish_leaves_nothing(claims: StoreClaims) -> None:
    make_ready(claims, STATE)
    with claims.begin() as attempt:
        attempt.claim(STATE)
        attempt.checkpoint_directory.mkdir()
    assert entries(claims) == []


def test_two_attempts_that_finish_leave_both_states(claims: StoreClaims) -> None:
    make_ready(claims, STATE)
    make_ready(claims, TWIN)
    assert [ready.state for ready in claims.ready()] == sorted([STATE, TWIN])


def test_the_same_state_is_never_made_twice(claims: StoreClaims) -> None:
    make_ready(claims, STATE)
    with claims.begin() as attempt:
        attempt.directory.mkdir()
        (attempt.directory / "CURRENT").touch()
        with pytest.raises(UsageError):
            attempt.finish(STATE, RUN)
    assert [ready.state for ready in claims.ready()] == [STATE]


@pytest.mark.parametrize(
    "present, wanted, left",
    [
        # What the run starts from stays for a twin attempt that could still claim it; all else is of no use.
        ([(OLD, OTHER_RUN), (STATE, OTHER_RUN), (TWIN, OTHER_RUN)], STATE, [STATE]),
        # A twin of this very run has finished: the driver may commit its state.
        ([(NEWER, RUN)], STATE, [NEWER]),
        # A run that failed before its commit left a newer state behind: nobody will ever commit it.
        ([(NEWER, OTHER_RUN)], STATE, []),
        # After a rewind the newest states are the ones that nobody wants.
        ([(NEWER, OTHER_RUN), (STATE, OTHER_RUN), (OLD, OTHER_RUN)], OLD, [OLD]),
        # A first run starts from nothing.
        ([(OLD, OTHER_RUN), (STATE, RUN)], None, [STATE]),
        ([], STATE, []),
    ],
)
def test_states_that_nobody_will_want_are_removed(
    claims: StoreClaims, present: list[tuple[StoreState, str]], wanted: StoreState | None, left: list[StoreState]
) -> None:
    for state, run in present:
        make_ready(claims, state, run)
    with claims.begin() as attempt:
        assert attempt.remove_stale(wanted, RUN) == len(present) - len(left)
    assert [ready.state for ready in claims.ready()] == left
    assert len(entries(claims)) == len(left)


def test_failing_runs_do_not_pile_up_states(claims: StoreClaims) -> None:
    for number in range(5):
        with claims.begin() as attempt:
            run = f"{number:020x}"
            attempt.remove_stale(STATE, run)
            attempt.directory.mkdir()
            attempt.finish(StoreState(8, f"u{number}"), run)
    assert len(entries(claims)) == 1


def test_the_directory_of_a_living_attempt_stays(claims: StoreClaims) -> None:
    with claims.begin() as alive:
        alive.directory.mkdir()
        with claims.begin():
            assert claims.remove_dead_attempts() == 0
        assert alive.directory.exists()


def hold_a_directory(claims: StoreClaims, held: "multiprocessing.synchronize.Event") -> None:
    attempt = claims.begin()
    attempt.claim(STATE)
    held.set()
    threading.Event().wait()


def test_the_directory_of_a_killed_process_is_removed_by_the_next_attempt(claims: StoreClaims) -> None:
    make_ready(claims, STATE)
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    process = context.Process(target=hold_a_directory, args=(claims, held))
    process.start()
    assert held.wait(30)
    assert claims.remove_dead_attempts() == 0
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with claims.begin() as attempt:
        assert claims.remove_dead_attempts() == 1
        assert attempt.claim(STATE) is None
    assert entries(claims) == []


def test_a_directory_that_never_got_its_lock_is_removed(claims: StoreClaims) -> None:
    claims.directory.mkdir(parents=True)
    (claims.directory / f"attempt-{RUN}" / "db").mkdir(parents=True)
    assert claims.remove_dead_attempts() == 1
    assert entries(claims) == []


def test_a_new_directory_that_is_taken_for_a_dead_one_is_made_again(
    claims: StoreClaims, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = store_claims._try_lock
    stolen: list[Path] = []

    def cleaned_away_first(directory: Path) -> int | None:
        if not stolen:
            stolen.append(directory)
            assert StoreClaims.remove_dead_attempts(claims) == 1
        return lock(directory)

    monkeypatch.setattr(store_claims, "_try_lock", cleaned_away_first)
    with claims.begin() as attempt:
        attempt.directory.mkdir()
        assert len(entries(claims)) == 1
        assert entries(claims) != [stolen[0].name]


def test_a_local_root_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    claims = StoreClaims(tmp_path / "file", repository_id="r", scope=Scope("j"), task="0", store="s")
    with pytest.raises(TargetError):
        claims.begin()


def test_a_store_that_was_only_read_goes_back_under_its_name(claims: StoreClaims) -> None:
    make_ready(claims, STATE)
    with claims.begin() as attempt:
        ready = attempt.claim(STATE)
        assert ready is not None
        attempt.give_back(ready)
    assert claims.ready() == (ReadyStore(STATE, RUN),)


def test_of_two_readers_of_one_state_one_gives_it_back(claims: StoreClaims) -> None:
    with claims.begin() as first, claims.begin() as second:
        for attempt, run in ((first, RUN), (second, OTHER_RUN)):
            attempt.directory.mkdir()
            attempt.give_back(ReadyStore(STATE, run))
    assert claims.ready() == (ReadyStore(STATE, RUN),)


def test_names_with_any_character_stay_inside_the_local_root(tmp_path: Path) -> None:
    claims = StoreClaims(tmp_path, repository_id="../r", scope=Scope("a/b"), task="..", store=".x")
    assert claims.directory.resolve().is_relative_to(tmp_path.resolve())
    assert len(claims.directory.relative_to(tmp_path).parts) == 4


def test_what_cannot_be_given_back_is_no_error(claims: StoreClaims, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two readers of one state both find no other, and both put theirs back."""
    state = ReadyStore(StoreState(1, "u"), READERS)
    with claims.begin() as one, claims.begin() as two:
        for attempt in (one, two):
            attempt.directory.mkdir()
            (attempt.directory / "f").write_text("1")
        with monkeypatch.context() as patched:
            patched.setattr(claims, "ready", tuple)
            one.give_back(state)
            two.give_back(state)
    assert claims.ready() == (state,)


def test_a_foreign_name_is_passed_over(claims: StoreClaims) -> None:
    with claims.begin():
        (claims.directory / f"ready-1-{'a' * 20}-%zz").mkdir()
        assert claims.ready() == ()


def test_readers_keep_one_state(claims: StoreClaims) -> None:
    states = [StoreState(version, f"u{version}") for version in range(1, 5)]
    for state in states:
        with claims.begin() as attempt:
            attempt.remove_read(state)
            attempt.directory.mkdir()
            attempt.give_back(ReadyStore(state, READERS))
    assert [ready.state for ready in claims.ready()] == states[-1:]


def test_two_snapshots_of_one_unique_id_are_two_states() -> None:
    first = StoreReference(
        task="0",
        store="state",
        version=7,
        unique_id=UniqueId("v7"),
        index=IndexReference(key=BlobKey("indexes/x"), sha256=bytes(32), size_bytes=1),
        number=1,
        files_count=0,
        size_bytes=0,
    )
    second = msgspec.structs.replace(first, index=msgspec.structs.replace(first.index, sha256=b"\1" * 32))
    assert state_of(first) != state_of(second)
