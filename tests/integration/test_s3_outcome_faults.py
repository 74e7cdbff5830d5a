"""The real stack on a real S3 server: lost answers, conflicts, lost races, missing rights (rows 8 to 14).

Each test names its row in the table of `tests/integration/s3_fault_bench.py`.
"""

import traceback

import pytest

from blobstore.base import Created, Lost
from blobstore.errors import AccessDeniedError, StoreError, StoreUnavailableError
from engine.errors import CommitLostError, CommitUnknownError
from engine.inspect.verify import ProblemKind
from tests.fault_rules import (
    Answer,
    Break,
    Reply,
    Rule,
    Stage,
    conditional_conflict,
    expired_token,
    lose_answer,
    s3_error,
)
from tests.integration.s3_fault_bench import (
    BLOB,
    DAY_MS,
    IN_PARTS,
    JOB,
    MIB,
    RECORD,
    RETRY,
    Bench,
    body,
    pattern,
    read,
    signed_by,
)

pytestmark = pytest.mark.s3


# --- 8, 9: lost answers of creates ---


@pytest.mark.parametrize("polite", [False, True], ids=["reset", "closed"])
@pytest.mark.parametrize("size_bytes", [0, 3 * MIB])
async def test_row_8_a_lost_answer_is_settled_by_the_write_id(bench: Bench, size_bytes: int, polite: bool) -> None:
    store = bench.bare()
    # The connection is used, as it nearly always is: it is then that the HTTP client would send again by itself.
    await store.stat("key")
    bench.strike(lose_answer(polite=polite), "PutObject")
    bench.proxy.clear_log()
    outcome = await store.put_if_absent("key", body(size_bytes), ttl_ms=DAY_MS)
    assert isinstance(outcome, Created)
    assert [e.operation for e in bench.proxy.exchanges] == ["PutObject", "HeadObject"]


async def test_row_8_a_lost_answer_to_a_create_that_lost_is_lost(bench: Bench) -> None:
    bench.plant("key", pattern(20))
    bench.strike(lose_answer(), "PutObject")
    assert isinstance(await bench.store().put_if_absent("key", body(10)), Lost)
    assert bench.stored("key") == pattern(20)


async def test_row_8_a_lost_answer_and_a_broken_look_are_settled_by_the_next_attempt(bench: Bench) -> None:
    bench.strike(lose_answer(), "PutObject")
    bench.strike(Break(at=Stage.REQUEST), "HeadObject", times=2)
    assert isinstance(await bench.store().put_if_absent("key", body(10)), Created)


async def test_row_8_a_commit_whose_answer_is_lost_is_committed_once(bench: Bench) -> None:
    repository = await bench.repository()
    rule = bench.strike(lose_answer(), "PutObject", key=RECORD)
    commit = await bench.commit(repository, "one")
    assert (commit.pointer.number, commit.settled, rule.struck) == (1, True, 1)
    assert (await bench.commit(repository, "two")).pointer.number == 2
    assert len(await repository.commits(JOB)) == 2


@pytest.mark.parametrize("polite", [False, True], ids=["reset", "closed"])
async def test_row_9_a_lost_answer_to_completing_is_settled_by_the_write_id(bench: Bench, polite: bool) -> None:
    store = bench.bare(IN_PARTS)
    bench.strike(lose_answer(polite=polite), "CompleteMultipartUpload")
    assert isinstance(await store.put_if_absent("key", body(6 * MIB)), Created)
    assert bench.stored("key") == pattern(6 * MIB)
    assert len(bench.proxy.of("CompleteMultipartUpload")) == 1


async def test_row_9_no_such_upload_where_nothing_is_there_begins_again(bench: Bench) -> None:
    store = bench.store(s3=IN_PARTS)
    bench.strike(s3_error(404, "NoSuchUpload"), "CompleteMultipartUpload")
    assert isinstance(await store.put_if_absent("key", body(6 * MIB)), Created)
    assert bench.stored("key") == pattern(6 * MIB)
    assert len(bench.proxy.of("CreateMultipartUpload")) == 2
    # What was given up holds no bytes.
    assert await store.list_unfinished("") == ()


async def test_row_9_an_own_upload_that_is_completed_unheard_and_looked_at_in_vain_is_whole(bench: Bench) -> None:
    store = bench.store(s3=IN_PARTS)
    bench.strike(lose_answer(), "CompleteMultipartUpload")
    bench.strike(Break(at=Stage.REQUEST), "HeadObject", times=2)
    # It may be reported as lost: anyone who needs to know then compares what is there.
    assert isinstance(await store.put_if_absent("key", body(6 * MIB)), Created | Lost)
    assert bench.stored("key") == pattern(6 * MIB)


# --- 10: conflicts of conditional requests ---


async def test_row_10_a_409_is_tried_again(bench: Bench) -> None:
    bench.strike(conditional_conflict(), "PutObject", times=3)
    assert isinstance(await bench.store().put_if_absent("key", body(10)), Created)


async def test_row_10_a_409_of_a_multipart_upload_begins_it_again(bench: Bench) -> None:
    bench.strike(conditional_conflict(), "CompleteMultipartUpload", times=2)
    store = bench.store(s3=IN_PARTS)
    assert isinstance(await store.put_if_absent("key", body(6 * MIB)), Created)
    assert len(bench.proxy.of("CreateMultipartUpload")) == 3
    assert await store.list_unfinished("") == ()


async def test_row_10_a_409_that_stays_is_an_error_after_so_many_attempts(bench: Bench) -> None:
    bench.strike(conditional_conflict(), "PutObject", times=None)
    with pytest.raises(StoreUnavailableError) as caught:
        await bench.store().put_if_absent("key", body(10))
    assert caught.value.attempts == RETRY.attempts_max == len(bench.proxy.of("PutObject"))


# --- 11, 12: commits that lose, and commits of which nobody knows ---


async def test_row_11_a_writer_that_lost_says_so_and_deletes_nothing(bench: Bench) -> None:
    one, other = await bench.repository(), await bench.repository()
    results = [await bench.backup(one, "one"), await bench.backup(other, "other")]
    await one.commit(JOB, [results[0]])
    # The other one has seen an empty log; what it is shown now is a real 412.
    with pytest.raises(CommitLostError):
        await other.commit(JOB, [results[1]])
    assert [e.upstream_status for e in bench.proxy.of("PutObject", key=RECORD)] == [200, 412]
    assert bench.proxy.of("DeleteObjects", "DeleteObject") == ()
    await bench.check_restores("one")
    # The loser's uploads are still there, with their TTL.
    for key in results[1].new_keys:
        found = await other.store.stat(key)
        assert found is not None
        assert found.expires_at_ms is not None


@pytest.mark.parametrize("carried_out", [True, False])
async def test_row_12_a_commit_of_which_nobody_knows_is_found_out_by_the_next_start(
    bench: Bench, carried_out: bool
) -> None:
    repository = await bench.repository()
    result = await bench.backup(repository, "one")
    bench.strike(Break(at=Stage.ANSWER if carried_out else Stage.UPLOAD), "PutObject", key=RECORD, times=None)
    bench.strike(Break(at=Stage.REQUEST), "HeadObject", times=None)
    with pytest.raises(CommitUnknownError):
        await repository.commit(JOB, [result])
    assert bench.proxy.of("DeleteObjects", "DeleteObject") == ()
    bench.proxy.clear()
    fresh = await bench.repository()
    assert (await fresh.latest(JOB) is not None) is carried_out
    commit = await repository.commit(JOB, [result])
    assert (commit.pointer.number, commit.settled) == (1, True)
    assert len(await fresh.commits(JOB)) == 1
    await bench.check_restores("one")


# --- 13: credentials and clocks ---


async def test_row_13_credentials_that_expire_in_mid_transfer_are_looked_up_again(bench: Bench) -> None:
    repository = await bench.repository()
    rule = bench.strike(expired_token(), "PutObject", key=BLOB, after=1)
    await bench.commit(repository, "one")
    assert rule.struck == 1
    await bench.check_restores("one")


@pytest.mark.parametrize("there", [True, False], ids=["after a success", "after a 404"])
async def test_row_13_rotated_credentials_are_taken_from_the_standard_chain(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    if there:
        bench.plant("key", pattern(10))
    store = bench.store()
    await store.stat("key")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "rotated")
    empty = b"<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
    answers = {"Credential=rotated/": Reply(answer=Answer(status=200, body=empty)), "": expired_token()}
    for credential, fault in answers.items():
        bench.proxy.add(Rule(fault=fault, when=signed_by(credential), times=None))
    assert (await store.list_page("")).blobs == ()
    assert len(bench.proxy.of("ListObjectsV2")) == 2


async def test_row_13_credentials_that_stay_expired_are_an_error_without_secrets(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-that-nobody-may-see")
    caplog.set_level("DEBUG", logger="blobstore")
    caplog.set_level("DEBUG", logger="engine")
    store = bench.store()
    shown = f"The provided token token-that-nobody-may-see of {bench.server.access_key} has expired"
    bench.strike(s3_error(400, "ExpiredToken", shown), times=None)
    errors: list[BaseException] = []
    for call in (store.stat("key"), store.put_if_absent("key", body(10)), store.delete(["key"]), read(store, "key")):
        with pytest.raises(AccessDeniedError) as caught:
            await call
        errors.append(caught.value)
    assert len(bench.proxy.exchanges) <= 8
    text = "".join("".join(traceback.format_exception(error)) + repr(vars(error)) for error in errors) + caplog.text
    assert "ExpiredToken" in text
    for secret in ("token-that-nobody-may-see", bench.server.secret_key, "Signature=", "Authorization"):
        assert secret not in text


async def test_row_13_a_clock_that_is_wrong_is_named(bench: Bench) -> None:
    bench.strike(s3_error(403, "RequestTimeTooSkewed", "The difference is too large."), times=None)
    with pytest.raises(StoreError) as caught:
        await bench.store().stat("key")
    assert "clock" in caught.value.hint


# --- 14: no right to delete, none to tag ---


async def test_row_14_without_the_right_to_delete_only_collection_fails(bench: Bench) -> None:
    repository = await bench.repository()
    bench.strike(s3_error(403, "AccessDenied"), "DeleteObjects", "DeleteObject", times=None)
    await bench.commit(repository, "one")
    await bench.commit(repository, "two")
    await bench.check_restores("two", past_proxy=False)
    with pytest.raises(AccessDeniedError) as caught:
        await bench.collect(repository)
    assert "--policy" in caught.value.hint
    await bench.check_restores("two", past_proxy=False)


async def test_row_14_without_the_right_to_tag_backups_and_restores_go_on(bench: Bench) -> None:
    repository = await bench.repository()
    bench.strike(s3_error(403, "AccessDenied"), "PutObjectTagging", times=None)
    commit = await bench.commit(repository, "one")
    assert not commit.settled
    await bench.check_restores("one", past_proxy=False)
    # The next commit would build on uploads that may expire: that is refused, in time and in words (design 0002, T2).
    with pytest.raises(AccessDeniedError) as caught:
        await bench.commit(repository, "two")
    assert "--policy" in caught.value.hint
    await bench.check_restores("one", past_proxy=False)
    report = await repository.verify()
    assert {p.kind for p in report.problems} == {ProblemKind.AT_RISK}
