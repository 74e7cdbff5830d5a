"""Which snapshot and which changelogs make a version, in every form that a directory can have (design 0004, 5)."""

import re

import pytest

from index.errors import LineageError, UnsafeNameError, VersionMissingError
from index.snapshot.model import DirIndex, LineageItem, SnapshotIndex, SnapshotMetadata, UniqueId
from index.spark.lineage import HeaderNeeded, Lineage, Present, Resolution, present_in_index, resolve, target_in_index
from index.spark.names import STATE_VERSION_MAX, StateVersion
from tests.unit.index.builders import SESSION, file_index

A = UniqueId("a")


def v(text: str) -> StateVersion:
    number, _, unique_id = text.partition("_")
    return StateVersion(int(number), UniqueId(unique_id) if unique_id else None)


def resolve_index(version: int, unique_id: UniqueId | None, index: SnapshotIndex) -> Resolution | HeaderNeeded:
    """Resolve from an index alone: no listing, and no header where the index has the lineage (design 0004, R6)."""
    return resolve(version, target_in_index(version, unique_id, index), present_in_index(index))


def items(*texts: str) -> Lineage:
    parsed = (v(text) for text in texts)
    return tuple(LineageItem(of.version, of.unique_id) for of in parsed if of.unique_id is not None)


def present(names: str, **headers: tuple[str, ...]) -> Present:
    """Names separated by spaces, `.c` for `.changelog`; `h5_a=("4_a",)` for the header of 5_a."""
    result = Present.of_names(re.sub(r"\.c\b", ".changelog", names).split())
    for of, lineage in headers.items():
        result = result.with_headers({v(of[1:]): items(*lineage)})
    return result


def answer(target: str, base: str | None, changelogs: str = "", lineage: str = "") -> Resolution:
    return Resolution(
        v(target), None if base is None else v(base), tuple(map(v, changelogs.split())), items(*lineage.split())
    )


def index_of(names: str, version: int, unique_id: str, *lineage: str) -> SnapshotIndex:
    files = re.sub(r"\.c\b", ".changelog", names).split()
    ancestors = items(*lineage)
    return SnapshotIndex(
        metadata=SnapshotMetadata(
            job="job",
            task="Partition 0",
            store="default",
            version=version,
            unique_id=UniqueId(unique_id),
            base=ancestors[-1] if ancestors else None,
            lineage=ancestors,
        ),
        session=SESSION,
        dir=DirIndex("", files_present=tuple(file_index(name) for name in files), sub_dirs_present=(DirIndex("SSTs"),)),
    )


def test_a_listing_is_sorted_into_snapshots_and_changelogs_and_foreign_names_are_passed_over() -> None:
    found = present("3.zip 3.zip.crc 4_a.c 4_a.c.crc .4_a.c.crc SSTs _metadata x.zip 05.c 4.delta")
    assert found == Present(frozenset({v("3")}), frozenset({v("4_a")}))


# --- without ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names,version,expected",
    [
        pytest.param("3.zip", 3, answer("3", "3"), id="i.b: the snapshot of the version itself"),
        pytest.param("2.zip 3.zip 3.c 4.zip", 3, answer("3", "3"), id="i.b: the changelog beside it is not read"),
        pytest.param("1.c 2.c 3.c", 3, answer("3", None, "1 2 3"), id="ii.b: all changelogs from nothing"),
        pytest.param("2.zip 1.c 2.c 3.c 4.c", 4, answer("4", "2", "3 4"), id="ii.b: the newest snapshot below"),
        pytest.param("2.zip 4.zip 3.c 4.c 5.c", 5, answer("5", "4", "5"), id="ii.b: the newest of two"),
        pytest.param("2.zip 6.zip 3.c 4.c 5.c", 4, answer("4", "2", "3 4"), id="ii.b: never one above the version"),
        pytest.param("2.zip 4.c 4.zip 5.c", 5, answer("5", "4", "5"), id="a gap below the snapshot does not matter"),
        pytest.param("2.zip 4_a.zip 3.c 4.c 4_a.c", 4, answer("4", "2", "3 4"), id="files with ids do not count"),
        pytest.param("0.zip 1.c", 1, answer("1", None, "1"), id="version 0 has no file"),
        pytest.param("", 0, answer("0", None), id="version 0 of an empty directory"),
        pytest.param("1.zip 1.c", 0, answer("0", None), id="version 0 is empty whatever there is"),
    ],
)
def test_a_version_without_id_is_found_by_numbers(names: str, version: int, expected: Resolution) -> None:
    assert resolve(version, None, present(names)) == expected


@pytest.mark.spark_case(9)
def test_changelogs_that_go_on_from_snapshots_and_back_are_both_read() -> None:
    """Off, on and off again: each version needs what was on when it was written."""
    files = present("1.zip 2.zip 3.c 4.c 5.zip 6.zip")
    assert [resolve(version, None, files) for version in (2, 4, 6)] == [
        answer("2", "2"),
        answer("4", "2", "3 4"),
        answer("6", "6"),
    ]


@pytest.mark.spark_case(2)
@pytest.mark.parametrize(
    "names,version,message",
    [
        ("", -1, r"version -1: does not exist"),
        ("", STATE_VERSION_MAX + 1, r"does not exist"),
        ("", 1, r"version 1: .*1\.changelog is not there.*versions 1$"),
        ("1.zip 2.c", 4, r"version 4: .*3\.changelog is not there.*versions 3 to 4$"),
        ("1.zip 2.c 4.c 7.c", 9, r"3\.changelog is not there.*versions 3, 5 to 6, 8 to 9$"),
        ("3.zip 4.c", 2, r"1\.changelog is not there"),
        ("", STATE_VERSION_MAX, r"1\.changelog is not there.*versions 1 to 9223372036854775807$"),
        (" ".join(f"{n}.c" for n in range(2, 60, 2)), 60, r"versions 1, 3, 5, 7, 9, more$"),
    ],
)
def test_a_version_that_is_not_there_is_an_error_that_names_what_is_missing(
    names: str, version: int, message: str
) -> None:
    with pytest.raises(VersionMissingError, match=message) as error:
        resolve(version, None, present(names))
    assert error.value.hint


def test_asking_without_an_id_for_what_has_ids_is_an_error() -> None:
    with pytest.raises(VersionMissingError) as error:
        resolve(4, None, present("3_a.zip 4_a.c"))
    assert "unique id" in error.value.hint


# --- with ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files,target,expected",
    [
        pytest.param(present("4_a.zip"), "4_a", answer("4_a", "4_a", "", "4_a"), id="i.a: no header is read"),
        pytest.param(
            present("4_a.zip 4_a.c"), "4_a", answer("4_a", "4_a", "", "4_a"), id="i.a: the snapshot is the truth"
        ),
        pytest.param(
            present("2_b.zip 3_c.c 4_a.c", h4_a=("2_b", "3_c")),
            "4_a",
            answer("4_a", "2_b", "3_c 4_a", "2_b 3_c 4_a"),
            id="ii.a: the base is where the lineage begins",
        ),
        pytest.param(
            present("2_b.zip 3_c.c 3_c.zip 4_a.c", h4_a=("2_b", "3_c")),
            "4_a",
            answer("4_a", "3_c", "4_a", "3_c 4_a"),
            id="ii.a: the newest snapshot in the lineage, uploaded after the header was written",
        ),
        pytest.param(
            present("1_b.c 2_a.c", h2_a=("1_b",)),
            "2_a",
            answer("2_a", None, "1_b 2_a", "1_b 2_a"),
            id="ii.a: from nothing",
        ),
        pytest.param(present("1_a.c"), "1_a", answer("1_a", None, "1_a", "1_a"), id="ii.a: version 1 needs no header"),
        pytest.param(
            present("2_b.zip 2_x.zip 3_x.zip 3_c.c 3_x.c 4_x.c 4_x.zip 4_a.c", h4_a=("2_b", "3_c")),
            "4_a",
            answer("4_a", "2_b", "3_c 4_a", "2_b 3_c 4_a"),
            id="R1: snapshots of other ids never count",
        ),
        pytest.param(
            present("2.zip 3.zip 4.zip 2_b.zip 3_c.c 4_a.c", h4_a=("2_b", "3_c")),
            "4_a",
            answer("4_a", "2_b", "3_c 4_a", "2_b 3_c 4_a"),
            id="R1: nor do snapshots without an id",
        ),
        pytest.param(
            present("2_b.zip 3_c.c 4_a.c", h4_a=("3_c", "2_b")),
            "4_a",
            answer("4_a", "2_b", "3_c 4_a", "2_b 3_c 4_a"),
            id="a header in another order",
        ),
        pytest.param(
            present("1_a.c 2_a.c 3_a.c 4_a.c 5_a.c", h5_a=("3_a", "4_a"), h3_a=("1_a", "2_a")),
            "5_a",
            answer("5_a", None, "1_a 2_a 3_a 4_a 5_a", "1_a 2_a 3_a 4_a 5_a"),
            id="R5: an older base hop by hop",
        ),
    ],
)
def test_a_version_with_an_id_is_found_by_its_lineage(files: Present, target: str, expected: Resolution) -> None:
    of = v(target)
    assert resolve(of.version, of.unique_id, files) == expected


@pytest.mark.spark_case(10)
def test_two_histories_in_one_directory_never_meet() -> None:
    names = " ".join(f"{n}_{u}.c {n}_{u}.zip" if n % 3 == 0 else f"{n}_{u}.c" for n in range(1, 11) for u in "ab")
    files = present(names, h10_a=("9_a",), h10_b=("9_b",), h8_a=("6_a", "7_a"), h8_b=("6_b", "7_b"))
    for unique_id in "ab":
        assert resolve(10, UniqueId(unique_id), files) == answer(
            f"10_{unique_id}", f"9_{unique_id}", f"10_{unique_id}", f"9_{unique_id} 10_{unique_id}"
        )
        other = resolve(8, UniqueId(unique_id), files)
        assert isinstance(other, Resolution)
        assert {of.unique_id for of in (other.base, *other.changelogs) if of is not None} == {unique_id}


@pytest.mark.spark_case(43)
def test_a_late_snapshot_of_an_attempt_that_lost_is_ignored() -> None:
    files = present("1_a.c 2_lost.c 2_lost.zip 2_a.c 3_a.c", h3_a=("1_a", "2_a"))
    assert resolve(3, A, files) == answer("3_a", None, "1_a 2_a 3_a", "1_a 2_a 3_a")


@pytest.mark.spark_case(34)
def test_changelogs_switched_off_and_on_again_under_ids_are_followed() -> None:
    files = present("1_a.c 2_a.c 3_a.zip 4_a.zip 5_a.c 6_a.c 7_a.zip", h6_a=("4_a", "5_a"), h2_a=("1_a",))
    assert resolve(2, A, files) == answer("2_a", None, "1_a 2_a", "1_a 2_a")
    assert resolve(4, A, files) == answer("4_a", "4_a", "", "4_a")
    assert resolve(6, A, files) == answer("6_a", "4_a", "5_a 6_a", "4_a 5_a 6_a")
    assert resolve(7, A, files) == answer("7_a", "7_a", "", "7_a")


def test_the_header_of_the_target_is_asked_for_and_then_used() -> None:
    files = present("2_b.zip 3_c.c 4_a.c")
    assert resolve(4, A, files) == HeaderNeeded(v("4_a"))
    assert resolve(4, A, files.with_headers({v("4_a"): items("2_b", "3_c")})) == answer(
        "4_a", "2_b", "3_c 4_a", "2_b 3_c 4_a"
    )


@pytest.mark.spark_case(26)
def test_a_snapshot_that_does_not_open_is_put_aside_and_an_older_one_is_found() -> None:
    files = present(
        "2_a.zip 3_a.c 4_a.c 5_a.c 5_a.zip 6_a.c 7_a.c 7_a.zip", h7_a=("5_a", "6_a"), h5_a=("2_a", "3_a", "4_a")
    )
    assert resolve(7, A, files) == answer("7_a", "7_a", "", "7_a")
    files = files.without_snapshot(v("7_a"))
    assert resolve(7, A, files) == answer("7_a", "5_a", "6_a 7_a", "5_a 6_a 7_a")
    files = files.without_snapshot(v("5_a"))
    assert resolve(7, A, files) == answer("7_a", "2_a", "3_a 4_a 5_a 6_a 7_a", "2_a 3_a 4_a 5_a 6_a 7_a")
    with pytest.raises(VersionMissingError, match=r"neither 2_a\.zip nor 2_a\.changelog is there"):
        resolve(7, A, files.without_snapshot(v("2_a")))


@pytest.mark.spark_case(26)
def test_without_ids_an_older_snapshot_or_nothing_is_the_base_when_newer_ones_are_put_aside() -> None:
    files = present("1.c 2.c 2.zip 3.c 4.c 4.zip")
    files = files.without_snapshot(v("4"))
    assert resolve(4, None, files) == answer("4", "2", "3 4")
    assert resolve(4, None, files.without_snapshot(v("2"))) == answer("4", None, "1 2 3 4")


@pytest.mark.parametrize(
    "files,version,unique_id,message",
    [
        pytest.param(present("4_b.c 4_b.zip 4.zip"), 4, "a", r"4_a\.changelog is there.*only 4, 4_b$", id="the target"),
        pytest.param(present("4_a.c", h4_a=("3_a",)), 4, "a", r"neither 3_a\.zip nor 3_a\.changelog", id="the base"),
        pytest.param(
            present("2_a.zip 4_a.c", h4_a=("2_a", "3_a")), 4, "a", r"neither 3_a\.zip nor 3_a\.ch", id="one in between"
        ),
        pytest.param(present("4_a.c", h4_a=()), 4, "a", r"1\.changelog is not there.*versions 1 to 3$", id="below V2"),
    ],
)
def test_a_file_that_a_lineage_needs_and_that_is_gone_is_named(
    files: Present, version: int, unique_id: str, message: str
) -> None:
    with pytest.raises(VersionMissingError, match=message) as error:
        resolve(version, UniqueId(unique_id), files)
    assert error.value.hint


@pytest.mark.parametrize(
    "header",
    [
        ("2_a",),
        ("5_a",),
        ("6_a",),
        ("3_a", "4_a", "5_b"),
        ("3_a", "4_a", "4_b"),
        ("2_a", "4_a"),
        (f"{2**62}_a",),
        ("0_a",),
    ],
)
def test_a_header_that_does_not_lead_back_by_ones_is_an_error(header: tuple[str, ...]) -> None:
    files = present("1_a.zip 2_a.zip 2_a.c 3_a.c 3_a.zip 5_a.c", h5_a=header, h2_a=("5_a",))
    with pytest.raises(LineageError, match=r"^5_a\.changelog: ") as error:
        resolve(5, A, files)
    assert error.value.hint


def test_a_header_that_reaches_version_0_is_an_error() -> None:
    files = present("0_a.c 1_a.c 2_a.c", h2_a=("0_a", "1_a"), h0_a=())
    with pytest.raises(LineageError, match="names version 0_a"):
        resolve(2, A, files)


def test_headers_that_lead_in_a_circle_are_an_error() -> None:
    files = present("4_a.c 5_a.c", h5_a=("4_a",), h4_a=("5_a",))
    with pytest.raises(LineageError, match="not a version below 4"):
        resolve(5, A, files)


def test_version_0_has_no_id_and_an_id_is_safe() -> None:
    with pytest.raises(LineageError, match="empty version"):
        resolve(0, A, present(""))
    with pytest.raises(UnsafeNameError):
        resolve(3, UniqueId("../3"), present(""))


# --- V1 continued as V2 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files,target,expected",
    [
        pytest.param(
            present("4.zip 5_a.c", h5_a=()), "5_a", answer("5_a", "4", "5_a", "5_a"), id="the base is the last V1 zip"
        ),
        pytest.param(
            present("2.zip 3.c 4.c 5_a.c 6_a.c", h6_a=("5_a",), h5_a=()),
            "6_a",
            answer("6_a", "2", "3 4 5_a 6_a", "5_a 6_a"),
            id="V1 changelogs below V2 changelogs",
        ),
        pytest.param(
            present("1.c 2_a.c", h2_a=()), "2_a", answer("2_a", None, "1 2_a", "2_a"), id="V1 from nothing below V2"
        ),
        pytest.param(
            present("4.zip 5_a.c 6_a.c 6_a.zip 7_a.c", h7_a=("5_a", "6_a")),
            "7_a",
            answer("7_a", "6_a", "7_a", "6_a 7_a"),
            id="a V2 snapshot later: V1 is not needed any more",
        ),
        pytest.param(
            present("4.zip 5.zip 5.c 6.zip 5_a.c 6_a.c", h6_a=("5_a",), h5_a=()),
            "6_a",
            answer("6_a", "4", "5_a 6_a", "5_a 6_a"),
            id="V1 files above the change belong to another history",
        ),
        pytest.param(
            present("4.zip 5_a.zip 6_a.c", h6_a=("5_a",)),
            "6_a",
            answer("6_a", "5_a", "6_a", "5_a 6_a"),
            id="the first V2 version is a snapshot",
        ),
    ],
)
def test_a_directory_that_went_from_v1_to_v2_is_read_across_the_change(
    files: Present, target: str, expected: Resolution
) -> None:
    of = v(target)
    assert resolve(of.version, of.unique_id, files) == expected


def test_whether_v1_stands_below_is_read_and_never_guessed() -> None:
    """The lineage of 7 begins with 5; that version 4 has no id is known only from the header of 5."""
    files = present("4.zip 5_a.c 6_a.c 7_a.c", h7_a=("5_a", "6_a"))
    assert resolve(7, A, files) == HeaderNeeded(v("5_a"))
    assert resolve(7, A, files.with_headers({v("5_a"): ()})) == answer("7_a", "4", "5_a 6_a 7_a", "5_a 6_a 7_a")


def test_v1_versions_are_still_found_after_the_change() -> None:
    assert resolve(4, None, present("2.zip 3.c 4.c 5_a.c 6_a.zip")) == answer("4", "2", "3 4")


def test_a_v1_snapshot_that_does_not_open_is_put_aside_below_v2_too() -> None:
    files = present("2.zip 3.c 4.c 4.zip 5_a.c", h5_a=())
    assert resolve(5, A, files.without_snapshot(v("4"))) == answer("5_a", "2", "3 4 5_a", "5_a")


# --- from a snapshot index --------------------------------------------------------------------------------------------


def test_an_index_answers_from_its_lineage_without_any_header() -> None:
    index = index_of("2_b.zip 3_c.c 4_a.c 4_x.c 4_x.zip 4_a.c.crc", 4, "a", "2_b", "3_c")
    assert resolve_index(4, A, index) == answer("4_a", "2_b", "3_c 4_a", "2_b 3_c 4_a")


def test_an_index_answers_for_older_versions_of_its_lineage() -> None:
    index = index_of("1_a.c 2_b.c 2_b.zip 3_c.c 4_a.c", 4, "a", "1_a", "2_b", "3_c")
    assert resolve_index(3, UniqueId("c"), index) == answer("3_c", "2_b", "3_c", "2_b 3_c")
    assert resolve_index(1, A, index) == answer("1_a", None, "1_a", "1_a")


def test_an_index_whose_lineage_begins_at_version_1_needs_no_header() -> None:
    index = index_of("1_a.c 2_b.c", 2, "b", "1_a")
    assert resolve_index(2, UniqueId("b"), index) == answer("2_b", None, "1_a 2_b", "1_a 2_b")


def test_an_index_with_a_gap_in_its_lineage_asks_for_a_header_of_its_own_files() -> None:
    """Such as the lineage of backups, which were not made of every version."""
    index = index_of("2_a.zip 3_a.c 4_a.c 5_a.c", 5, "a", "2_a", "4_a")
    assert resolve_index(5, A, index) == HeaderNeeded(v("4_a"))
    known = present_in_index(index).with_headers({v("4_a"): items("2_a", "3_a")})
    assert resolve(5, target_in_index(5, A, index), known) == answer("5_a", "2_a", "3_a 4_a 5_a", "2_a 3_a 4_a 5_a")


def test_an_index_without_a_lineage_asks_for_the_header_of_the_target() -> None:
    index = index_of("2_a.zip 3_a.c 4_a.c", 4, "a")
    assert resolve_index(4, A, index) == HeaderNeeded(v("4_a"))


def test_an_index_with_the_snapshot_of_the_target_needs_no_lineage() -> None:
    assert resolve_index(4, A, index_of("4_a.zip", 4, "a")) == answer("4_a", "4_a", "", "4_a")


def test_an_index_across_the_change_from_v1_asks_for_the_one_header_that_decides() -> None:
    index = index_of("4.zip 5_a.c 6_a.c", 6, "a", "5_a")
    assert resolve_index(6, A, index) == HeaderNeeded(v("5_a"))


def test_an_index_of_a_v1_directory_answers_to_numbers_and_to_the_id_of_the_backup() -> None:
    index = index_of("2.zip 3.c 4.c", 4, "backup-17", "3_backup-16")
    assert resolve_index(4, None, index) == answer("4", "2", "3 4")
    assert resolve_index(4, UniqueId("backup-17"), index) == answer("4", "2", "3 4")
    with pytest.raises(VersionMissingError):
        resolve_index(3, UniqueId("backup-16"), index)


def test_an_index_never_answers_for_an_id_with_files_of_no_id_where_it_has_that_id() -> None:
    index = index_of("4.zip 4_a.c", 4, "a", "3_a")
    with pytest.raises(VersionMissingError, match=r"3_a\.zip"):
        resolve_index(4, A, index)


def test_an_index_lacking_a_file_that_it_needs_names_it() -> None:
    index = index_of("2_a.zip 4_a.c", 4, "a", "2_a", "3_a")
    with pytest.raises(VersionMissingError, match=r"neither 3_a\.zip nor 3_a\.changelog is there"):
        resolve_index(4, A, index)


def test_an_index_of_a_plain_directory_is_refused() -> None:
    index = index_of("CURRENT MANIFEST-000005 000008.sst", 4, "a")
    with pytest.raises(VersionMissingError, match="default at version 4: holds no snapshot or changelog") as error:
        resolve_index(4, A, index)
    assert "plain directory" in error.value.hint


def test_many_headers_become_known_in_one_copy() -> None:
    headers = {v("2_a"): items("1_a"), v("3_a"): items("2_a")}
    files = present("1_a.zip 2_a.changelog 3_a.changelog").with_headers({v("2_a"): ()})
    known = files.with_headers(headers)
    assert known.headers == headers
    assert files.headers == {v("2_a"): ()}
    assert resolve(3, A, known) == answer("3_a", "1_a", "2_a 3_a", "1_a 2_a 3_a")
