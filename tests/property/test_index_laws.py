"""Laws of diff, delta and stored form over random trees and values."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from index.errors import CorruptIndexError, FormatError, UnknownFormatError
from index.rocksdb.sst import TAIL_BYTES_MAX, MoreBytesNeeded, parse_sst_tail
from index.samza.format import decode_samza_index, encode_samza_index, from_samza, to_samza
from index.snapshot.codec import (
    decode_boundary,
    decode_commit,
    decode_index,
    decode_name,
    decode_pin,
    decode_repository,
    encode_index,
    encode_record,
    seal,
    unseal,
)
from index.snapshot.delta import apply_delta, diff_indexes, make_delta, resolve_deltas
from index.snapshot.dir_diff import DirDiff, LocalDir, diff_dir, diff_stats, pairs_to_identify, strip_removed
from index.snapshot.invariants import check_snapshot_index
from index.snapshot.keys import (
    INDEXES,
    check_file_name,
    decode_component,
    decode_scope,
    encode_component,
    encode_scope,
    name_key,
    parse_name_key,
    parse_upload_key,
)
from index.snapshot.model import (
    DirIndex,
    FileIndex,
    FilePath,
    IndexDelta,
    IndexReference,
    Scope,
    SnapshotIndex,
    SstIdentity,
    StoredRecord,
)
from tests.golden.make_golden import RECORDS, SNAPSHOT
from tests.property.index_strategies import (
    alphabets,
    boundaries,
    commits,
    file_names,
    index_deltas,
    key_names,
    keys,
    modes,
    name_records,
    pins,
    repositories,
    scopes,
    sessions,
    trees,
)
from tests.unit.index.builders import (
    EMPTY,
    Tree,
    backup,
    blob_key,
    dir_modes,
    file_index,
    local_dir,
    present_files,
    read_back,
)

REFERENCE = IndexReference(key=blob_key(9, prefix=INDEXES), sha256=b"1" * 32, size_bytes=100)

calmly = settings(deadline=None)
histories = st.lists(trees, min_size=1, max_size=5)
# Of directories and files by name, for each snapshot of a history: most directories of a tree have none.
modes_of_names = st.lists(
    st.dictionaries(st.sampled_from(["", "CURRENT", "LOG", "a", "b", "naïve", "..."]), modes), min_size=5, max_size=5
)


def chain_of(
    history: list[Tree], store: dict[str, bytes] | None = None, modes: Sequence[Mapping[str, int]] = ({},) * 5
) -> list[SnapshotIndex]:
    """One backup after the other, each on top of the one before."""
    chain: list[SnapshotIndex] = []
    for version, tree in enumerate(history, start=1):
        base = chain[-1] if chain else None
        chain.append(backup(tree, version=version, base=base, store=store, modes=modes[version - 1]))
    return chain


# --- diff -------------------------------------------------------------------------------------------------------------


@calmly
@given(histories, modes_of_names)
def test_every_snapshot_of_a_history_is_its_tree(history: list[Tree], modes: list[dict[str, int]]) -> None:
    """Applying a diff gives local: names, directories with their modes and bytes, read from stored blobs alone."""
    store: dict[str, bytes] = {}
    for tree, of_names, index in zip(history, modes, chain_of(history, store, modes), strict=False):
        check_snapshot_index(index)
        assert read_back(index.dir, store) == tree
        assert dir_modes(index.dir) == dir_modes(local_dir(tree, modes=of_names))


@calmly
@given(trees, trees)
def test_diff_accounts_for_every_file_of_both_sides(before: Tree, after: Tree) -> None:
    remote, local = backup(before).dir, local_dir(after)
    diff = diff_dir(local, remote)
    check_accounts(diff, local, remote)
    stats = diff_stats(diff)
    sizes_before = [file.metadata.size_bytes for _, file in present_files(remote)]
    assert stats.files_retained + stats.files_removed == len(sizes_before)
    assert stats.bytes_retained + stats.bytes_removed == sum(sizes_before)
    assert stats.bytes_retained + stats.bytes_added == sum(
        file.metadata.size_bytes for _, file in present_files(backup(after).dir)
    )


def check_accounts(diff: DirDiff, local: LocalDir, remote: DirIndex) -> None:
    """`added` + `retained` name exactly `local`; `retained` + `removed` are exactly `remote`."""
    added, retained = [file.name for file in diff.files_added], [file.name for file in diff.files_retained]
    assert sorted(added + retained) == [file.name for file in local.files]
    kept_and_gone: list[FileIndex] = sorted((*diff.files_retained, *diff.files_removed), key=lambda file: file.name)
    assert tuple(kept_and_gone) == remote.files_present

    subs = {sub.name: sub for sub in local.sub_dirs}
    remote_subs = {sub.name: sub for sub in remote.sub_dirs_present}
    assert {sub.name for sub in diff.sub_dirs_added} == subs.keys() - remote_subs.keys()
    assert {sub.name for sub in diff.sub_dirs_retained} == subs.keys() & remote_subs.keys()
    assert {sub.name: sub for sub in diff.sub_dirs_removed} == {
        name: strip_removed(sub) for name, sub in remote_subs.items() if name not in subs
    }
    for below in (*diff.sub_dirs_added, *diff.sub_dirs_retained):
        check_accounts(below, subs[below.name], remote_subs.get(below.name, DirIndex(below.name)))


@calmly
@given(trees, trees)
def test_tree_that_did_not_change_uploads_and_removes_nothing(before: Tree, tree: Tree) -> None:
    index = backup(tree, version=2, base=backup(before))
    stats = diff_stats(diff_dir(local_dir(tree), index.dir))
    assert (stats.files_added, stats.files_removed, stats.sub_dirs_added, stats.sub_dirs_removed) == (0, 0, 0, 0)
    assert backup(tree, version=3, base=index).dir == strip_removed(index.dir)


@calmly
@given(trees, trees)
def test_only_identified_files_can_be_retained_and_all_others_may_stay_unread(before: Tree, after: Tree) -> None:
    """`pairs_to_identify` asks for no fact too few: a diff with only those facts equals one with all of them."""
    remote, local = backup(before).dir, local_dir(after)

    def forget(directory: LocalDir, kept: Collection[FilePath], path: FilePath = ()) -> LocalDir:
        return msgspec.structs.replace(
            directory,
            files=tuple(
                file if (*path, file.name) in kept else msgspec.structs.replace(file, sst=None, blake3=None, crc32=None)
                for file in directory.files
            ),
            sub_dirs=tuple(forget(sub, kept, (*path, sub.name)) for sub in directory.sub_dirs),
        )

    scanned = forget(local, ())
    asked = {(*path, file.name) for path, pairs in pairs_to_identify(scanned, remote) for file, _ in pairs}
    assert diff_stats(diff_dir(forget(local, asked), remote)) == diff_stats(diff_dir(local, remote))


@calmly
@given(trees, trees)
def test_comparison_of_two_snapshots_names_every_file_once(before: Tree, after: Tree) -> None:
    a, b = backup(before).dir, backup(after, version=2).dir
    difference = diff_indexes(a, b)
    names = [file.path for part in (difference.added, difference.removed, difference.changed) for file in part]
    names += [file.path for file in difference.unchanged]
    paths_a, paths_b = {path for path, _ in present_files(a)}, {path for path, _ in present_files(b)}
    assert len(names) == len(set(names))
    assert set(names) == paths_a | paths_b
    assert {file.path for file in difference.added} == paths_b - paths_a
    assert {file.path for file in difference.removed} == paths_a - paths_b
    opposite = diff_indexes(b, a)
    assert [file.path for file in opposite.added] == [file.path for file in difference.removed]
    assert len(opposite.unchanged) == len(difference.unchanged)


# --- delta ------------------------------------------------------------------------------------------------------------


@calmly
@given(trees, trees, trees)
def test_delta_on_its_base_gives_the_new_index(first: Tree, second: Tree, third: Tree) -> None:
    """With every list, those of removed entries too; the base has removed lists of its own."""
    _, base, new = chain_of([first, second, third])
    delta = make_delta(base, REFERENCE, 1, new)
    assert apply_delta(base, delta) == new
    assert (delta.base, delta.depth, delta.session) == (REFERENCE, 2, new.session)
    decoded = decode_index(encode_index(delta), subject="k")
    assert isinstance(decoded, IndexDelta)
    assert apply_delta(base, decoded) == new


@calmly
@given(histories, modes_of_names)
def test_chain_of_deltas_gives_the_newest_index(history: list[Tree], modes: list[dict[str, int]]) -> None:
    chain = chain_of(history, modes=modes)
    deltas = [make_delta(chain[n], REFERENCE, n, chain[n + 1]) for n in range(len(chain) - 1)]
    assert resolve_deltas(chain[0], deltas) == chain[-1]


# --- stored form ------------------------------------------------------------------------------------------------------


@calmly
@given(histories, modes_of_names)
def test_index_decodes_to_what_was_encoded(history: list[Tree], modes: list[dict[str, int]]) -> None:
    index = chain_of(history, modes=modes)[-1]
    assert decode_index(encode_index(index), subject="k") == index


@settings(deadline=None, max_examples=30)
@given(index_deltas())
def test_delta_decodes_to_what_was_encoded(delta: IndexDelta) -> None:
    assert decode_index(encode_index(delta), subject="k") == delta


RECORD_STRATEGIES: list[st.SearchStrategy[tuple[StoredRecord, Callable[..., StoredRecord]]]] = [
    st.tuples(commits(), st.just(decode_commit)),
    st.tuples(boundaries(), st.just(decode_boundary)),
    st.tuples(pins(), st.just(decode_pin)),
    st.tuples(name_records(), st.just(decode_name)),
    st.tuples(repositories, st.just(decode_repository)),
]


@calmly
@given(st.one_of(*RECORD_STRATEGIES))
def test_record_decodes_to_what_was_encoded(drawn: tuple[StoredRecord, Callable[..., StoredRecord]]) -> None:
    record, decode = drawn
    assert decode(encode_record(record), subject="k") == record


STORED: list[tuple[bytes, Callable[..., object]]] = [
    (encode_index(SNAPSHOT), decode_index),
    (encode_record(RECORDS["commit"]), decode_commit),
    (encode_record(RECORDS["boundary"]), decode_boundary),
    (encode_record(RECORDS["pin"]), decode_pin),
    (encode_record(RECORDS["name"]), decode_name),
    (encode_record(RECORDS["repository"]), decode_repository),
]


def refuses(decode: Callable[..., object], data: bytes) -> bool:
    try:
        decode(data, subject="k")
    except (CorruptIndexError, UnknownFormatError):
        return True
    return False


@calmly
@given(st.sampled_from(STORED), st.data())
def test_any_change_of_stored_bytes_is_noticed(
    stored: tuple[bytes, Callable[..., object]], data: st.DataObject
) -> None:
    raw, decode = stored
    start = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(start, len(raw)))
    changed = raw[:start] + data.draw(st.binary(max_size=12)) + raw[end:]
    assert changed == raw or refuses(decode, changed)


@calmly
@given(st.binary(max_size=200), st.booleans())
def test_foreign_bytes_are_never_decoded(data: bytes, with_magic: bool) -> None:
    for _, decode in STORED:
        assert refuses(decode, b"TIDEMARK" + data if with_magic else data)


@calmly
@given(st.sampled_from(STORED), st.data())
def test_forged_payload_is_refused_or_sound(stored: tuple[bytes, Callable[..., object]], data: st.DataObject) -> None:
    """Bytes with a right checksum and any content: a typed error, or a value that could have been written."""
    raw, decode = stored
    kind = raw[8:9]
    caps = {"bytes_max": 2**20, "raw_bytes_max": 2**20}
    payload = bytearray(unseal(raw, kind, subject="k", **caps))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        value = decode(seal(kind, bytes(payload), **caps), subject="k")
    except FormatError:
        return
    encode: Callable[[Any], bytes] = encode_index if kind == b"I" else encode_record
    assert decode(encode(value), subject="k") == value


# --- names and keys ---------------------------------------------------------------------------------------------------


@given(st.text(max_size=40))
def test_name_makes_a_safe_component_or_is_refused(name: str) -> None:
    try:
        component = encode_component(name)
    except FormatError:
        return
    assert decode_component(component) == name
    assert component.isascii()
    assert not component.startswith(".")
    assert not set(component) & set("/@\\\0 ")


@given(st.text(max_size=12))
def test_component_is_what_its_name_makes_or_is_refused(component: str) -> None:
    try:
        name = decode_component(component)
    except FormatError:
        return
    assert encode_component(name) == component


@given(scopes, scopes)
def test_two_scopes_never_share_a_component(a: Scope, b: Scope) -> None:
    assert decode_scope(encode_scope(a)) == a
    assert (encode_scope(a) == encode_scope(b)) == (a == b)


@given(scopes, key_names, sessions)
def test_name_key_comes_apart_as_it_was_made(scope: Scope, name: str, naming_id: str) -> None:
    assert parse_name_key(name_key(scope, name, naming_id)) == (scope, name, naming_id)


@given(keys, st.data())
def test_changed_upload_key_is_refused_or_another_key(key: str, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(key) - 1))
    changed = key[:position] + data.draw(alphabets | st.just("/")) + key[position + 1 :]
    try:
        parsed = parse_upload_key(changed)
    except FormatError:
        return
    assert changed == key or parsed != parse_upload_key(key)


@given(file_names)
def test_file_name_of_any_alphabet_is_taken(name: str) -> None:
    assert check_file_name(name) == name


# --- Samza ------------------------------------------------------------------------------------------------------------


@calmly
@given(trees)
def test_export_to_samza_reads_back_with_every_file(tree: Tree) -> None:
    tree = without_blank_names(tree)
    diff = diff_dir(local_dir(tree), EMPTY)
    directory = plain_index(diff)
    samza = to_samza(
        msgspec.structs.replace(backup({}), dir=directory), job_id="1", checkpoint_id="1621987200123-456789"
    )
    data = encode_samza_index(samza)
    again = decode_samza_index(data, blob_id="b")
    assert again == samza
    assert encode_samza_index(again) == data
    files = {file.path: (file.size_bytes, file.crc32, file.mode) for file in from_samza(again).files}
    assert files == {
        path: (file.metadata.size_bytes, file.crc32, file.metadata.mode) for path, file in present_files(directory)
    }


def without_blank_names(tree: Tree) -> Tree:
    """Samza refuses a file whose name is blank."""
    return {
        name: content if isinstance(content, bytes) else without_blank_names(content)
        for name, content in tree.items()
        if not name.isspace()
    }


def plain_index(diff: DirDiff) -> DirIndex:
    """Every file in a blob of its own."""
    sizes: dict[int, int] = {}
    files: list[FileIndex] = []
    for file in diff.files_added:
        counter = sizes.setdefault(file.metadata.size_bytes, len(sizes))
        files.append(file_index(file.name, b"x" * file.metadata.size_bytes, counter=counter))
    return DirIndex(diff.name, tuple(files), tuple(plain_index(sub) for sub in diff.sub_dirs_added))


# --- SST --------------------------------------------------------------------------------------------------------------

MAGICS = st.sampled_from([b"", (0x88E241B785F4CFF7).to_bytes(8, "little"), (0xDB4775248B80FB57).to_bytes(8, "little")])


@calmly
@given(st.binary(max_size=300), MAGICS, st.integers(0, 7), st.integers(0, 2**63))
def test_no_bytes_make_the_sst_parser_raise(data: bytes, magic: bytes, version: int, more_bytes: int) -> None:
    tail = data + version.to_bytes(4, "little") + magic
    answer = parse_sst_tail(tail, len(tail) + more_bytes)
    if isinstance(answer, MoreBytesNeeded):
        assert len(tail) < answer.tail_bytes <= min(TAIL_BYTES_MAX, len(tail) + more_bytes)
    else:
        assert answer is None or isinstance(answer, SstIdentity)
