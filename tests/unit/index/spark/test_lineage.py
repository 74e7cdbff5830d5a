"""Lineages as text, and the walk back along them."""

import pytest

from index.errors import LineageError, UnsafeNameError
from index.snapshot.model import LineageItem, UniqueId
from index.spark.lineage import (
    LINEAGE_BYTES_MAX,
    HeaderNeeded,
    Lineage,
    decode_lineage,
    encode_lineage,
    full_lineage,
    lineage_fits,
)
from index.spark.names import STATE_VERSION_MAX, StateVersion

UUID = "f10aed9c-63f0-487b-b598-8011971eae1b"


def item(version: int, unique_id: str | None = None) -> LineageItem:
    return LineageItem(version, UniqueId(unique_id or f"i{version}"))


def of(version: int, unique_id: str | None = None) -> StateVersion:
    return StateVersion(version, UniqueId(unique_id or f"i{version}"))


def items(*versions: int) -> Lineage:
    return tuple(item(version) for version in versions)


# What Spark 4.3.0 itself wrote into the header of a changelog.
SPARK_TEXT = (
    '[{"version":3,"checkpointUniqueId":"f10aed9c-63f0-487b-b598-8011971eae1b"},'
    '{"version":4,"checkpointUniqueId":"0a2b7c11-5d0e-4a5c-9d27-5a1a3f0b9a01"}]'
)
SPARK_ITEMS = (item(3, UUID), item(4, "0a2b7c11-5d0e-4a5c-9d27-5a1a3f0b9a01"))


def test_a_lineage_is_written_and_read_as_spark_does() -> None:
    assert encode_lineage(SPARK_ITEMS) == SPARK_TEXT
    assert decode_lineage(SPARK_TEXT) == SPARK_ITEMS
    assert encode_lineage(()) == "[]"
    assert decode_lineage("[]") == ()


def test_unknown_fields_and_spaces_of_a_lineage_are_passed_over_and_its_order_is_kept() -> None:
    text = '[ {"checkpointUniqueId": "b", "more": [1], "version": 4}, {"version": 3, "checkpointUniqueId": "a"} ]'
    assert decode_lineage(text) == (item(4, "b"), item(3, "a"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "{}",
        "[1]",
        "[{}]",
        '[{"version":3}]',
        '[{"version":"3","checkpointUniqueId":"a"}]',
        '[{"version":3.5,"checkpointUniqueId":"a"}]',
        '[{"version":0,"checkpointUniqueId":"a"}]',
        '[{"version":-1,"checkpointUniqueId":"a"}]',
        '[{"version":9223372036854775808,"checkpointUniqueId":"a"}]',
        '[{"version":3,"checkpointUniqueId":null}]',
        "[" * 100_000,
        '["\ud800"]',
    ],
)
def test_what_is_no_lineage_is_refused(text: str) -> None:
    with pytest.raises(LineageError):
        decode_lineage(text)


@pytest.mark.parametrize("unique_id", ["../../x", "a_b", "", "a/b"])
def test_an_id_that_would_lead_to_another_file_is_refused(unique_id: str) -> None:
    with pytest.raises(UnsafeNameError):
        decode_lineage(f'[{{"version":3,"checkpointUniqueId":"{unique_id}"}}]')


def test_a_lineage_fits_as_long_as_java_can_write_it() -> None:
    """As measured with Spark: 850 items of three digits fit a header, 880 fail the commit."""
    chain = [LineageItem(version, UniqueId(UUID)) for version in range(1, 881)]
    assert lineage_fits(chain[:850])
    assert not lineage_fits(chain)
    most = max(count for count in range(850, 881) if lineage_fits(chain[:count]))
    assert len(encode_lineage(chain[:most])) <= LINEAGE_BYTES_MAX < len(encode_lineage(chain[: most + 1]))


@pytest.mark.spark_case(28)
def test_one_changelog_covers_the_whole_range() -> None:
    # In descending order, as Spark's own test has it.
    headers = {of(5): (item(4), item(3))}
    assert full_lineage(3, item(5), headers) == items(3, 4, 5)


@pytest.mark.spark_case(28)
def test_what_a_changelog_knows_below_the_start_is_left_out() -> None:
    assert full_lineage(4, item(5), {of(5): items(2, 3, 4)}) == items(4, 5)


@pytest.mark.spark_case(29)
def test_a_lineage_is_followed_over_several_changelogs() -> None:
    headers = {of(3): items(1, 2), of(5): items(3, 4)}
    assert full_lineage(1, item(5), headers) == items(1, 2, 3, 4, 5)


@pytest.mark.spark_case(29)
def test_the_changelog_to_read_next_is_named_hop_by_hop() -> None:
    assert full_lineage(1, item(5), {}) == HeaderNeeded(of(5))
    assert full_lineage(1, item(5), {of(5): items(3, 4)}) == HeaderNeeded(of(3))


@pytest.mark.spark_case(30)
def test_another_lineage_of_the_same_version_is_not_followed() -> None:
    headers = {of(3): items(1, 2), of(5): items(3, 4), of(5, "i5bad"): (item(4, "i4bad"),)}
    assert full_lineage(1, item(5), headers) == items(1, 2, 3, 4, 5)


@pytest.mark.spark_case(31)
def test_a_start_that_is_the_end_takes_no_file() -> None:
    assert full_lineage(7, item(7), {}) == items(7)


@pytest.mark.spark_case(32)
def test_a_missing_version_in_between_is_an_error_that_names_it() -> None:
    with pytest.raises(LineageError, match=r"5_i5\.changelog.*not increasing by one.*versions 4$") as error:
        full_lineage(3, item(5), {of(5): items(3)})
    assert error.value.hint


@pytest.mark.spark_case(32)
def test_a_lineage_that_does_not_reach_its_own_changelog_is_an_error() -> None:
    with pytest.raises(LineageError, match=r"versions 5 to 8$"):
        full_lineage(3, item(9), {of(9): items(3, 4)})


@pytest.mark.spark_case(33)
def test_a_lineage_without_progress_is_an_error() -> None:
    with pytest.raises(LineageError, match="Cannot find version smaller than 5"):
        full_lineage(3, item(5), {of(5): ()})


@pytest.mark.spark_case(33)
@pytest.mark.parametrize("header", [items(5), items(4, 5), items(6), items(3, 4, 4), items(STATE_VERSION_MAX)])
def test_a_lineage_that_does_not_lead_back_is_an_error_and_no_endless_walk(header: Lineage) -> None:
    with pytest.raises(LineageError, match="not a version below"):
        full_lineage(3, item(5), {of(5): header, of(6): items(5)})


@pytest.mark.parametrize("start", [-1, 0, 8])
def test_a_start_outside_the_history_is_refused(start: int) -> None:
    with pytest.raises(LineageError, match="cannot start"):
        full_lineage(start, item(7), {})
