"""Stores of a checkpoint, worked on by executors: what each may use, and what the driver hears of those that fail."""

import _thread
import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast
from unittest import mock

import msgspec
import pyarrow as pa
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from blobstore.errors import AccessDeniedError, StoreUnavailableError
from engine.checkpoint.backup import backup_checkpoint
from engine.checkpoint.convert import ConvertChoice
from engine.checkpoint.store import StoreRestored
from engine.checkpoint.store_check import StoreWork
from engine.errors import (
    ConflictError,
    DamagedError,
    MisplacedKeyError,
    SourceChangedError,
    TargetError,
    UnsafeSourceError,
)
from engine.repository.repository import Repository, SyncRepository
from engine.settings import MIB, STORES_AT_ONCE
from engine.spark import checkpoint, spread
from engine.spark.access import Access, SparkOptions, open_on_driver
from engine.spark.checkpoint import StoresWork, worst_of
from engine.spark.errors import TaskFailedError, decode_error, encode_error
from engine.state.settings import StateStoreSettings
from index.errors import FileChecksumError, StoreMergeError, UnknownFormatError, VersionMissingError
from index.spark.checkpoint import StoreId
from tests.unit.engine.checkpoint.live_query import LiveQuery
from tidemark.errors import TidemarkError


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a store saw of its surroundings."""

    partition: int
    in_flight_max: int = 0
    memory_bytes_max: int = 0
    # Of the repository.
    opened: int = 0
    trace: str = ""


def stores(count: int) -> tuple[StoreWork, ...]:
    return tuple(
        StoreWork(
            id=StoreId(0, partition, "default"), versions=(), codecs=(), settings=StateStoreSettings(), newest_batch=0
        )
        for partition in range(count)
    )


Do = Callable[[Repository | None, StoreWork], Awaitable[Seen]]


def work_of(count: int, do: Do, access: Access | None = None, *, retries: bool = False) -> StoresWork:  # type: ignore[type-arg]
    return StoresWork(
        operation="test stores",
        subject="here",
        work=stores(count),
        do=do,
        opened=contextlib.nullcontext,
        access=access,
        retries=retries,
    )


@pytest.fixture
def access(url: str) -> Iterator[Access]:
    repository, access = open_on_driver(url, SparkOptions())
    with repository:
        yield access


def attempts(directory: Path) -> dict[str, int]:
    """How often each store was worked on."""
    return {path.name: len(path.read_text()) for path in directory.iterdir()}


def counting(directory: Path, failures: dict[int, Exception]) -> Do:
    """Work that leaves a letter for each attempt, and fails for some partitions."""
    directory.mkdir()

    async def do(_: Repository | None, item: StoreWork) -> Seen:
        with (directory / str(item.id.partition)).open("a") as file:
            file.write("x")
        if item.id.partition in failures:
            raise failures[item.id.partition]
        return Seen(partition=item.id.partition)

    return do


@pytest.mark.spark
@pytest.mark.parametrize("error", [ValueError("is wrong"), StoreUnavailableError("busy", operation="get")])
def test_what_a_store_of_a_repository_fails_with_is_not_tried_again(
    spark: SparkSession, tmp_path: Path, access: Access, error: Exception
) -> None:
    do = counting(tmp_path / "attempts", {1: error})
    with pytest.raises(TidemarkError) as caught:
        work_of(4, do, access).run(spark, Seen, 2)
    is_ours = isinstance(error, TidemarkError)
    text = "get: busy" if is_ours else "test stores here: ValueError: is wrong"
    assert str(caught.value) == f"{text} (state/0/1); 1 of 4 stores failed"
    assert type(caught.value) is (type(error) if is_ours else TaskFailedError)
    (note,) = getattr(caught.value, "__notes__", ["not needed"])
    assert is_ours or re.fullmatch(rf"it was raised in do, {re.escape(__file__)}:\d+", note)
    # The others came to their end.
    assert attempts(tmp_path / "attempts") == dict.fromkeys("0123", 1)


@pytest.mark.spark
def test_without_a_repository_spark_tries_again_what_may_pass(spark: SparkSession, tmp_path: Path) -> None:
    busy, known, unknown = StoreUnavailableError("busy", operation="get"), TargetError("full", operation="x"), OSError()
    for name, error, retries, expected, tries in (
        ("known", known, True, TargetError, 1),
        ("busy", busy, False, StoreUnavailableError, 1),
        ("retried", busy, True, TaskFailedError, 3),
        ("unknown", unknown, False, TaskFailedError, 3),
    ):
        do = counting(tmp_path / name, {0: error})
        with pytest.raises(expected):
            work_of(1, do, retries=retries).run(spark, Seen, 1)
        assert attempts(tmp_path / name) == {"0": tries}


@pytest.mark.spark
def test_results_come_in_the_order_of_the_stores_and_tasks_go_on_with_the_trace(spark: SparkSession) -> None:
    async def do(_: Repository | None, item: StoreWork) -> Seen:
        from opentelemetry import trace  # noqa: PLC0415 - in the worker

        found = trace.get_current_span().get_span_context().trace_id
        return Seen(partition=item.id.partition, trace=f"{found:032x}")

    work = msgspec.structs.replace(work_of(5, do), sizes_bytes=(1, 2, 3, 4, 5))
    with mock.patch.object(trace, "get_tracer", TracerProvider().get_tracer):
        with trace.get_tracer("test").start_as_current_span("job") as job:
            seen = work.run(spark, Seen, 2)
        assert [one.partition for one in seen] == [0, 1, 2, 3, 4]
        assert {one.trace for one in seen} == {f"{job.get_span_context().trace_id:032x}"}
    assert work_of(0, do).run(spark, Seen, 2) == []


def partitions_of(work: StoresWork, most: int) -> Sequence[int]:  # type: ignore[type-arg]
    with mock.patch.object(spread, "placed_work", side_effect=InterruptedError) as placed, contextlib.suppress(OSError):
        work.run(mock.Mock(), Seen, most)
    return placed.call_args.args[2]  # type: ignore[no-any-return]


def test_stores_are_balanced_by_their_bytes_or_dealt_out_like_cards() -> None:
    async def do(_: Repository | None, item: StoreWork) -> Seen:
        return Seen(partition=item.id.partition)

    work = work_of(7, do)
    assert partitions_of(work, 3) == (0, 1, 2, 0, 1, 2, 0)
    assert partitions_of(work, 100) == tuple(range(7))
    by_bytes = msgspec.structs.replace(work, sizes_bytes=(1, 1, 1, 9, 1, 1, 1))
    # The large one is alone.
    assert partitions_of(by_bytes, 2) == (1, 1, 1, 0, 1, 1, 1)


def test_stores_at_work_share_the_repository_and_its_limits(access: Access) -> None:
    async def do(repository: Repository | None, item: StoreWork) -> Seen:
        assert repository is not None
        return Seen(
            partition=item.id.partition,
            in_flight_max=repository.settings.in_flight_max,
            memory_bytes_max=repository.settings.memory_bytes_max,
            opened=id(repository.store),
        )

    def seen(count: int) -> list[Seen]:
        rows = pa.array([msgspec.msgpack.encode(number) for number in range(count)], pa.binary())
        (answer,) = work_of(count, do, access)(iter([pa.record_batch([rows], ["work"])]))
        assert answer.column("failed").null_count == count
        return [msgspec.msgpack.decode(done, type=Seen) for done in answer.column("done").to_pylist()]

    many, (alone,) = seen(20), seen(1)
    assert {one.in_flight_max for one in many} == {16 // STORES_AT_ONCE}
    assert {one.memory_bytes_max for one in many} == {64 * MIB // STORES_AT_ONCE}
    assert (alone.in_flight_max, alone.memory_bytes_max) == (16, 64 * MIB)
    # From task to task too.
    assert len({one.opened for one in [*many, alone]}) == 1
    assert list(work_of(1, do, access)(iter([]))) == []


def test_no_credentials_are_in_what_travels_to_a_task(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very secret")
    bases = {"work": stores(2), "do": checkpoint._restore, "opened": contextlib.nullcontext}
    work = msgspec.structs.replace(work_of(2, checkpoint._restore, access), **bases)  # type: ignore[arg-type]
    assert b"very secret" not in cloudpickle.dumps(work)


def restore(url: str, query: Path, target: Path) -> None:
    with SyncRepository.open(url) as repository:
        repository.loop.run(backup_checkpoint(repository.asynchronous, query))
    checkpoint.restore_checkpoint(cast("SparkSession", None), url, target)


def convert(_: str, query: Path, target: Path) -> None:
    checkpoint.convert_checkpoint(cast("SparkSession", None), query, target, ConvertChoice(format_version=1))


@pytest.mark.parametrize("make", [restore, convert])
def test_an_interrupt_waits_for_tasks_that_write_to_the_staging_directory(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[str, Path, Path], None]
) -> None:
    begun = threading.Event()
    seen: list[bool] = []

    def run(work: StoresWork, *_: object) -> list[StoreRestored]:  # type: ignore[type-arg]
        assert isinstance(work.do, partial)
        begun.set()
        time.sleep(0.5)
        seen.append(Path(work.do.func.__self__.root).is_dir())  # type: ignore[attr-defined]
        return []

    async def write() -> None:
        query = LiveQuery(tmp_path / "query")
        await query.run(3)
        await query.close()

    asyncio.run(write())
    monkeypatch.setattr(StoresWork, "run", run)

    def interrupt() -> None:
        if begun.wait(30):
            _thread.interrupt_main()

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        make(url, tmp_path / "query", tmp_path / "made")
    interrupting.join()
    assert seen == [True]
    assert not list(tmp_path.glob("*made*"))


def damaged(subject: str) -> DamagedError:
    return DamagedError("is cut short", operation="check", subject=subject, hint="look at it")


@pytest.mark.parametrize(
    "errors, expected",
    [
        pytest.param([UnsafeSourceError("gone", operation="x"), damaged("f")], DamagedError, id="damage first"),
        pytest.param([ConflictError("c", operation="x"), FileChecksumError("f")], FileChecksumError, id="of any kind"),
        pytest.param([UnknownFormatError("n"), damaged("f")], DamagedError, id="what is missing before a format"),
        pytest.param(
            [VersionMissingError("v"), UnsafeSourceError("u", operation="x"), SourceChangedError("c", operation="x")],
            SourceChangedError,
            id="what changed before what moved",
        ),
        pytest.param(
            [StoreUnavailableError("busy", operation="get"), VersionMissingError("gone")],
            VersionMissingError,
            id="what moved before what does not answer",
        ),
        pytest.param(
            [VersionMissingError("gone"), AccessDeniedError("no", operation="get")],
            AccessDeniedError,
            id="what does not pass before what moved",
        ),
        pytest.param(
            [MisplacedKeyError("k", operation="x"), StoreMergeError("m")], MisplacedKeyError, id="else the first store"
        ),
    ],
)
def test_of_several_errors_the_worst_is_raised(errors: list[TidemarkError], expected: type[TidemarkError]) -> None:
    failed = [(f"state/0/{number}", error) for number, error in enumerate(errors)]
    error = worst_of(failed, 5)
    assert type(error) is expected
    assert all(path in str(error) for path, _ in failed)
    assert str(error).endswith(f"; {len(errors)} of 5 stores failed")


def test_the_first_few_stores_that_failed_are_named_and_the_rest_counted() -> None:
    failed = [(f"state/0/{number}", damaged(f"/q/state/0/{number}/7.zip")) for number in range(5)]
    error = worst_of(failed, 8)
    shown = "; ".join(f"check /q/state/0/{number}/7.zip: is cut short" for number in range(3))
    assert str(error) == f"{shown}, and 2 more; 5 of 8 stores failed"
    # The rest of it is that of the first one.
    assert (error.operation, error.subject, error.hint) == ("check", "/q/state/0/0/7.zip", "look at it")


def test_notes_of_an_error_come_with_it() -> None:
    failed = []
    for number in range(2):
        error = damaged("s3://b/q/state/0/0/1.zip")
        error.add_note(f"and more: {number}")
        failed.append((f"state/0/{number}", decode_error(encode_error(error))))
    assert worst_of(failed, 2).__notes__ == ["and more: 0", "state/0/1: and more: 1"]
