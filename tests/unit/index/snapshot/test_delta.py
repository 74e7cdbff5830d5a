import msgspec
import pytest

from index.errors import IndexInvariantError
from index.snapshot.delta import apply_delta, make_delta, resolve_deltas
from index.snapshot.invariants import INDEX_DELTAS_MAX
from index.snapshot.keys import INDEXES
from index.snapshot.model import (
    DirDelta,
    DirIndex,
    FileIndex,
    IndexDelta,
    IndexReference,
    LineageItem,
    SnapshotIndex,
    UniqueId,
)
from tests.unit.index.builders import Tree, backup, blob_key, dir_modes, file_index, local_dir, present_files

change = msgspec.structs.replace

REFERENCE = IndexReference(key=blob_key(9, prefix=INDEXES), sha256=b"1" * 32, size_bytes=100)

FIRST: Tree = {
    "CURRENT": b"1",
    "a.sst": b"aaaa",
    "b.sst": b"bbbb",
    "d": {"x": b"x", "e": {"y": b"yy"}},
    "gone": {"z": b"z"},
}


def delta_of(base: SnapshotIndex, new: SnapshotIndex, depth: int = 0) -> IndexDelta:
    return make_delta(base, REFERENCE, depth, new)


def test_delta_names_only_what_changed() -> None:
    base = backup(FIRST)
    new = backup({**FIRST, "d": {"x": b"!", "e": {"y": b"yy"}}}, version=2, base=base)
    (changed,) = [file for path, file in present_files(new.dir) if path == ("d", "x")]
    assert delta_of(base, new).dir == DirDelta("", (), (), (DirDelta("d", (changed,)),))


def test_chmod_is_a_change_and_removes_nothing() -> None:
    base = backup({"f": b"123"})
    new = backup({"f": b"123"}, version=2, base=base, modes={"f": 0o400})
    delta = delta_of(base, new)
    assert [file.metadata.mode for file in delta.dir.files_set] == [0o400]
    assert apply_delta(base, delta) == new
    assert new.dir.files_removed == ()


def test_directory_that_only_changed_its_mode_is_right_through_deltas() -> None:
    modes = {"": 0o755, "d": 0o750, "e": 0o700, "gone": 0o500}
    indexes = [backup(FIRST, modes=modes)]
    deltas: list[IndexDelta] = []
    for version, changed in enumerate([{"e": 0o500}, {"": 0o700}, {"d": 0o700, "e": 0o755}], start=2):
        modes |= changed
        indexes.append(backup(FIRST, version=version, base=indexes[-1], modes=modes))
        deltas.append(delta_of(indexes[-2], indexes[-1], version - 2))
        assert dir_modes(indexes[-1].dir) == dir_modes(local_dir(FIRST, modes=modes))
        assert resolve_deltas(indexes[0], deltas) == indexes[-1]
    assert deltas[0].dir == DirDelta(
        "", (), (), (DirDelta("d", (), (), (DirDelta("e", mode=0o500),), (), 0o750),), (), 0o755
    )
    assert deltas[1].dir == DirDelta("", mode=0o700)
    unknown = backup(FIRST, version=9, base=indexes[-1])
    assert set(dir_modes(apply_delta(indexes[-1], delta_of(indexes[-1], unknown)).dir).values()) == {None}


def test_packs_come_and_go_with_their_files() -> None:
    base = backup({"packed0": b"1", "packed1": b"2", **{f"f{n}": b"x" for n in range(8)}})
    assert base.packs
    new = backup({"g0": b"1", **{f"h{n}": b"y" for n in range(8)}}, version=2, base=base)
    assert new.packs
    assert set(new.packs).isdisjoint(base.packs)
    delta = delta_of(base, new)
    assert delta.packs_set == new.packs
    assert delta.packs_dropped == tuple(pack.key for pack in base.packs)


def test_chain_is_resolved_and_checked() -> None:
    indexes = [backup({"f0": b"0"})]
    deltas: list[IndexDelta] = []
    for version in range(2, INDEX_DELTAS_MAX + 2):
        indexes.append(backup({f"f{n}": b"%d" % n for n in range(version)}, version=version, base=indexes[-1]))
        deltas.append(delta_of(indexes[-2], indexes[-1], version - 2))
    assert deltas[-1].depth == INDEX_DELTAS_MAX
    assert resolve_deltas(indexes[0], deltas) == indexes[-1]
    assert resolve_deltas(indexes[0], []) is indexes[0]
    with pytest.raises(IndexInvariantError, match="M15"):
        delta_of(indexes[-1], backup({}, version=99, base=indexes[-1]), INDEX_DELTAS_MAX)


def test_chain_with_a_delta_left_out_is_refused() -> None:
    first = backup({"a": b"1"})
    second = backup({"a": b"2"}, version=2, base=first)
    third = backup({"a": b"3"}, version=3, base=second)
    deltas = [delta_of(first, second), delta_of(second, third, 1)]
    with pytest.raises(IndexInvariantError, match="X2"):
        resolve_deltas(first, deltas[1:])
    with pytest.raises(IndexInvariantError, match="X2"):
        resolve_deltas(second, deltas)


def test_result_of_a_chain_is_checked_as_a_whole() -> None:
    base = backup({"a": b"1"})
    delta = delta_of(base, backup({"a": b"1"}, version=2, base=base))
    clash = change(delta, dir=DirDelta("", (), (), (DirDelta("a"),)))
    with pytest.raises(IndexInvariantError, match="M2"):
        resolve_deltas(base, [clash])


def test_delta_on_another_base_is_refused() -> None:
    base, other = backup({"a": b"1"}), backup({"a": b"1"}, version=7)
    new = backup({"a": b"2"}, version=8, base=base)
    with pytest.raises(IndexInvariantError, match="X2"):
        delta_of(other, new)
    with pytest.raises(IndexInvariantError, match="M15"):
        delta_of(base, backup({"a": b"2"}, version=8))


@pytest.mark.parametrize(
    "changes",
    [
        {"dir": DirDelta("", (), ("missing",))},
        {"dir": DirDelta("", (), (), (), ("missing",))},
        {"packs_dropped": (blob_key(77),)},
    ],
    ids=["file", "directory", "pack"],
)
def test_delta_that_drops_what_is_not_there_is_refused(changes: dict[str, object]) -> None:
    base = backup(FIRST)
    delta = change(delta_of(base, backup(FIRST, version=2, base=base)), **changes)
    with pytest.raises(IndexInvariantError, match="X2"):
        apply_delta(base, delta)


def test_index_whose_removed_lists_did_not_come_from_its_base_is_stored_whole() -> None:
    base = backup({"a": b"1"})
    new = backup({"a": b"1"}, version=2, base=base)
    odd = change(new, dir=change(new.dir, files_removed=(file_index("never-there", b"1", counter=70),)))
    with pytest.raises(IndexInvariantError, match="X3") as caught:
        delta_of(base, odd)
    assert caught.value.hint == "store the index whole"


def test_delta_on_a_tree_that_nests_too_deep_is_refused() -> None:
    delta = DirDelta("d")
    for _ in range(80):
        delta = DirDelta("d", (), (), (delta,))
    base = backup({})
    hostile = IndexDelta(
        metadata=change(base.metadata, version=2, base=LineageItem(1, UniqueId("unique-1"))),
        session=base.session,
        base=REFERENCE,
        depth=1,
        dir=delta,
    )
    with pytest.raises(IndexInvariantError, match="M3"):
        apply_delta(base, hostile)


def test_nothing_is_copied_where_nothing_changed() -> None:
    base = backup(FIRST)
    new = apply_delta(base, delta_of(base, backup({**FIRST, "n": b"1"}, version=2, base=base)))
    shared: list[tuple[DirIndex, DirIndex]] = list(
        zip(base.dir.sub_dirs_present, new.dir.sub_dirs_present, strict=True)
    )
    assert all(a is b for a, b in shared)
    files: dict[str, FileIndex] = {file.name: file for file in new.dir.files_present}
    assert all(files[file.name] is file for file in base.dir.files_present)
