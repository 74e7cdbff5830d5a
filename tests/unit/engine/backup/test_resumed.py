"""A backup that was broken off goes on: what was uploaded is not sent again (design 0002, U1 to U6)."""

import itertools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from typing_extensions import override

from blobstore.base import BytesBody, list_blobs
from blobstore.errors import AccessDeniedError, StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import MeteredStore
from engine.backup.backup import BackupOptions, BackupResult, journal_name
from engine.errors import FencedError, StaleResultError
from engine.local.digests import hash_content
from engine.records import journal as journals_module
from engine.records.journal import UploadJournal
from engine.records.repository import StoreAddress
from engine.repository.repository import Repository
from engine.runtime import Runtime
from engine.settings import TransferSettings
from index.snapshot.codec import encode_record
from index.snapshot.contents import new_blob_keys
from index.snapshot.keys import BLOBS, parse_upload_key
from index.snapshot.keys import REPOSITORY as KEY
from index.snapshot.model import Scope
from tests.doubles import InterposedStore
from tests.unit.engine.workbench import REPOSITORY, SETTINGS, open_descriptors, read_tree

SCOPE = Scope("job")
HOUR_MS = 3_600_000
# By size: in the index, in a pack, alone, and cut into three.
FILES = {
    "inline": b"inline",
    "packed-1": os.urandom(1500),
    "packed-2": os.urandom(900),
    **{f"{number:06}.sst": os.urandom(4000 + number) for number in range(6)},
    "cut": os.urandom(20_000),
}
SENT_BYTES = sum(map(len, FILES.values())) - len(FILES["inline"])
# One at a time, so that what is in flight is one blob.
ONE_BY_ONE = msgspec.structs.replace(SETTINGS, in_flight_max=1)
UPLOADS = 1 + 6 + 3
NAME = journal_name(StoreAddress(SCOPE))


class _Clock(Runtime):
    def __init__(self) -> None:
        self.ahead_ms = 0

    @override
    def local_now_ms(self) -> int:
        return super().local_now_ms() + self.ahead_ms


class _Machine:
    """One directory and its cache; each backup is by a new process."""

    def __init__(self, root: Path) -> None:
        self.inner = MemoryStore(clock=lambda: time.time_ns() // 1_000_000 + self.store_ahead_ms)
        self.store_ahead_ms = 0
        self.metered = MeteredStore(self.inner)
        self.store = InterposedStore(self.metered)
        self.root, self.state, self.clock = root, root / "state", _Clock()
        self.state.mkdir()
        for name, data in FILES.items():
            (self.state / name).write_bytes(data)

    def process(self, settings: TransferSettings = ONE_BY_ONE) -> Repository:
        return Repository(self.store, REPOSITORY, settings=settings, runtime=self.clock, cache_dir=self.root / "cache")

    async def backup(self, options: BackupOptions = BackupOptions()) -> tuple[Repository, BackupResult]:
        repository = self.process()
        return repository, await repository.backup(SCOPE, self.state, options=options)

    async def break_off(self, *, after: int) -> None:
        """Back up until the store has had this many uploads; the next one never comes to be."""
        fails = itertools.count(1)

        async def refuse() -> None:
            if next(fails) > after:
                raise StoreUnavailableError("injected", operation="put_if_absent")
            self.store.before("put_if_absent", BLOBS, refuse)

        self.store.before("put_if_absent", BLOBS, refuse)
        with pytest.raises(StoreUnavailableError):
            await self.backup()

    async def blobs(self) -> dict[str, int]:
        return {blob.key: blob.size_bytes async for blob in list_blobs(self.inner, BLOBS)}

    def journals(self) -> list[Path]:
        return [*(self.root / "cache").rglob("*.uploads")]


@pytest.fixture
async def machine(tmp_path: Path) -> _Machine:
    machine = _Machine(tmp_path)
    await machine.inner.put_if_absent(KEY, BytesBody(encode_record(REPOSITORY)))
    return machine


@pytest.mark.parametrize("after", range(1, UPLOADS))
async def test_every_byte_is_sent_once_wherever_it_was_broken_off(machine: _Machine, after: int) -> None:
    await machine.break_off(after=after)
    left = await machine.blobs()
    assert len(left) == after
    repository, result = await machine.backup()
    assert (result.stats.blobs_resumed, result.stats.bytes_resumed) == (after, sum(left.values()))
    assert result.stats.blobs == UPLOADS - after
    assert result.stats.bytes_uploaded + result.stats.bytes_resumed == SENT_BYTES
    assert sum((await machine.blobs()).values()) == SENT_BYTES
    commit = await repository.commit(SCOPE, [result])
    await repository.restore(commit, machine.root / "target")
    assert read_tree(machine.root / "target") == FILES


async def test_a_backup_that_is_broken_off_again_and_again_comes_to_its_end(machine: _Machine) -> None:
    for _ in range(UPLOADS - 1):
        await machine.break_off(after=1)
    _, result = await machine.backup()
    assert (result.stats.blobs, result.stats.blobs_resumed) == (1, UPLOADS - 1)
    counters = [parse_upload_key(key).counter for key in await machine.blobs()]
    assert len(set(counters)) == UPLOADS
    assert len({parse_upload_key(key).session for key in result.new_keys}) == 1


async def test_all_that_the_commit_needs_is_new_and_loses_its_ttl(machine: _Machine) -> None:
    await machine.break_off(after=4)
    repository, result = await machine.backup()
    index = await repository.read_index(result.reference.index)
    assert set(result.new_keys) == {*new_blob_keys(index), result.reference.index.key}
    await repository.commit(SCOPE, [result])
    ttls = {blob.key: blob.expires_at_ms async for blob in list_blobs(machine.inner, "")}
    assert not any(ttls[key] for key in result.new_keys)


async def test_the_lease_is_that_of_the_oldest_upload(machine: _Machine) -> None:
    await machine.break_off(after=1)
    [key] = await machine.blobs()
    _, result = await machine.backup()
    there = await machine.inner.stat(key)
    assert there is not None
    assert result.oldest_birth_ms == there.created_at_ms


async def test_only_bytes_that_are_still_there_are_used(machine: _Machine) -> None:
    await machine.break_off(after=UPLOADS - 1)
    (machine.state / "000003.sst").write_bytes(os.urandom(4003))
    repository, result = await machine.backup()
    assert result.stats.blobs == 2
    commit = await repository.commit(SCOPE, [result])
    await repository.restore(commit, machine.root / "target")
    assert read_tree(machine.root / "target") == read_tree(machine.state)


async def test_what_a_collection_has_taken_is_sent_again(machine: _Machine) -> None:
    await machine.break_off(after=5)
    gone, *_ = await machine.blobs()
    await machine.inner.delete([gone])
    _, result = await machine.backup()
    assert result.stats.blobs_resumed == 4
    assert gone not in result.new_keys


async def test_what_was_found_damaged_is_sent_again(machine: _Machine) -> None:
    await machine.break_off(after=5)
    damaged, *_ = await machine.blobs()
    machine.process().missing_blobs.note([damaged])
    _, result = await machine.backup()
    assert result.stats.blobs_resumed == 4
    assert damaged not in result.new_keys


@pytest.mark.parametrize("ahead_ms", [6 * HOUR_MS, -HOUR_MS])
async def test_what_is_older_than_a_quarter_of_its_lease_or_of_the_future_is_sent_again(
    machine: _Machine, ahead_ms: int
) -> None:
    await machine.break_off(after=5)
    machine.clock.ahead_ms = ahead_ms
    _, result = await machine.backup()
    assert result.stats.blobs_resumed == 0


async def test_a_backup_beside_one_that_runs_takes_nothing_of_it(machine: _Machine) -> None:
    await machine.break_off(after=5)
    held = UploadJournal(SCOPE, NAME, Runtime())
    await machine.process().opened.journals.open(held, machine.inner, REPOSITORY, 10, frozenset)
    try:
        assert held.goes_on
        _, result = await machine.backup()
    finally:
        held.close()
    assert result.stats.blobs_resumed == 0
    assert parse_upload_key(result.reference.index.key).session != held.session


async def test_another_store_takes_nothing(machine: _Machine) -> None:
    await machine.break_off(after=5)
    result = await machine.process().backup(SCOPE, machine.state, store="other")
    assert result.stats.blobs_resumed == 0


async def test_a_commit_ends_the_journal(machine: _Machine) -> None:
    await machine.break_off(after=5)
    repository, result = await machine.backup()
    assert len(machine.journals()) == 1
    await repository.commit(SCOPE, [result])
    assert machine.journals() == []


@pytest.mark.parametrize("ahead_ms, resumed", [(6 * HOUR_MS, 0), (5 * HOUR_MS, 5)])
async def test_the_clock_of_the_store_says_what_is_too_old(machine: _Machine, ahead_ms: int, resumed: int) -> None:
    await machine.break_off(after=5)
    machine.store_ahead_ms = ahead_ms
    _, result = await machine.backup()
    assert result.stats.blobs_resumed == resumed


@pytest.mark.parametrize("is_new", [False, True], ids=["fenced", "stale"])
async def test_what_was_uploaded_before_a_job_was_forgotten_is_sent_again(machine: _Machine, *, is_new: bool) -> None:
    repository, first = await machine.backup()
    await repository.commit(SCOPE, [first])
    (machine.state / "000003.sst").write_bytes(os.urandom(4003))
    _, result = await machine.backup()
    await machine.process().forget(SCOPE)
    with pytest.raises(StaleResultError if is_new else FencedError):
        await (machine.process() if is_new else repository).commit(SCOPE, [result])
    latest, again = await machine.backup()
    assert again.stats.blobs_resumed == 0
    await latest.commit(SCOPE, [again])


async def test_a_commit_that_another_writer_has_outrun_costs_no_upload(machine: _Machine) -> None:
    _, result = await machine.backup()
    elsewhere = Repository(machine.store, REPOSITORY, settings=ONE_BY_ONE)
    (machine.root / "other").mkdir()
    await elsewhere.commit(SCOPE, [await elsewhere.backup(SCOPE, machine.root / "other")])
    with pytest.raises(StaleResultError):
        await machine.process().commit(SCOPE, [result])
    latest, again = await machine.backup()
    assert (again.stats.blobs, again.stats.blobs_resumed) == (0, UPLOADS)
    await latest.commit(SCOPE, [again])


async def test_a_session_whose_commit_was_made_without_an_answer_is_over(machine: _Machine) -> None:
    repository, result = await machine.backup()
    [place] = machine.journals()
    journal = place.read_bytes()
    await repository.commit(SCOPE, [result])
    # As a process leaves it that is killed before it reads the answer.
    place.write_bytes(journal)
    (machine.state / "000003.sst").write_bytes(os.urandom(4003))
    _, second = await machine.backup()
    assert parse_upload_key(second.reference.index.key).session not in journal.decode()


@pytest.mark.parametrize(
    "change",
    [
        lambda _: b"",
        lambda _: b"\x00" * 100,
        lambda data: re.sub(rb'",(\d+),', lambda m: b'",%d,' % (int(m[1]) ^ 1), data),
        lambda data: data.replace(b"job", b"other"),
        lambda data: re.sub(rb'"(.)([^",]*=)",', rb'"\2\1",', data),
        lambda data: data.splitlines()[1],
    ],
    ids=["empty", "zeros", "counter", "store", "hash", "no notes"],
)
async def test_a_journal_that_cannot_be_read_costs_an_upload(
    machine: _Machine, change: Callable[[bytes], bytes]
) -> None:
    await machine.break_off(after=5)
    [journal] = machine.journals()
    journal.write_bytes(change(journal.read_bytes()))
    _, result = await machine.backup()
    assert result.stats.blobs_resumed == 0


def _exchange_counters(journal: bytes, _: bytes) -> bytes:
    return re.sub(rb'",([2-5]),', lambda found: b'",%d,' % (int(found[1]) ^ 1), journal)


def _put_second(journal: bytes, before: bytes) -> bytes:
    """As where locks exclude nobody: two attempts have written to one file."""
    return journal + before


def _put_other_store(journal: bytes, _: bytes) -> bytes:
    """As a file that was copied: the notes fit together, and are of another store."""
    sealed = [msgspec.json.decode(line, type=journals_module._Line) for line in journal.split(b"\n") if line]
    lines = [msgspec.structs.replace(line, store="other", check=b"").sealed() for line in sealed]
    return b"\n".join(map(msgspec.json.encode, lines))


@pytest.mark.parametrize(
    "change, tree, resumed",
    [(_exchange_counters, 1, 2), (_put_second, 0, 0), (_put_other_store, 1, 0)],
    ids=["altered", "mixed", "another store's"],
)
async def test_a_journal_that_is_wrong_makes_no_commit_of_wrong_bytes(
    machine: _Machine, change: Callable[[bytes, bytes], bytes], tree: int, resumed: int
) -> None:
    notes, trees, journal = [], [], Path()
    for name in FILES:
        (machine.state / name).unlink()
    for _ in range(2):
        # All are of one size, so that only the notes say which blob is which.
        for number in range(6):
            (machine.state / f"{number:06}.sst").write_bytes(os.urandom(4000))
        await machine.break_off(after=5)
        [journal] = machine.journals()
        notes.append(journal.read_bytes())
        trees.append(read_tree(machine.state))
        journal.unlink()
    journal.write_bytes(change(notes[1], notes[0]))
    for name, data in trees[tree].items():
        (machine.state / name).write_bytes(data)
    repository, result = await machine.backup()
    assert result.stats.blobs_resumed == resumed
    commit = await repository.commit(SCOPE, [result])
    await repository.restore(commit, machine.root / "target")
    assert read_tree(machine.root / "target") == read_tree(machine.state)


async def test_a_file_does_not_stand_for_a_pack_whatever_is_in_it(machine: _Machine) -> None:
    for name in FILES:
        (machine.state / name).unlink()
    # As many bytes as their hashes have, joined.
    small = {f"{number:03}": os.urandom(32) for number in range(20)}
    for name, data in small.items():
        (machine.state / name).write_bytes(data)
    settings = msgspec.structs.replace(ONE_BY_ONE, inline_bytes_max=0)
    plan = await machine.process(settings).plan_backup(SCOPE, machine.state)
    [pack] = plan.packs
    hashes = b"".join(hash_content(small["/".join(item.path)]) for item in pack.files)
    for name in small:
        (machine.state / name).unlink()
    (machine.state / "crafted").write_bytes(hashes)
    await machine.process(settings).backup(SCOPE, machine.state)
    (machine.state / "crafted").unlink()
    for name, data in small.items():
        (machine.state / name).write_bytes(data)
    repository = machine.process(settings)
    result = await repository.backup(SCOPE, machine.state)
    commit = await repository.commit(SCOPE, [result])
    await repository.restore(commit, machine.root / "target")
    assert read_tree(machine.root / "target") == small


async def test_a_line_that_was_cut_costs_the_note_alone(machine: _Machine) -> None:
    await machine.break_off(after=5)
    [journal] = machine.journals()
    journal.write_bytes(journal.read_bytes()[:-10])
    await machine.break_off(after=2)
    _, result = await machine.backup()
    assert result.stats.blobs_resumed == 6


@pytest.mark.parametrize("kind", ["others write", "hard link", "link", "pipe"])
async def test_a_journal_that_others_may_have_made_is_neither_read_nor_written(machine: _Machine, kind: str) -> None:
    await machine.break_off(after=5)
    [journal] = machine.journals()
    notes, precious = journal.read_bytes(), machine.root / "precious"
    precious.write_bytes(notes)
    journal.unlink()
    if kind == "others write":
        journal.write_bytes(notes)
        journal.chmod(0o666)
    elif kind == "pipe":
        os.mkfifo(journal)
    else:
        (journal.hardlink_to if kind == "hard link" else journal.symlink_to)(precious)
    await machine.break_off(after=2)
    assert precious.read_bytes() == notes
    assert journal.is_symlink() or not journal.exists()
    # A link stays, and costs the journal.
    _, result = await machine.backup()
    assert result.stats.blobs_resumed == 0
    assert len(machine.journals()) == 1


async def test_without_a_cache_nothing_is_noted(machine: _Machine) -> None:
    noted = []
    with mock.patch.object(UploadJournal, "open", lambda *arguments: noted.append(arguments)):
        await Repository(machine.store, REPOSITORY, settings=ONE_BY_ONE).backup(SCOPE, machine.state)
        assert noted == []
        await machine.backup()
    assert len(noted) == 1


async def test_a_session_of_which_the_base_has_blobs_is_over(machine: _Machine) -> None:
    """Its commit was made elsewhere, and another machine has built on it."""
    _, first = await machine.backup()
    elsewhere = Repository(machine.store, REPOSITORY, settings=ONE_BY_ONE)
    await elsewhere.commit(SCOPE, [first])
    (machine.state / "000003.sst").write_bytes(os.urandom(4003))
    await elsewhere.commit(SCOPE, [await elsewhere.backup(SCOPE, machine.state)])
    (machine.state / "000004.sst").write_bytes(os.urandom(4004))
    _, third = await machine.backup()
    index = await elsewhere.read_index(third.reference.index)
    assert index.session != parse_upload_key(first.reference.index.key).session
    assert set(third.new_keys) == {*new_blob_keys(index), third.reference.index.key}
    assert third.stats.blobs == 1


async def test_an_attempt_that_resumes_nothing_has_all_new_blobs_of_its_session(machine: _Machine) -> None:
    await machine.break_off(after=5)
    gone = await machine.blobs()
    await machine.inner.delete(list(gone))
    repository, result = await machine.backup()
    index = await repository.read_index(result.reference.index)
    assert set(result.new_keys) == {*new_blob_keys(index), result.reference.index.key}


async def test_all_of_it_sends_all_of_it_and_may_be_gone_on_with(machine: _Machine) -> None:
    await machine.break_off(after=5)
    _, result = await machine.backup(BackupOptions(base=None))
    assert result.stats.blobs == UPLOADS
    _, again = await machine.backup()
    assert again.stats.blobs_resumed == UPLOADS


async def test_where_the_base_is_lost_all_is_sent(machine: _Machine) -> None:
    repository, first = await machine.backup()
    await repository.commit(SCOPE, [first])
    (machine.state / "000003.sst").write_bytes(os.urandom(4003))
    await machine.break_off(after=0)
    await machine.inner.delete([first.reference.index.key])
    _, second = await machine.backup()
    assert (second.stats.blobs, second.stats.blobs_resumed) == (UPLOADS, 0)


async def test_a_store_that_says_nothing_of_an_earlier_upload_gets_it_again(machine: _Machine) -> None:
    await machine.break_off(after=5)

    async def refuse() -> None:
        machine.store.before("stat", BLOBS, refuse)
        raise AccessDeniedError("injected", operation="stat")

    machine.store.before("stat", BLOBS, refuse)
    _, result = await machine.backup()
    assert (result.stats.blobs, result.stats.blobs_resumed) == (UPLOADS, 0)


async def test_files_of_the_same_bytes_are_each_used_again(machine: _Machine) -> None:
    for number in range(6):
        (machine.state / f"{number:06}.sst").write_bytes(bytes(4000))
    await machine.break_off(after=UPLOADS - 1)
    _, result = await machine.backup()
    assert (result.stats.blobs, result.stats.blobs_resumed) == (1, UPLOADS - 1)


async def test_a_commit_leaves_the_journal_of_a_backup_that_runs(machine: _Machine) -> None:
    repository, result = await machine.backup()
    running = UploadJournal(SCOPE, NAME, Runtime())
    await machine.process().opened.journals.open(running, machine.inner, REPOSITORY, 10, frozenset)
    try:
        await repository.commit(SCOPE, [result])
        assert len(machine.journals()) == 1
    finally:
        running.close()


async def test_journals_that_no_commit_ends_are_removed_once_they_are_of_no_use(machine: _Machine) -> None:
    await machine.process().backup(SCOPE, machine.state, store="given up")
    [old] = machine.journals()
    await machine.backup()
    assert len(machine.journals()) == 2
    a_day_ago = time.time() - 24 * 3600
    os.utime(old, (a_day_ago, a_day_ago))
    await machine.backup()
    assert old not in machine.journals()
    assert len(machine.journals()) == 1


async def test_what_its_caller_knows_to_be_missing_is_sent_again(machine: _Machine) -> None:
    await machine.break_off(after=5)
    damaged, *_ = await machine.blobs()
    _, result = await machine.backup(BackupOptions(missing=frozenset({damaged})))
    assert result.stats.blobs_resumed == 4


async def test_a_session_ends_after_many_attempts(machine: _Machine) -> None:
    with mock.patch("engine.records.journal.ATTEMPTS_MAX", 3):
        sessions = []
        for _ in range(5):
            _, result = await machine.backup()
            sessions.append(parse_upload_key(result.reference.index.key).session)
    assert [len(set(sessions[:3])), len(set(sessions))] == [1, 2]


async def test_two_stores_whose_names_read_alike_have_two_journals(machine: _Machine) -> None:
    repository = machine.process()
    await repository.backup(SCOPE, machine.state, task="a/b", store="c")
    result = await repository.backup(SCOPE, machine.state, task="a", store="b/c")
    assert result.stats.blobs_resumed == 0
    assert len(machine.journals()) == 2


def test_a_journal_that_opens_after_it_was_closed_holds_nothing(tmp_path: Path) -> None:
    """Its task was cancelled, and its thread came to its end."""
    late = UploadJournal(SCOPE, NAME, Runtime())
    late.close()
    before = open_descriptors()
    late.open(tmp_path / "journal", HOUR_MS, 10, frozenset)
    assert open_descriptors() == before
