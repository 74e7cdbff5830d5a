"""The real stack on a real S3 server that has, lists, deletes or lets expire what it should not (rows 15 to 19).

Each test names its row in the table of `tests/integration/s3_fault_bench.py`.
"""

import asyncio

import msgspec
import pytest

from blobstore.base import Created
from blobstore.errors import StoreError, StoreUnavailableError
from blobstore.s3.settings import PROFILE_KEY, StoreProfile, encode_profile
from engine.errors import CommitUnknownError, DamagedError, EngineError, LeaseExpiredError, UnsafeStoreError
from engine.inspect.verify import ProblemKind
from engine.repository.repository import Repository
from index.snapshot.keys import commit_key
from tests.fault_rules import Answer, Fault, Hang, Reply, Rule, Stage, lose_answer, s3_error, truncated
from tests.integration.s3_fault_bench import (
    BLOB,
    INDEX,
    JOB,
    PREFIX,
    RETRY,
    S3,
    Bench,
    body,
    created_hours_ago,
    delete_error,
    list_with,
    list_without_contents,
    lists_of,
)
from tests.unit.engine.conftest import text_tree
from tests.unit.engine.workbench import read_tree

pytestmark = pytest.mark.s3


# --- 15: something is not there ---


async def test_row_15_a_blob_that_is_missing_is_named_with_its_file(bench: Bench) -> None:
    commit = await bench.commit(await bench.repository(), "one")
    bench.strike(s3_error(404, "NoSuchKey"), "GetObject", key=BLOB, times=None)
    repository, target = await Repository.open(bench.store()), bench.target()
    with pytest.raises(DamagedError) as caught:
        await repository.restore(commit, target)
    assert caught.value.subject.startswith("blobs/")
    assert any(name in str(caught.value) for name in text_tree("one"))
    assert not target.exists()


async def test_row_15_an_unprotected_reader_that_was_overtaken_takes_the_newer_commit(bench: Bench) -> None:
    repository = await bench.repository()
    await bench.commit(repository, "one")
    writer = await Repository.open(bench.direct())
    # A reader who may not write has no pin, so that a collection can take the commit from under it.
    bench.strike(s3_error(403, "AccessDenied"), "PutObject", key="/pins/", times=None)
    overtaken = asyncio.Event()
    bench.strike(Hang(at=Stage.REQUEST, until=overtaken), "GetObject", key=INDEX)
    probe = bench.store(
        retry=msgspec.structs.replace(RETRY, deadline_s=60), s3=msgspec.structs.replace(S3, read_timeout_s=60)
    )
    target = bench.target()
    reading = asyncio.create_task((await Repository.open(probe)).find_and_restore(JOB, target))
    while not bench.proxy.of("GetObject", key=INDEX):  # noqa: ASYNC110 - it is another's request that is waited for
        await asyncio.sleep(0.01)
    await bench.commit(writer, "two")
    await bench.collect(writer)
    overtaken.set()
    restored = await reading
    assert not restored.pinned
    assert read_tree(target) == text_tree("two")


# --- 16: lists that cannot be trusted ---

LISTS = {
    "repeats a key": list_with(lambda c: c + c[-1:]),
    "goes backwards": list_with(lambda c: c[::-1]),
    "claims more for ever": list_with(lambda c: c, truncated=True),
    "is empty and claims more": list_with(lambda _: [], truncated=True),
    "is cut off": truncated(200),
}


@pytest.mark.parametrize("prefix", ["blobs/", "log/"])
@pytest.mark.parametrize("fault", LISTS.values(), ids=LISTS)
async def test_row_16_a_collector_that_sees_a_broken_list_deletes_nothing(
    bench: Bench, fault: Fault, prefix: str
) -> None:
    repository = await bench.repository()
    for text in ("one", "two", "three"):
        await bench.commit(repository, text)
    bench.proxy.add(Rule(fault=fault, when=lists_of(prefix), times=None))
    with pytest.raises((StoreError, EngineError)):
        await bench.collect(repository)
    assert bench.proxy.of("DeleteObjects", "DeleteObject") == ()
    bench.proxy.clear()
    assert not (await repository.verify()).damaged
    await bench.check_restores("three")


@pytest.mark.parametrize("prefix", ["blobs/", "log/"])
async def test_row_16_an_error_on_a_later_page_deletes_nothing(bench: Bench, prefix: str) -> None:
    repository = await bench.repository()
    for text in ("one", "two", "three"):
        await bench.commit(repository, text)
    bench.proxy.add(Rule(fault=s3_error(500, "InternalError"), when=lists_of(prefix, later=True), times=None))
    bench.proxy.add(Rule(fault=list_with(lambda c: c[:1], truncated=True), when=lists_of(prefix), times=None))
    with pytest.raises(StoreUnavailableError):
        await bench.collect(repository)
    assert bench.proxy.of("DeleteObjects", "DeleteObject") == ()


@pytest.mark.parametrize("gap", ["first", "middle", "last"])
@pytest.mark.parametrize("prefix", ["blobs/", "indexes/", "log/"])
async def test_row_16_a_list_that_leaves_out_a_key_costs_no_commit_anything(
    bench: Bench, prefix: str, gap: str
) -> None:
    repository = await bench.repository()
    for text in ("one", "two", "three"):
        await bench.commit(repository, text)

    def leave_out(contents: list[bytes]) -> list[bytes]:
        at = {"first": 0, "middle": len(contents) // 2, "last": len(contents) - 1}[gap]
        return contents[:at] + contents[at + 1 :]

    bench.proxy.add(Rule(fault=list_with(leave_out), when=lists_of(prefix)))
    try:
        await bench.collect(repository)
    except UnsafeStoreError:
        assert bench.proxy.of("DeleteObjects") == ()
    bench.proxy.clear()
    assert not (await repository.verify()).damaged
    await bench.check_restores("three")


# --- 17: stale answers ---


async def test_row_17_a_look_that_is_stale_makes_no_conflict_of_an_own_create(bench: Bench) -> None:
    bench.strike(lose_answer(), "PutObject")
    bench.strike(s3_error(404, "NoSuchKey"), "HeadObject", times=3)
    assert isinstance(await bench.store().put_if_absent("key", body(10)), Created)


async def test_row_17_a_commit_that_the_next_list_does_not_show_is_not_acknowledged(bench: Bench) -> None:
    repository = await bench.repository()
    result = await bench.backup(repository, "one")
    bench.proxy.add(Rule(fault=list_without_contents(), when=lists_of("log/"), times=None))
    with pytest.raises((UnsafeStoreError, CommitUnknownError)):
        await repository.commit(JOB, [result])
    assert bench.proxy.of("DeleteObjects", "DeleteObject") == ()
    bench.proxy.clear()
    assert (await repository.commit(JOB, [result])).pointer.number == 1
    assert len(await repository.commits(JOB)) == 1


async def test_row_17_on_a_store_that_is_known_to_have_stale_lists_nothing_is_collected(bench: Bench) -> None:
    weak = StoreProfile(
        atomic_create=True,
        consistent_lists=False,
        tags=True,
        conditional_multipart=False,
        probed_at_ms=0,
        tidemark="test",
    )
    repository = await bench.repository()
    await bench.commit(repository, "one")
    bench.plant(PROFILE_KEY, encode_profile(weak))
    bench.proxy.clear()
    with pytest.raises(UnsafeStoreError):
        await bench.collect(await bench.repository())
    assert bench.proxy.of("DeleteObjects", "DeleteObject") == ()


# --- 18: deletes that happen in part ---


async def test_row_18_what_a_batch_did_not_delete_is_reported_and_deleted_by_the_next(bench: Bench) -> None:
    repository = await bench.repository()
    for text in ("one", "two", "three"):
        await bench.commit(repository, text)
    key = commit_key(JOB, 1)
    record = bench.stored(key)
    bench.strike(delete_error(PREFIX + key), "DeleteObjects")
    report = await bench.collect(repository)
    # The server has deleted it all the same; let it be as it says.
    bench.plant(key, record)
    assert key in report.failed
    # Records go first, and what they lead to goes only after them (design 0002, D1).
    assert any(failed.startswith("blobs/") for failed in report.failed)
    assert not (await repository.verify()).damaged
    again = await bench.collect(repository)
    assert again.failed == ()
    assert set(report.failed) <= {d.key for d in again.deletes}
    assert (await bench.collect(repository)).deletes == ()
    await bench.check_restores("three")


async def test_row_18_a_batch_that_is_done_and_answered_by_an_error_is_done_again(bench: Bench) -> None:
    repository = await bench.repository()
    for text in ("one", "two"):
        await bench.commit(repository, text)
    bench.strike(lose_answer(), "DeleteObjects", times=2)
    report = await bench.collect(repository)
    assert report.failed == ()
    assert (await bench.collect(repository)).deletes == ()


# --- 19: TTLs that end early, or do not end ---


async def test_row_19_a_tag_removal_that_is_lost_is_seen_and_healed(bench: Bench) -> None:
    repository = await bench.repository()
    bench.strike(Reply(answer=Answer(status=200)), "PutObjectTagging", times=None)
    commit = await bench.commit(repository, "one")
    report = await repository.verify()
    assert {p.kind for p in report.problems} == {ProblemKind.AT_RISK}
    assert len(report.problems) == len(bench.proxy.of("PutObjectTagging"))
    assert not report.damaged
    bench.proxy.clear()
    await repository.verify(heal=True)
    assert not (await repository.verify([commit])).problems


async def test_row_19_a_tag_removal_whose_answer_is_lost_is_done_again(bench: Bench) -> None:
    repository = await bench.repository()
    bench.strike(lose_answer(), "PutObjectTagging", times=2)
    assert (await bench.commit(repository, "one")).settled
    assert not (await repository.verify()).problems


async def test_row_19_a_commit_of_uploads_that_are_about_to_expire_is_not_acknowledged(bench: Bench) -> None:
    repository = await bench.repository()
    bench.strike(created_hours_ago(23.5), "PutObject", key=BLOB, times=None)
    result = await bench.backup(repository, "one")
    with pytest.raises(LeaseExpiredError):
        await repository.commit(JOB, [result])
    bench.proxy.clear()
    # The way out that the error names.
    again = await bench.backup(repository, "one")
    assert not set(again.new_keys) & set(result.new_keys)
    assert (await repository.commit(JOB, [again])).settled
    await bench.check_restores("one")


async def test_row_19_what_expired_early_is_named_and_nothing_is_restored_in_part(bench: Bench) -> None:
    repository = await bench.repository()
    commit = await bench.commit(repository, "one")
    key = bench.keys("blobs/")[0]
    bench.remove(key)
    report = await repository.verify()
    assert report.damaged
    assert {(p.kind, p.key, p.number) for p in report.problems} == {(ProblemKind.BLOB_MISSING, key, 1)}
    target = bench.target()
    with pytest.raises(DamagedError):
        await repository.restore(commit, target)
    assert not target.exists()


async def test_row_19_uploads_that_expired_before_their_commit_fail_the_next_one(bench: Bench) -> None:
    """The TTL of a commit's blobs was not removed, and they went: the next commit does not build on them."""
    repository = await bench.repository()
    bench.strike(s3_error(403, "AccessDenied"), "PutObjectTagging", times=None)
    await bench.commit(repository, "one")
    bench.proxy.clear()
    key = bench.keys("blobs/")[0]
    bench.remove(key)
    with pytest.raises(DamagedError) as caught:
        await bench.commit(repository, "two")
    assert caught.value.subject == key
