"""Figures of state: sums that know what they do not know, skew, estimates, and rows as they are stored."""

import tracemalloc

import pytest

from index.spark.checkpoint import StoreId
from index.spark.requests import Kind, Prices, RequestRate
from index.spark.schema import AtomType, Field, KeyForm, StateSchema, StructType
from index.spark.state_figures import StoreFigures, advise, estimate, skew_of, sum_up
from index.spark.state_rows import DAY_MS, HOUR_MS, FamilyFigures, FamilyScan, RowAges
from index.spark.unsafe_row import encode_row

STORED = StructType((Field("k", AtomType("binary"), nullable=True), Field("at", AtomType("long"), nullable=True)))
TIMED = StateSchema(
    key=StructType(
        (
            Field("k", AtomType("string"), nullable=True),
            Field("at", AtomType("timestamp"), nullable=True, has_watermark=True),
        )
    ),
    value=StructType((Field("n", AtomType("long"), nullable=True),)),
)
WATERMARK_MS = 1_700_000_000_000


def pair(key: str, at_ms: int, value: bytes = b"") -> tuple[bytes, bytes]:
    return b"\0" + encode_row(STORED, [key.encode(), at_ms * 1000]), value


def scanned(*pairs: tuple[bytes, bytes], operator: str = "stateStoreSave") -> FamilyFigures:
    scan = FamilyScan("default", TIMED, KeyForm(), operator=operator, watermark_ms=WATERMARK_MS)
    scan.add(pairs)
    return scan.figures()


def store(partition: int, rows: int | None = 10, **figures: object) -> StoreFigures:
    by = "unknown" if rows is None else "snapshot"
    return StoreFigures(operator=0, partition=partition, store="default", batch=9, rows=rows, rows_by=by, **figures)  # type: ignore[arg-type]


def test_times_are_counted_by_how_far_the_watermark_has_to_go() -> None:
    left = [-DAY_MS, 0, 1, HOUR_MS, HOUR_MS + 1, DAY_MS, DAY_MS + 1]
    found = scanned(*(pair("a", WATERMARK_MS + each) for each in left)).ages
    assert found == RowAges(
        column="at",
        expires=True,
        oldest_ms=WATERMARK_MS - DAY_MS,
        newest_ms=WATERMARK_MS + DAY_MS + 1,
        due=2,
        within_1h=2,
        within_1d=2,
        later=1,
    )


def test_a_join_does_not_say_what_goes() -> None:
    ages = scanned(pair("a", 0), operator="symmetricHashJoin").ages
    assert ages is not None
    assert not ages.expires


def test_an_aggregation_drops_nothing_by_a_time_in_its_value() -> None:
    turned = StateSchema(key=TIMED.value, value=TIMED.key)
    scan = FamilyScan("default", turned, KeyForm(), operator="stateStoreSave", watermark_ms=WATERMARK_MS)
    scan.add([(b"\0" + bytes(16), pair("a", 1)[0])])
    assert scan.figures().ages is None


def test_rows_are_summed_by_the_leading_column_that_is_not_a_time() -> None:
    found = scanned(pair("a", 1, b"x" * 100), pair("b", 1), pair("b", 2), pair("", 3))
    sizes = len(pair("a", 1)[0])
    assert [(of.key, of.rows, of.size_bytes) for of in found.heaviest] == [
        ("k=a", 1, sizes + 100),
        ("k=b", 2, 2 * sizes),
        ("k=", 1, len(pair("", 1)[0])),
    ]
    assert (found.rows, found.heaviest_error_bytes) == (4, 0)


def test_keys_that_begin_alike_are_not_summed_up_as_one() -> None:
    stores = [
        store(n, families=(scanned(pair("a" * 300 + key, 1), pair("b" * 70 + key, 1)),)) for n, key in enumerate("xyx")
    ]
    (family,) = sum_up(0, "dedupe", stores).families
    assert sorted(of.rows for of in family.heaviest) == [1, 1, 2, 2]
    assert {len(of.key) for of in family.heaviest} == {60}
    null = b"\0" + (1).to_bytes(8, "little") + bytes(16), b""
    keys = {of.key for of in scanned(pair("null", 1), null).heaviest}
    assert keys == {"k=null", "k is null"}


def test_long_keys_do_not_fill_memory() -> None:
    tracemalloc.start()
    scan = FamilyScan("default", TIMED, KeyForm(), operator="dedupe", watermark_ms=0)
    for n in range(200):
        scan.add([pair(f"{n:06}" * 10_000, 1)])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000
    assert len({of.key for of in scan.figures().heaviest}) == 10


def test_more_groups_than_are_kept_have_an_error_that_holds() -> None:
    found = scanned(*(pair(f"{n}", 0) for n in range(45_000)), *(pair("7", 0) for _ in range(10)))
    assert found.rows == 45_010
    assert found.heaviest_error_bytes >= len(pair("7", 0)[0])


def test_a_row_that_does_not_fit_is_counted_all_the_same() -> None:
    found = scanned(pair("a", 1), (b"\0short", b""))
    assert (found.rows, found.ages, found.heaviest) == (2, None, ())
    assert found.unread


def test_hostile_rows_are_refused_by_their_bounds() -> None:
    key = bytearray(pair("abc", 1)[0])
    key[1 + 8 : 1 + 16] = (2**31 << 32 | 2**31).to_bytes(8, "little")
    assert scanned((bytes(key), b"")).unread


def test_an_unknown_figure_makes_an_unknown_sum() -> None:
    found = sum_up(0, "stateStoreSave", [store(0), store(1, None)])
    assert (found.rows, found.rows_by, found.row_skew, found.never) == (None, "unknown", None, None)


def test_only_rows_without_a_time_stay_for_ever() -> None:
    counted = FamilyFigures(name="default", rows=10)
    unread = FamilyFigures(name="default", rows=10, unread="why")
    assert sum_up(0, "stateStoreSave", [store(0, families=(counted,))]).never == 10
    assert sum_up(0, "stateStoreSave", [store(0, families=(unread,))]).never is None
    assert sum_up(0, "transformWithStateExec", [store(0, families=(counted,))]).never is None
    timed = FamilyFigures(name="default", rows=10, ages=RowAges(column="at", expires=True, later=9, without=1))
    assert sum_up(0, "dedupe", [store(0, families=(timed,))]).never == 1


@pytest.mark.parametrize(
    "values, ratio, gini", [((5, 5, 5, 5), 1.0, 0.0), ((0, 0, 0, 8), 4.0, 0.75), ((0, 0), 1.0, 0.0)]
)
def test_skew_is_of_known_values(values: tuple[int, ...], ratio: float, gini: float) -> None:
    found = skew_of(dict(enumerate(values)))
    assert found is not None
    assert found.ratio == ratio
    assert found.gini == pytest.approx(gini)


def test_what_ssts_say_is_exact_only_if_all_were_read() -> None:
    stores = [store(0, sst_bytes=100), store(1, sst_bytes=300), store(2, rows=None, sst_bytes=50)]
    read = {StoreId(0, 0): (100, 10, 0, 1000), StoreId(0, 1): (150, 20, 5, 2000)}
    first, second, third = estimate(stores, read)
    assert (first.entries, first.entries_by, first.row_bytes, first.row_bytes_by) == (
        10,
        "properties",
        1000,
        "properties",
    )
    assert (second.entries, second.tombstones, second.entries_by) == (40, 10, "estimated")
    # A tenth of the bytes of 40 entries, for each of ten rows.
    assert (second.row_bytes, second.row_bytes_by) == (1000, "estimated")
    assert (third.entries, third.rows, third.rows_by) == (6, 4, "estimated")


def test_a_store_of_which_nothing_is_known_stays_unknown() -> None:
    (found,) = estimate([store(0, rows=None)], {})
    assert (found.rows, found.entries, found.row_bytes) == (None, None, None)


def test_advice_saves_what_it_says() -> None:
    written: dict[Kind, int] = {"changelog": 100, "snapshot": 10, "sst": 20, "log": 40}
    rate = RequestRate(
        first_batch=0,
        newest_batch=20,
        batches=20,
        window_ms=DAY_MS,
        longest_pause_ms=1,
        written=written,
        stored_bytes=0,
    )
    found = {
        of.setting.rpartition(".")[2]: of for of in advise([sum_up(0, "dedupe", [store(0), store(1)])], rate, Prices())
    }
    assert found["trigger"].requests_per_day == rate.requests_per_day() / 2 == (2 * 150 + 20) / 2
    assert found["minDeltasForSnapshot"].requests_per_day == (2 * 10 + 20) / 2
    assert found["partitions"].requests_per_day == (2 * 110 + 20) / 2
    assert found["checkpointFileManagerClass"].requests_per_day == 150
    assert found["trigger"].usd_per_day == pytest.approx(160 / 1000 * 0.005)
