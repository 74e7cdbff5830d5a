"""What a listing says of requests: made listings of which the rate is known."""

import msgspec
import pytest

from index.spark.requests import DAY_MS, Prices, RequestRate, kind_of, measure_requests

MINUTE_MS = 60_000


class Listed(msgspec.Struct, frozen=True):
    path: str
    modified_at_ms: int
    size_bytes: int = 1000


def checkpoint(
    batches: int, *, partitions: int = 3, every_ms: int = MINUTE_MS, snapshots_every: int = 2
) -> list[Listed]:
    """A batch a minute: offsets, a changelog with a checksum for each partition, a commit; snapshots now and then."""
    found = [Listed("metadata", 0)]
    for batch in range(batches):
        at_ms = 1_700_000_000_000 + batch * every_ms
        found.append(Listed(f"offsets/{batch}", at_ms + 1))
        for partition in range(partitions):
            state, version = f"state/0/{partition}", batch + 1
            found += [Listed(f"{state}/{version}_a.changelog{end}", at_ms + 2) for end in ("", ".crc")]
            if version % snapshots_every == 0:
                found.append(Listed(f"{state}/{version}_a.zip", at_ms + 3))
                found.append(Listed(f"{state}/SSTs/00{version}-b.sst", at_ms + 3))
        found.append(Listed(f"commits/{batch}", at_ms + 4))
    return found


def measured(files: list[Listed], **options: object) -> RequestRate:
    found = measure_requests(files, **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_objects_of_a_window_are_the_rate_of_a_day() -> None:
    found = measured(checkpoint(11))
    assert (found.first_batch, found.newest_batch, found.batches) == (0, 10, 10)
    assert found.written == {"log": 20, "changelog": 30, "checksum": 30, "snapshot": 15, "sst": 15}
    assert found.batches_per_day == 1440
    assert found.puts_per_day == 110 / 10 * 1440
    # All but SSTs are copied to their names.
    assert found.copies_per_day == 95 / 10 * 1440


def test_a_manager_that_does_not_rename_makes_one_request_for_each_object() -> None:
    found = measured(checkpoint(11), renames=False)
    assert found.copies_per_day == 0
    assert found.requests_per_day() == found.puts_per_day == sum(map(found.requests_per_day, found.written))


def test_a_price_is_of_a_thousand_requests_and_of_a_month_of_a_gigabyte() -> None:
    files = [*checkpoint(11), Listed("state/0/0/SSTs/000001-a.sst", 0, 30_440_000_000)]
    found, prices = measured(files), Prices(usd_per_1000_writes=0.01, usd_per_gb_month=0.1)
    assert found.requests_usd_per_day(prices) == pytest.approx(205 / 10 * 1440 / 1000 * 0.01)
    assert found.stored_usd_per_day(prices) == pytest.approx(0.1, rel=1e-4)


def test_a_pause_is_shown() -> None:
    files = checkpoint(5)
    files[-1] = Listed("commits/4", files[-1].modified_at_ms + DAY_MS)
    assert measured(files).longest_pause_ms == DAY_MS + MINUTE_MS


def test_the_window_begins_where_all_changelogs_are_there() -> None:
    deleted = {f"{version}_a" for version in range(1, 6)}
    files = [of for of in checkpoint(11) if of.path.rpartition("/")[2].partition(".")[0] not in deleted]
    found = measured(files)
    assert found.first_batch == 5
    assert found.written["changelog"] / found.batches == 3


@pytest.mark.parametrize("batches", [0, 1])
def test_one_batch_is_no_rate(batches: int) -> None:
    assert measure_requests(checkpoint(batches)) is None


def test_files_of_a_copy_say_nothing() -> None:
    logged = {batch: 1_700_000_000_000 + batch * MINUTE_MS for batch in (0, 10)}
    assert measure_requests(checkpoint(11), logged_at_ms=logged) is not None
    # Copied in order, ten times as fast as they were written.
    assert measure_requests(checkpoint(11, every_ms=6_000), logged_at_ms=logged) is None
    at_once = [msgspec.structs.replace(of, modified_at_ms=1) for of in checkpoint(11)]
    assert measure_requests(at_once) is None
    # As a checkout writes them, where nobody has logged times that differ by more.
    assert measure_requests(checkpoint(3, every_ms=1)) is None


@pytest.mark.parametrize(
    "path, kind",
    [
        ("metadata", None),
        ("offsets/7", "log"),
        ("commits/7.tmp", None),
        ("sources/0/3", "log"),
        ("state/0/1/7.changelog", "changelog"),
        ("state/0/1/7.delta", "changelog"),
        ("state/0/1/left-keyToNumValues/7_a.zip", "snapshot"),
        ("state/0/1/7_a.zip.crc", "checksum"),
        ("state/0/1/SSTs/000007-a.sst", "sst"),
        ("state/0/1/left-keyToNumValues/SSTs/000007-a.sst", "sst"),
        ("state/0/1/.7.changelog.1-2.TID1.tmp", None),
        ("state/0/_metadata/metadata", None),
        ("state/0/0/_metadata/schema", None),
        ("state/0/_stateSchema/default/0_a", None),
    ],
)
def test_a_path_is_of_a_kind(path: str, kind: str | None) -> None:
    assert kind_of(path) == kind
