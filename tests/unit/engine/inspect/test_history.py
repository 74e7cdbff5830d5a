"""The history of a job: what each record brought, what became of it, and reading on past what is damaged."""

from blobstore.base import BytesBody
from blobstore.wrappers.forwarding import MeteredStore
from engine.inspect.history import History, State, format_offsets, read_history
from index.plan.commits import Retention
from index.snapshot.codec import encode_record
from index.snapshot.contents import SnapshotShare
from index.snapshot.keys import boundary_key, commit_key
from index.snapshot.model import Boundary, Scope
from index.spark.checkpoint import CheckpointBackup
from tests.unit.engine.conftest import JOB, World

OTHER = Scope("other")


def _states(history: History) -> list[tuple[int, State]]:
    return [(entry.number, entry.state) for entry in history.entries]


async def test_new_and_retained_are_what_a_backup_says(world: World) -> None:
    repository = await world.process()
    first = await world.backup(repository, "one")
    await repository.commit(JOB, [first])
    second = await world.backup(repository, "two")
    await repository.commit(JOB, [second])
    newest, oldest = (await repository.history(JOB)).entries
    assert oldest.share is not None
    assert (oldest.share.files_new, oldest.share.files_retained) == (4, 0)
    assert oldest.share.bytes_new == first.stats.bytes_total
    assert newest.share is not None
    assert (newest.share.files_new, newest.share.files_retained) == (3, 1)
    assert newest.share.bytes_retained == second.stats.bytes_retained == 8000
    assert newest.share.bytes_new == second.stats.bytes_added
    assert newest.share.bytes_uploaded == second.stats.bytes_uploaded + second.stats.index_bytes


async def test_a_store_that_is_carried_over_is_retained_whole(world: World) -> None:
    repository = await world.process()
    await repository.commit(JOB, [await world.backup(repository, "one"), await world.backup(repository, "a", task="1")])
    await repository.commit(JOB, [await world.backup(repository, "two")])
    newest = (await repository.history(JOB)).entries[0]
    assert newest.share is not None
    assert (newest.share.files_new, newest.share.files_retained) == (3, 5)


async def test_rewinds_and_forks_bring_nothing_and_say_what_they_left_behind(world: World) -> None:
    repository = await world.process()
    commits = await world.history(repository, "one", "two", "three")
    await repository.rewind(commits[0])
    await world.history(repository, "four")
    await repository.fork(commits[1], OTHER)
    history = await repository.history(JOB)
    assert [(e.number, e.rewound_by) for e in history.entries] == [(5, None), (4, None), (3, 4), (2, 4), (1, None)]
    for entry in (history.entries[1], (await repository.history(OTHER)).entries[0]):
        assert entry.share is not None
        assert (entry.share.files_new, entry.share.bytes_uploaded, entry.share.files_retained) == (0, 0, 4)


async def test_names_and_pins_stand_beside_their_commit_and_a_name_alone_holds_one(world: World) -> None:
    repository = await world.process()
    commits = await world.history(repository, "one", "two", "three")
    await repository.name(commits[0], "kept")
    await repository.name(commits[0], "also")
    await repository.collect(Retention(keep_last=1, keep_named=False), delete_share_max=1)
    async with repository.pinned(commits[2]):
        history = await repository.history(JOB)
    newest, named = history.entries
    assert (newest.number, newest.pins_count, newest.names) == (3, 1, ())
    assert (named.number, named.state, named.names, named.pins_count) == (1, State.NAMED, ("also", "kept"), 0)
    assert named.restores
    assert named.share is not None
    assert named.share.files_new == 4


async def test_a_closed_record_that_is_still_there_is_reported_and_not_looked_into(world: World) -> None:
    repository = await world.process()
    commits = await world.history(repository, "one", "two")
    boundary = Boundary(scope=JOB, number=2, kept=(commits[1].pointer,))
    await world.store.put_if_absent(boundary_key(JOB, 2), BytesBody(encode_record(boundary)))
    history = await repository.history(JOB)
    assert _states(history) == [(2, State.OPEN), (1, State.CLOSED)]
    assert history.entries[1].share is None
    assert not history.entries[1].restores


async def test_a_name_holds_what_a_closed_record_had(world: World) -> None:
    repository = await world.process()
    commits = await world.history(repository, "one", "two")
    await repository.name(commits[0], "golden")
    boundary = Boundary(scope=JOB, number=2, kept=(commits[1].pointer,))
    await world.store.put_if_absent(boundary_key(JOB, 2), BytesBody(encode_record(boundary)))
    closed = (await repository.history(JOB)).entries[1]
    assert (closed.state, closed.held_by, closed.restores) == (State.CLOSED, "golden", True)
    assert closed.share is not None


async def test_a_name_holds_what_a_damaged_record_had(world: World) -> None:
    repository = await world.process()
    commits = await world.history(repository, "one", "two", "three")
    for name in ("golden", "also"):
        await repository.name(commits[0], name)
    for number in (1, 2):
        await world.store.put(commit_key(JOB, number), BytesBody(b"no record"))
    history = await repository.history(JOB)
    assert _states(history) == [(3, State.OPEN), (2, State.DAMAGED), (1, State.DAMAGED)]
    held, lost = history.entries[2], history.entries[1]
    assert (held.restores, held.held_by, held.names) == (True, "also", ("also", "golden"))
    assert held.commit is not None
    assert held.commit.pointer == commits[0].pointer
    assert commit_key(JOB, 1) in held.problem
    assert held.share is not None
    assert (lost.restores, lost.held_by, lost.commit) == (False, "", None)
    await world.store.inner.delete([commits[0].record.stores[0].index.key])
    held = (await repository.history(JOB)).entries[2]
    assert commit_key(JOB, 1) in held.problem
    assert commits[0].record.stores[0].index.key in held.problem


async def test_a_name_of_a_record_that_is_not_listed_is_not_listed(world: World) -> None:
    repository = await world.process()
    commits = await world.history(repository, "one", "two")
    await repository.name(commits[0], "golden")
    history = await repository.history(JOB, entries_max=1)
    assert (_states(history), history.older_count) == ([(2, State.OPEN)], 1)


async def test_a_damaged_record_is_an_entry_and_the_others_are_reported(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    await world.store.put(commit_key(JOB, 2), BytesBody(b"no record"))
    history = await repository.history(JOB)
    assert _states(history) == [(3, State.OPEN), (2, State.DAMAGED), (1, State.OPEN)]
    assert commit_key(JOB, 2) in history.entries[1].problem
    assert history.entries[0].share is not None


async def test_a_missing_index_is_reported_with_its_commit(world: World) -> None:
    repository = await world.process()
    commits = await world.history(repository, "one", "two")
    await world.store.inner.delete([commits[0].record.stores[0].index.key])
    newest, oldest = (await repository.history(JOB)).entries
    assert newest.share is not None
    assert oldest.share is None
    assert commits[0].record.stores[0].index.key in oldest.problem


async def test_only_what_is_asked_for_is_read(world: World) -> None:
    repository = await world.process()
    commits = await world.history(repository, *map(str, range(6)))
    metered = MeteredStore(world.store)
    history = await read_history(metered, repository.record, JOB, entries_max=2, shares=False)
    assert (_states(history), history.older_count) == ([(6, State.OPEN), (5, State.OPEN)], 4)
    # The records and the boundary-free log, names and pins: pins are those of the backups' own readers, if any.
    records = metered.meter.requests["get"]
    metered.meter.reset()
    with_shares = await read_history(metered, repository.record, JOB, entries_max=2)
    assert metered.meter.requests["get"] == records + 2
    assert with_shares.entries[0].share is not None
    since = await read_history(metered, repository.record, JOB, since_ms=commits[3].committed_at_ms, shares=False)
    assert ([n for n, _ in _states(since)], since.older_count) == ([6, 5, 4], 3)


def test_offsets_of_a_backup_are_its_batch() -> None:
    assert format_offsets(CheckpointBackup(query_id="q", batch=12, oldest_batch=1).encode(), 10) == "Spark batch 12"
    assert format_offsets('{"kind":"spark-checkpoint","format":99}', 10) == '{"kind":"…'
    assert format_offsets("a\x1b" + "b" * 100, 4) == "a\\x1bb…"


def test_shares_add_up() -> None:
    one = SnapshotShare(files_new=1, bytes_new=2, files_retained=3, bytes_retained=4, bytes_uploaded=5)
    assert one.plus(one) == SnapshotShare(
        files_new=2, bytes_new=4, files_retained=6, bytes_retained=8, bytes_uploaded=10
    )
