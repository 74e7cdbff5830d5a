"""Where the files of merged stores go (design 0010, R1 to R4); real stores are in tests/unit/engine/rocksdb."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.errors import StoreMergeError
from index.rocksdb.manifest import BYTEWISE, ManifestFamily, ManifestFile, ManifestState
from index.rocksdb.merge import MergeParent, plan_merge

KIND = bytes(8)


def file(
    number: int, keys: tuple[int, int], *, epoch: int | None, fields: tuple[tuple[int, bytes], ...] = ()
) -> ManifestFile:
    smallest, largest = (bytes((key,)) + KIND for key in sorted(keys))
    made = ManifestFile(
        number=number,
        size_bytes=number,
        smallest=smallest,
        largest=largest,
        smallest_sequence=number,
        largest_sequence=number,
        fields=fields,
    )
    return made if epoch is None else made.with_epoch(epoch)


def parent(*files: tuple[int, ManifestFile], comparator: bytes = BYTEWISE) -> MergeParent:
    family = ManifestFamily(id=0, name=b"default", comparator=comparator, files=files)
    return MergeParent(
        subject="store", state=ManifestState(families=(family,), last_sequence=50, next_file_number=1000)
    )


spans = st.tuples(st.integers(0, 255), st.integers(0, 255))


@st.composite
def parents(draw: st.DrawFn) -> MergeParent:
    """Any number of files of level 0, and of one file on some other levels, the newest with the greatest numbers."""
    levels = sorted(draw(st.sets(st.integers(1, 6))), reverse=True)
    newest = draw(st.lists(spans, max_size=4))
    has_epochs = draw(st.booleans())
    placed = [(level, draw(spans)) for level in levels] + [(0, span) for span in newest]
    files = ((level, file(n + 1, span, epoch=n + 1 if has_epochs else None)) for n, (level, span) in enumerate(placed))
    return parent(*sorted(files, key=lambda item: (item[0], item[1].number)))


@given(st.lists(parents(), min_size=1, max_size=9))
def test_newer_rows_stay_above_older_ones_and_no_level_overlaps_itself(stores: list[MergeParent]) -> None:
    plan = plan_merge(stores)
    numbers = {(link.parent, link.before): link.number for link in plan.links}
    assert len(numbers) == sum(len(store.state.families[0].files) for store in stores)
    placed = {each.number: (level, each) for level, each in plan.state.families[0].files}
    assert set(placed) == set(numbers.values())
    for at in range(len(stores)):
        # The numbers that the test gives are the ages of the files of a parent.
        mine = [placed[number] for (whose, _), number in sorted(numbers.items()) if whose == at]
        for (older, old), (newer, new) in itertools.pairwise(mine):
            assert newer < older or (newer == older == 0 and (new.epoch or 0) > (old.epoch or 0))
    for level in range(1, 7):
        ranges = sorted((each.smallest_key, each.largest_key) for at, each in placed.values() if at == level)
        assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))
    epochs = [each.epoch for level, each in placed.values() if level == 0]
    assert len(set(epochs)) == len(epochs)
    assert plan.state.last_sequence == 50
    assert len({plan.manifest_number, plan.options_number, *placed}) == len(placed) + 2
    assert plan.state.next_file_number > max(plan.manifest_number, plan.options_number)


@pytest.mark.parametrize(
    "other, message",
    [
        (parent((0, file(1, (0, 9), epoch=1, fields=((4, b"\x07"),)))), "blob files"),
        (parent((0, file(1, (0, 9), epoch=1, fields=((14, b"\x07"),)))), "deletions of ranges"),
        (parent(comparator=b"another"), "orders its keys by another"),
    ],
)
def test_what_cannot_be_merged_is_refused(other: MergeParent, message: str) -> None:
    with pytest.raises(StoreMergeError, match=message):
        plan_merge([parent(), other])


def test_which_logs_were_needed_is_left_out() -> None:
    plan = plan_merge([parent((0, file(1, (0, 9), epoch=7, fields=((3, bytes(8)), (15, b"\x07")))))])
    assert plan.state.families[0].files[0][1].fields == ((15, b"\x07"), (13, b"\x01"))
