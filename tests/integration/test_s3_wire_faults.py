"""The real stack on a real S3 server: slow downs, errors, resets, other bytes, silence (rows 1 to 7).

Each test names its row in the table of `tests/integration/s3_fault_bench.py`.
"""

import asyncio

import msgspec
import pytest

from blobstore.base import Created, Unknown
from blobstore.errors import StoreUnavailableError
from engine.errors import DamagedError
from engine.repository.repository import Repository
from index.errors import FormatError
from tests.contract.store_calls import get_bytes
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
    flipped,
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
    RECORD,
    RETRY,
    S3,
    Bench,
    body,
    now_s,
    pattern,
    read,
)
from tests.unit.engine.conftest import text_tree
from tests.unit.engine.workbench import read_tree

pytestmark = pytest.mark.s3


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
    # Ten may be tried again; on a busy machine, one of them may run out of time first.
    assert 40 < len(bench.proxy.of("HeadObject")) <= 50


# --- 2: errors of the server, also inside a success ---


@pytest.mark.parametrize("after_upstream", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "PutObject"])
async def test_row_2_an_error_is_no_success_whatever_its_status(
    bench: Bench, operation: str, status: int, after_upstream: bool
) -> None:
    s3, size_bytes = (S3, 1000) if operation == "PutObject" else (IN_PARTS, 6 * MIB)
    rule = bench.strike(s3_error(status, "InternalError", after_upstream=after_upstream), operation)
    assert isinstance(await bench.store(s3=s3).put_if_absent("key", body(size_bytes)), Created)
    assert rule.struck == 1
    assert bench.stored("key") == pattern(size_bytes)


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
    # One request at a time has one connection, so that another one is there on purpose.
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
    assert await get_bytes(store, "key", start=500, size_bytes=100) == pattern(1000)[500:600]


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
