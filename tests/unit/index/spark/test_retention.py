"""What a deletion takes and what it leaves, as tables."""

from collections.abc import Collection, Mapping

import pytest

from index.errors import LineageError
from index.snapshot.model import LineageItem, UniqueId
from index.spark.lineage import HeaderNeeded, Present, Resolution
from index.spark.names import StateVersion
from index.spark.retention import (
    BaseNeeded,
    Deletion,
    StateListing,
    choose_oldest_kept,
    deletion_is_due,
    find_base,
    find_orphan_files,
    plan_deletion,
    snapshots_to_delete,
)
from tests.unit.index.builders import latest_version


def v(text: str) -> StateVersion:
    number, _, unique_id = text.partition("_")
    return StateVersion(int(number), UniqueId(unique_id) if unique_id else None)


def vs(texts: str) -> tuple[StateVersion, ...]:
    return tuple(map(v, texts.split()))


def path(name: str) -> str:
    """A path as Spark makes it, another one for each name and in their order."""
    number = int.from_bytes(name.encode().ljust(8))
    return f"SSTs/{number:020d}-00000000-0000-4000-8000-000000000000.sst"


def listed(**names: int) -> dict[str, int]:
    """`a=3`: a file that stands for `a`, of the time 3."""
    return {path(name): time for name, time in names.items()}


def paths(names: str) -> tuple[str, ...]:
    return tuple(path(name) for name in names.split())


def listing_of(snapshots: str, changelogs: str = "") -> StateListing:
    return StateListing(snapshots=tuple(sorted(vs(snapshots))), changelogs=tuple(sorted(vs(changelogs))))


def standing_at(target: str, lineage: str = "") -> Resolution:
    """Of a caller whose memory reaches back to the first of these, a snapshot."""
    known = vs(lineage)
    items = tuple(LineageItem(of.version, of.unique_id) for of in known if of.unique_id is not None)
    return Resolution(v(target), known[0] if known else None, known[1:], items)


@pytest.mark.parametrize(
    "snapshots,retained,deleted_max,oldest",
    [
        pytest.param("2 3", 3, -1, 0, id="3: after version 3 nothing goes", marks=pytest.mark.spark_case(3)),
        pytest.param("2 3 5", 3, -1, 3, id="3: after version 5, 3 stays", marks=pytest.mark.spark_case(3)),
        pytest.param("3 5 8", 3, -1, 5, id="3: after version 8, 5 stays", marks=pytest.mark.spark_case(3)),
        pytest.param("1 2 3 4 5 6", 3, -1, 4, id="4: 4 to 6 stay", marks=pytest.mark.spark_case(4)),
        pytest.param("1 2 3 4 5 6", 3, 1, 2, id="5: one at once", marks=pytest.mark.spark_case(5)),
        pytest.param("2 3 4 5 6 7", 3, 1, 3, id="5: and one more", marks=pytest.mark.spark_case(5)),
        pytest.param("1 2 3 4 5", 3, 2, 3, id="6: 3 to 5 stay", marks=pytest.mark.spark_case(6)),
        pytest.param("3 4 5 6", 3, 2, 4, id="6: 4 to 6 stay", marks=pytest.mark.spark_case(6)),
        pytest.param("", 3, -1, 0, id="nothing is there"),
        pytest.param("7", 1, -1, 7, id="one snapshot stays"),
        pytest.param("2 10 20", 100, -1, 0, id="all are young"),
        pytest.param("1 10 20", 5, 3, 1, id="the next one is further away than may be deleted at once"),
        pytest.param("1_a 2_a 3_b", 1, -1, 3, id="versions count over all ids"),
    ],
)
def test_the_oldest_snapshot_that_stays(snapshots: str, retained: int, deleted_max: int, oldest: int) -> None:
    assert choose_oldest_kept(listing_of(snapshots), retained_min=retained, deleted_max=deleted_max) == oldest


@pytest.mark.parametrize(
    "current,oldest",
    [
        pytest.param(None, 12, id="nobody says: as in Spark"),
        pytest.param(14, 12, id="the query is at the newest version"),
        pytest.param(15, 12, id="the query has gone on without a snapshot"),
        pytest.param(7, 6, id="the query was taken back: version 7 and 6 can be loaded"),
        pytest.param(1, 0, id="the query was taken back before all snapshots"),
    ],
)
def test_versions_to_retain_are_counted_from_where_the_query_stands(current: int | None, oldest: int) -> None:
    needed = None if current is None else standing_at(str(current))
    assert choose_oldest_kept(listing_of("2 4 6 8 10 12 14"), retained_min=2, needed=needed) == oldest


@pytest.mark.parametrize(
    "snapshots,changelogs,needed,expected",
    [
        pytest.param("8_a 14_a 16_a", "14_a 15_a 16_a", ("16_a", "16_a"), 14, id="one history alone"),
        pytest.param("8_a 14_x 16_a", "14_a 15_a 16_a", ("16_a", "16_a"), BaseNeeded(15), id="14 is of a lost attempt"),
        pytest.param("8_a 14_x 16_a", "14_a 14_x 16_a", ("16_a", "16_a"), BaseNeeded(15), id="and it has a changelog"),
        pytest.param("8_a 14_a 16_a", "14_a 14_x 16_a", ("16_a", "16_a"), BaseNeeded(15), id="14 is the caller's own"),
        pytest.param("8_a 14_a 16_a", "14_a 14_x 16_a", ("16_a", "14_a 15_a 16_a"), 14, id="and the caller knows it"),
        pytest.param("8_a 14_a 14_x 16_a", "14_a 16_a", ("16_a", "16_a"), 14, id="all attempts have a snapshot"),
        pytest.param("8 14_x 16", "14 15 16", ("16", "16"), 8, id="a caller without ids needs nothing with one"),
    ],
)
def test_a_snapshot_that_may_be_of_another_history_is_no_base(
    snapshots: str, changelogs: str, needed: tuple[str, str], expected: int | BaseNeeded
) -> None:
    listing = listing_of(snapshots, changelogs)
    assert choose_oldest_kept(listing, retained_min=2, needed=standing_at(*needed)) == expected


@pytest.mark.parametrize(
    "snapshots,changelogs,retained,oldest",
    [
        pytest.param("2_a 6_a 8_a 14_a", "7_a 7_b", 2, 6, id="two histories part at 7, and either may count"),
        pytest.param("2_a 6_a 8_a 14_a", "6_a 7_a", 2, 8, id="one history"),
        pytest.param("2_a 6_a 6_b 14_a", "", 1, 6, id="both have a snapshot"),
        pytest.param("2_a 6_a 14_a", "6_b", 1, 2, id="one has none, and is on an older one"),
        pytest.param("2_a 6_a", "1_a 1_b", 1, 0, id="they part before all snapshots"),
    ],
)
def test_without_the_version_of_the_query_nothing_that_any_history_needs_is_deleted(
    snapshots: str, changelogs: str, retained: int, oldest: int
) -> None:
    assert choose_oldest_kept(listing_of(snapshots, changelogs), retained_min=retained) == oldest


def test_the_base_of_an_older_version_is_found_by_headers() -> None:
    present = Present(frozenset(vs("8_a 14_x 16_a")), frozenset(vs("9_a 10_a 11_a 14_x 14_a 15_a 16_a 12_a 13_a")))
    target, wanted = v("16_a"), BaseNeeded(15)
    assert find_base(wanted, target, present) == HeaderNeeded(v("16_a"))
    below = tuple(LineageItem(version, UniqueId("a")) for version in range(8, 16))
    found = find_base(wanted, target, present.with_headers({v("16_a"): below}))
    assert found == HeaderNeeded(v("15_a"))
    found = find_base(wanted, target, present.with_headers({v("16_a"): below, v("15_a"): below[:-1]}))
    assert isinstance(found, Resolution)
    assert (found.target, found.base) == (v("15_a"), v("8_a"))


def test_an_older_version_that_headers_do_not_lead_to_has_no_base() -> None:
    present = Present(frozenset(vs("8_a 14_x")), frozenset(vs("14_a 15_a 16_a")))
    with pytest.raises(LineageError):
        find_base(BaseNeeded(15), v("16_a"), present.with_headers({v("16_a"): ()}))


@pytest.mark.parametrize(
    "oldest_seen,newest_seen,deleted_min,due",
    [
        pytest.param(1, 5, 3, False, id="two are stale"),
        pytest.param(1, 6, 3, True, id="three are stale"),
        pytest.param(4, 8, 3, False, id="after a deletion it counts from what that kept"),
        pytest.param(1, None, 3, True, id="nobody knows: look"),
        pytest.param(1, 1, 0, True, id="nothing to wait for"),
    ],
)
def test_when_a_deletion_is_worth_a_listing(
    oldest_seen: int, newest_seen: int | None, deleted_min: int, due: bool
) -> None:
    found = deletion_is_due(oldest_seen=oldest_seen, newest_seen=newest_seen, retained_min=3, deleted_min=deleted_min)
    assert found is due


def test_a_listing_is_sorted_out_by_what_the_names_say() -> None:
    names = ["10.zip", "9_b.zip", "9_a.zip", "9.zip", "11_a.changelog", "9_a.zip.crc", ".9.zip.crc", "x.zip", "SSTs"]
    listing = StateListing.of_names(names)
    assert listing.snapshots == vs("9 9_a 9_b 10")
    assert listing.changelogs == vs("11_a")
    assert [(str(file.of), file.kind) for file in listing.checksums] == [("9_a", "snapshot")]
    assert (latest_version(listing), listing.latest_snapshot_version) == (11, 10)
    assert latest_version(StateListing()) == 0


ZIPS, CHANGELOGS = "1_a.zip 1_b.zip 2_a.zip 3_a.zip", "1_a.changelog 2_b.changelog 3_a.changelog"
CHECKSUMS = "1_b.zip.crc 2_z.changelog.crc 3_a.zip.crc"
LISTING = StateListing.of_names(f"{ZIPS} {CHANGELOGS} {CHECKSUMS}".split())
FILES_OF = {
    v("1_a"): paths("one shared"),
    v("1_b"): paths("lost"),
    v("2_a"): paths("shared two"),
    v("3_a"): paths("two three"),
}
THERE = listed(one=10, shared=10, lost=10, two=20, three=30, older=5, younger=25)


def planned(
    files_of: Mapping[StateVersion, Collection[str]],
    there: Mapping[str, int],
    *,
    oldest_kept: int,
    needed: Resolution | None = None,
) -> Deletion:
    going = snapshots_to_delete(LISTING.snapshots, oldest_kept, needed)
    return plan_deletion(LISTING, going, files_of, there, oldest_kept=oldest_kept, needed=needed)


def test_everything_below_the_oldest_that_stays_goes_of_every_id() -> None:
    plan = planned(FILES_OF, THERE, oldest_kept=3)
    assert plan.snapshots == vs("1_a 1_b 2_a")
    assert plan.changelogs == vs("1_a 2_b")
    assert set(plan.unnamed) == set(paths("lost one shared"))
    assert plan.orphans == paths("older")
    assert [str(file.of) for file in plan.checksums] == ["1_b", "2_z"]


def test_a_file_that_a_snapshot_which_stays_names_stays() -> None:
    plan = planned(FILES_OF, THERE, oldest_kept=2)
    assert (plan.snapshots, plan.unnamed) == (vs("1_a 1_b"), paths("lost one"))


def test_nothing_goes_where_no_snapshot_goes() -> None:
    assert snapshots_to_delete(LISTING.snapshots, 1, None) == ()


def test_what_the_callers_version_is_made_of_stays_with_its_checksums() -> None:
    needed = Resolution(v("2_b"), v("1_b"), vs("2_b"))
    plan = planned(FILES_OF, THERE, oldest_kept=3, needed=needed)
    assert plan.snapshots == vs("1_a 2_a")
    assert plan.changelogs == vs("1_a")
    assert plan.unnamed == paths("one shared")
    assert [str(file.of) for file in plan.checksums] == ["2_z"]


def test_what_only_a_snapshot_names_that_cannot_be_read_is_judged_as_an_orphan() -> None:
    files_of = {of: named for of, named in FILES_OF.items() if of != v("1_b")}
    plan = planned(files_of, listed(one=10, shared=10, two=20, three=30, lost=9), oldest_kept=3)
    assert (plan.unnamed, plan.orphans) == (paths("one shared"), paths("lost"))


@pytest.mark.parametrize(
    "named,there,snapshots,orphans",
    [
        pytest.param("a b", listed(a=10, b=20, old=9), 2, "old", id="older than all that is named"),
        pytest.param("a b", listed(a=10, b=20, same=10), 2, "", id="as old as the oldest that is named"),
        pytest.param("a b", listed(a=10, b=20, young=15), 2, "", id="younger than one: its snapshot may be under way"),
        pytest.param("a b", listed(a=10, b=20, old=9), 1, "", id="one snapshot"),
        pytest.param("", listed(old=9), 2, "", id="nothing is named"),
        pytest.param("gone", listed(old=9), 2, "", id="nothing that is named is there"),
        pytest.param("a gone", listed(a=10, old=9), 2, "old", id="one that is named is not there"),
    ],
)
@pytest.mark.spark_case(16, 17)
def test_orphans(named: str, there: dict[str, int], snapshots: int, orphans: str) -> None:
    assert find_orphan_files(paths(named), there, snapshots=snapshots) == paths(orphans)


@pytest.mark.parametrize(
    "foreign",
    [
        "SSTs/my-backup.sst",
        "SSTs/000001.sst",
        "logs/driver.log",
        "SSTs/notes.txt",
        "SSTs/000001-00000000-0000-4000-8000-000000000000.log",
        "logs/000001-00000000-0000-4000-8000-000000000000.sst",
        "SSTs/x000001-00000000-0000-4000-8000-000000000000.sst",
    ],
)
def test_what_spark_would_not_have_named_is_no_orphan(foreign: str) -> None:
    there = {**listed(a=10, b=20, old=9), foreign: 1}
    assert find_orphan_files(paths("a b"), there, snapshots=2) == paths("old")


def test_a_named_file_counts_for_the_age_of_orphans_whatever_its_name() -> None:
    there = {"SSTs/strange.sst": 5, **listed(a=10, younger=6)}
    assert find_orphan_files(("SSTs/strange.sst", *paths("a")), there, snapshots=2) == ()
