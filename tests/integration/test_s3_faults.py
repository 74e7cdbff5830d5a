"""The real stack, from a repository down to a real S3 server, with faults on the wire between them.

The rows are those of the table of faults that a top engine has to survive, 1 to 19; each test names its row. What of a
row cannot apply here:

- Rows 3, 8: no request carries `If-Match`; blobs are written once, so a range that is gone on with cannot be of
  another version (design 0003, options that lost).
- Row 2: nothing is copied on the store.
- Row 7: requests are not hedged; what hangs is cut off and sent again.
- Row 15: blobs have one copy; the way out is another commit, which the caller chooses.
- Row 16: a store whose every list leaves out the same key for good is below what the protocol needs (design 0002).
- Row 17: that a probe finds such a store out is the business of `doctor` and its tests; here, what a store does that
  is known to be one, or behaves like one at the wrong moment.
- Row 19: an S3 store of ours does not let the server delete by itself before a backstop of a week; that its rule fires
  early is played by deleting.
"""

import asyncio
import traceback
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import msgspec
import pytest

from blobstore.base import Created, Lost, Unknown
from blobstore.errors import AccessDeniedError, StoreError, StoreUnavailableError
from blobstore.s3_profile import PROFILE_KEY, StoreProfile, encode_profile
from engine.errors import (
    CommitLostError,
    CommitUnknownError,
    DamagedError,
    EngineError,
    LeaseExpiredError,
    UnsafeStoreError,
)
from engine.repository import Repository
from engine.verify import ProblemKind
from index.errors import FormatError
from index.keys import commit_key
from tests.fault_proxy import FaultProxy
from tests.fault_rules import (
    Answer,
    Break,
    Drip,
    Fault,
    FlipUpload,
    Hang,
    Reply,
    Rule,
    Stage,
    conditional_conflict,
    expired_token,
    flipped,
    lose_answer,
    on,
    s3_error,
    shifted_range,
    slow_down,
    substituted,
    truncated,
)
from tests.integration.s3_fault_bench import (
    BLOB,
    DAY_MS,
    IMPATIENT,
    IN_PARTS,
    INDEX,
    JOB,
    LAST,
    MIB,
    OPERATIONS,
    PREFIX,
    RECORD,
    RETRY,
    S3,
    Bench,
    body,
    born_hours_ago,
    delete_error,
    list_with,
    list_without_contents,
    lists_of,
    now_s,
    pattern,
    read,
    signed_by,
)
from tests.servers.s3_server import S3Server
from tests.unit.engine.conftest import text_tree
from tests.unit.engine.workbench import read_tree

pytestmark = pytest.mark.s3


@pytest.fixture
async def bench(s3_server: S3Server, s3_bucket: str, tmp_path: Path) -> AsyncIterator[Bench]:
    async with FaultProxy(s3_server.endpoint_url, chance=Random(1)) as proxy, AsyncExitStack() as stack:
        yield Bench(s3_server, s3_bucket, proxy, tmp_path, stack)


# --- 1: slow down ---


async def test_row_1_a_burst_of_slow_down_on_every_operation_is_survived(bench: Bench) -> None:
    repository = await bench.repository()
    rules = [bench.strike(slow_down(), operation, times=3) for operation in OPERATIONS]
    await bench.commit(repository, "one")
    await bench.commit(repository, "two")
    await repository.collect(LAST, delete_share_max=1)
    assert not (await repository.verify()).problems
    await bench.check_restores("two", past_proxy=False)
    assert [rule.struck for rule in rules] == [3] * len(rules)


async def test_row_1_retry_after_is_honoured(bench: Bench) -> None:
    bench.strike(slow_down(retry_after_s=1), "PutObject")
    assert isinstance(await bench.store().put_if_absent("key", body(100)), Created)
    first, second = bench.proxy.of("PutObject")
    assert 1.0 <= second.at_s - first.at_s < 2.0


async def test_row_1_fewer_requests_are_under_way_after_a_burst_and_more_again_later(bench: Bench) -> None:
    store = bench.store(in_flight_max=16)
    bench.strike(Hang(at=Stage.REQUEST, seconds=0.02), "HeadObject", times=400, after=8)

    async def most_at_once(requests: int) -> int:
        bench.proxy.in_flight_most = 0
        await asyncio.gather(*(store.stat(f"key-{i}") for i in range(requests)))
        return bench.proxy.in_flight_most

    assert await most_at_once(60) == 16
    burst = Rule(fault=slow_down(), when=on("HeadObject"), times=16)
    bench.proxy.rules.insert(0, burst)
    await asyncio.gather(*(store.stat(f"key-{i}") for i in range(16)))
    assert burst.struck == 16
    assert await most_at_once(20) < 12
    assert await most_at_once(150) > 12


async def test_row_1_a_store_that_stays_busy_is_not_asked_without_end(bench: Bench) -> None:
    retry = msgspec.structs.replace(RETRY, retries_in_reserve=10)
    store = bench.store(retry=retry)
    bench.strike(slow_down(), "HeadObject", times=None)
    ends = await asyncio.gather(*(store.stat(f"key-{i}") for i in range(40)), return_exceptions=True)
    assert all(isinstance(end, StoreUnavailableError) and end.asks_for_less and end.key for end in ends)
    assert len(bench.proxy.of("HeadObject")) == 50


# --- 2: errors of the server, also inside a success ---


@pytest.mark.parametrize("after_upstream", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "PutObject"])
async def test_row_2_an_error_is_no_success_whatever_its_status(
    bench: Bench, operation: str, status: int, after_upstream: bool
) -> None:
    s3 = S3 if operation == "PutObject" else IN_PARTS
    rule = bench.strike(s3_error(status, "InternalError", after_upstream=after_upstream), operation)
    assert isinstance(await bench.store(s3=s3).put_if_absent("key", body(6 * MIB)), Created)
    assert rule.struck == 1
    assert bench.stored("key") == pattern(6 * MIB)


@pytest.mark.parametrize("status", [200, 500])
async def test_row_2_an_error_of_a_delete_is_no_deletion(bench: Bench, status: int) -> None:
    store = bench.store()
    await store.put("key", body(10))
    bench.strike(s3_error(status, "InternalError"), "DeleteObjects")
    assert await store.delete(["key"]) == ()
    assert bench.keys() == []
    assert len(bench.proxy.of("DeleteObjects")) == 2


@pytest.mark.parametrize("operation", ["HeadObject", "GetObject", "ListObjectsV2", "PutObjectTagging"])
async def test_row_2_an_error_of_any_other_request_is_survived(bench: Bench, operation: str) -> None:
    store = bench.store()
    await store.put_if_absent("dir/key", body(10), ttl_ms=DAY_MS)
    rule = bench.strike(s3_error(500, "InternalError"), operation)
    await store.remove_ttl("dir/key")
    found = await store.stat("dir/key")
    assert found is not None
    assert found.expires_at_ms is None
    assert [b.key for b in (await store.list_page("dir/")).blobs] == ["dir/key"]
    assert await read(store, "dir/key") == pattern(10)
    assert rule.struck == 1


# --- 3: resets ---


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh connection", "used connection"])
@pytest.mark.parametrize("size_bytes", [0, 3 * MIB])
@pytest.mark.parametrize("at", [Stage.REQUEST, Stage.UPLOAD, Stage.ANSWER, Stage.BODY])
async def test_row_3_a_put_that_is_reset_is_created_by_the_caller(
    bench: Bench, at: Stage, size_bytes: int, fresh: bool
) -> None:
    store = bench.store()
    if not fresh:
        await store.stat("key")
    rule = bench.strike(Break(at=at), "PutObject")
    outcome = await store.put_if_absent("key", body(size_bytes))
    assert isinstance(outcome, Created)
    assert rule.struck == 1
    assert bench.stored("key") == pattern(size_bytes)


@pytest.mark.parametrize("polite", [False, True], ids=["reset", "closed"])
@pytest.mark.parametrize(
    "at, after_bytes",
    [(Stage.REQUEST, None), (Stage.ANSWER, None), (Stage.BODY, 0), (Stage.BODY, 1), (Stage.BODY, 2_000_000)],
)
async def test_row_3_a_get_that_is_reset_goes_on_where_it_was(
    bench: Bench, at: Stage, after_bytes: int | None, polite: bool
) -> None:
    bench.plant("key", pattern(3 * MIB))
    rule = bench.strike(Break(at=at, after_bytes=after_bytes, polite=polite), "GetObject", key="/key", times=2)
    assert await read(bench.store(), "key") == pattern(3 * MIB)
    assert rule.struck == 2
    if after_bytes == 2_000_000:
        # What had come was not asked for again.
        first, *others = [e.header("Range") for e in bench.proxy.of("GetObject", key="/key")]
        assert first == ""
        assert all(int(e.removeprefix("bytes=").removesuffix("-")) > MIB for e in others)


async def test_row_3_resets_all_over_a_backup_and_a_restore_lose_nothing(bench: Bench) -> None:
    repository = await bench.repository()
    for at in (Stage.REQUEST, Stage.UPLOAD, Stage.ANSWER, Stage.BODY):
        bench.strike(Break(at=at), times=None, probability=0.05)
    await bench.commit(repository, "one")
    await bench.commit(repository, "two")
    await bench.check_restores("two", past_proxy=False)
    bench.proxy.clear()
    await bench.check_restores("two")


# --- 4, 5, 6: other bytes than the right ones ---


@pytest.mark.parametrize("key", [BLOB, INDEX, RECORD])
@pytest.mark.parametrize(
    "fault",
    [truncated(37), flipped(50), substituted(b"x" * 37), shifted_range(1)],
    ids=["row_4 truncated", "row_5 flipped", "row_6 other bytes", "row_6 other range"],
)
async def test_rows_4_5_6_wrong_bytes_are_fetched_again(bench: Bench, fault: Fault, key: str) -> None:
    await bench.commit(await bench.repository(), "one")
    rule = bench.strike(fault, "GetObject", key=key)
    repository, target = await Repository.open(bench.store()), bench.target()
    await repository.find_and_restore(JOB, target)
    assert read_tree(target) == text_tree("one")
    assert rule.struck == 1


@pytest.mark.parametrize("key", [BLOB, INDEX, RECORD])
@pytest.mark.parametrize(
    "fault",
    [truncated(37), flipped(50), substituted(b"x" * 37)],
    ids=["row_4 truncated", "row_5 flipped", "row_6 other bytes"],
)
async def test_rows_4_5_6_what_stays_wrong_is_damage_and_never_in_place(bench: Bench, fault: Fault, key: str) -> None:
    await bench.commit(await bench.repository(), "one")
    bench.strike(fault, "GetObject", key=key, times=None)
    repository, target = await Repository.open(bench.store()), bench.target()
    with pytest.raises((DamagedError, FormatError, StoreUnavailableError)) as caught:
        await repository.find_and_restore(JOB, target)
    assert not target.exists()
    assert getattr(caught.value, "hint", "")
    assert len(bench.proxy.of("GetObject", key=key)) <= 20


async def test_row_5_a_flipped_bit_is_fetched_again_on_another_connection(bench: Bench) -> None:
    await bench.commit(await bench.repository(), "one")
    bench.strike(flipped(300_000), "GetObject", key=BLOB, times=None)
    # One request at a time has one connection, so that another one is no matter of chance.
    repository, target = await Repository.open(bench.store(in_flight_max=1)), bench.target()
    with pytest.raises(DamagedError) as caught:
        await repository.find_and_restore(JOB, target)
    assert "archive/000009.log" in str(caught.value)
    first, second = bench.proxy.of("GetObject", key=caught.value.subject)
    assert first.connection != second.connection


async def test_row_5_a_bit_that_is_flipped_on_its_way_up_is_refused_and_sent_again(bench: Bench) -> None:
    if bench.server.kind == "moto":
        pytest.skip("moto believes every signature")
    rule = bench.strike(FlipUpload(at_byte=1000), "PutObject")
    assert isinstance(await bench.store().put_if_absent("key", body(MIB)), Created)
    assert rule.struck == 1
    assert bench.stored("key") == pattern(MIB)


async def test_row_6_a_server_that_ignores_ranges_is_not_believed(bench: Bench) -> None:
    bench.plant("key", pattern(1000))
    whole = Reply(
        answer=Answer(status=200, headers=(("Date", "Sat, 21 Nov 2026 10:00:00 GMT"),), body=pattern(1000)),
        after_upstream=True,
    )
    bench.strike(whole, "GetObject", key="/key")
    store = bench.store()
    assert b"".join([c async for c in store.get("key", start=500, size_bytes=100)]) == pattern(1000)[500:600]


# --- 7: silence, and slowness ---


@pytest.mark.parametrize("at", [Stage.REQUEST, Stage.ANSWER, Stage.BODY])
@pytest.mark.parametrize("operation", ["PutObject", "GetObject", "ListObjectsV2", "DeleteObjects"])
async def test_row_7_what_hangs_is_cut_off_and_sent_again(bench: Bench, operation: str, at: Stage) -> None:
    store = bench.store(s3=IMPATIENT)
    await store.put("dir/old", body(100_000))
    bench.strike(Hang(at=at), operation)
    began_s = now_s()
    assert isinstance(await store.put_if_absent("dir/key", body(100_000)), Created)
    assert await read(store, "dir/key") == pattern(100_000)
    assert len((await store.list_page("dir/")).blobs) == 2
    assert await store.delete(["dir/key"]) == ()
    assert now_s() - began_s < 5


async def test_row_7_a_server_that_only_hangs_ends_in_an_error_in_time(bench: Bench) -> None:
    store = bench.store(retry=msgspec.structs.replace(RETRY, attempts_max=2), s3=IMPATIENT)
    await store.stat("key")
    bench.strike(Hang(at=Stage.REQUEST), times=None)
    began_s = now_s()
    with pytest.raises(StoreUnavailableError) as caught:
        await store.stat("key")
    assert (caught.value.operation, caught.value.attempts) == ("stat", 2)
    assert isinstance(await store.put_if_absent("key", body(10)), Unknown | StoreUnavailableError)
    assert now_s() - began_s < 10


async def test_row_7_a_drip_is_cut_off_and_gone_on_with_by_range(bench: Bench) -> None:
    retry = msgspec.structs.replace(RETRY, bytes_per_s_min=100_000, progress_window_s=0.5)
    bench.plant("key", pattern(300_000))
    rule = bench.strike(Drip(bytes_per_s=1024), "GetObject", key="/key")
    began_s = now_s()
    assert await read(bench.store(retry=retry), "key") == pattern(300_000)
    assert now_s() - began_s < 8
    assert rule.struck == 1
    first, second = bench.proxy.of("GetObject", key="/key")
    assert first.header("Range") == ""
    assert int(second.header("Range").removeprefix("bytes=").removesuffix("-")) > 0


async def test_row_7_a_server_that_only_drips_ends_in_an_error(bench: Bench) -> None:
    retry = msgspec.structs.replace(RETRY, bytes_per_s_min=100_000, progress_window_s=0.5, attempts_max=1)
    bench.plant("key", pattern(300_000))
    bench.strike(Drip(bytes_per_s=1024), "GetObject", key="/key", times=None)
    began_s = now_s()
    with pytest.raises(StoreUnavailableError):
        await read(bench.store(retry=retry), "key")
    assert now_s() - began_s < 8


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


async def test_row_9_no_such_upload_where_nothing_is_there_begins_anew(bench: Bench) -> None:
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
    # It may be told as lost: whoever needs to know then compares what is there.
    assert isinstance(await store.put_if_absent("key", body(6 * MIB)), Created | Lost)
    assert bench.stored("key") == pattern(6 * MIB)


# --- 10: conflicts of conditional requests ---


async def test_row_10_a_409_is_tried_again(bench: Bench) -> None:
    bench.strike(conditional_conflict(), "PutObject", times=3)
    assert isinstance(await bench.store().put_if_absent("key", body(10)), Created)


async def test_row_10_a_409_of_a_multipart_upload_begins_it_anew(bench: Bench) -> None:
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
    # The other one has seen an empty log; what it is told now is a real 412.
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
    told = f"The provided token token-that-nobody-may-see of {bench.server.access_key} has expired"
    bench.strike(s3_error(400, "ExpiredToken", told), times=None)
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
        await repository.collect(LAST, delete_share_max=1)
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
    patient = bench.store(
        retry=msgspec.structs.replace(RETRY, deadline_s=60), s3=msgspec.structs.replace(S3, read_timeout_s=60)
    )
    target = bench.target()
    reading = asyncio.create_task((await Repository.open(patient)).find_and_restore(JOB, target))
    while not bench.proxy.of("GetObject", key=INDEX):  # noqa: ASYNC110 - it is another's request that is waited for
        await asyncio.sleep(0.01)
    await bench.commit(writer, "two")
    await writer.collect(LAST, delete_share_max=1)
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
        await repository.collect(LAST, delete_share_max=1)
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
        await repository.collect(LAST, delete_share_max=1)
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
        await repository.collect(LAST, delete_share_max=1)
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
        await (await bench.repository()).collect(LAST, delete_share_max=1)
    assert bench.proxy.of("DeleteObjects", "DeleteObject") == ()


# --- 18: deletes that happen in part ---


async def test_row_18_what_a_batch_did_not_delete_is_told_and_deleted_by_the_next(bench: Bench) -> None:
    repository = await bench.repository()
    for text in ("one", "two", "three"):
        await bench.commit(repository, text)
    key = commit_key(JOB, 1)
    record = bench.stored(key)
    bench.strike(delete_error(PREFIX + key), "DeleteObjects")
    report = await repository.collect(LAST, delete_share_max=1)
    # The server has deleted it all the same; let it be as it says.
    bench.plant(key, record)
    assert key in report.failed
    # Records go first, and what they lead to goes only after them (design 0002, D1).
    assert any(failed.startswith("blobs/") for failed in report.failed)
    assert not (await repository.verify()).damaged
    again = await repository.collect(LAST, delete_share_max=1)
    assert again.failed == ()
    assert set(report.failed) <= {d.key for d in again.deletes}
    assert (await repository.collect(LAST, delete_share_max=1)).deletes == ()
    await bench.check_restores("three")


async def test_row_18_a_batch_that_is_done_and_answered_by_an_error_is_done_again(bench: Bench) -> None:
    repository = await bench.repository()
    for text in ("one", "two"):
        await bench.commit(repository, text)
    bench.strike(lose_answer(), "DeleteObjects", times=2)
    report = await repository.collect(LAST, delete_share_max=1)
    assert report.failed == ()
    assert (await repository.collect(LAST, delete_share_max=1)).deletes == ()


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


async def test_row_19_uploads_that_are_about_to_expire_are_uploaded_again_and_not_committed(bench: Bench) -> None:
    repository = await bench.repository()
    bench.strike(born_hours_ago(23.5), "PutObject", key=BLOB, times=None)
    result = await bench.backup(repository, "one")
    with pytest.raises(LeaseExpiredError):
        await repository.commit(JOB, [result])
    assert bench.proxy.of("PutObject", key=RECORD) == ()
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
