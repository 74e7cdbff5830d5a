"""Laws of changelogs and lineages: what is written is read, and a version is made of its own history alone."""

import string
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.errors import DamagedChangelogError, FormatError, LineageError, VersionMissingError
from index.snapshot.model import DirIndex, LineageItem, SnapshotIndex, SnapshotMetadata, UniqueId
from index.spark.changelog import (
    DELETE,
    DELETE_RANGE,
    MERGE,
    PUT,
    ChangelogDecoder,
    ChangelogHeader,
    ChangelogVersion,
    Record,
    encode_end,
    encode_header,
    encode_record,
)
from index.spark.lineage import (
    HeaderNeeded,
    Lineage,
    Present,
    Resolution,
    decode_lineage,
    encode_lineage,
    full_lineage,
    present_in_index,
    resolve,
    target_in_index,
)
from index.spark.names import StateVersion, parse_state_name, state_name
from tests.unit.index.builders import SESSION, file_index

versions: st.SearchStrategy[ChangelogVersion] = st.sampled_from((1, 2, 3, 4))
unique_ids = st.builds(
    UniqueId,
    # What a key of a store takes, without the underscore.
    st.text(string.ascii_letters + string.digits + "@~%+=,.-", min_size=1, max_size=40),
)
lineages = st.lists(st.builds(LineageItem, st.integers(1, 2**63 - 1), unique_ids), max_size=5)
fields = st.binary(max_size=9) | st.binary(min_size=200, max_size=300)


def kinds(version: ChangelogVersion) -> st.SearchStrategy[int]:
    return st.sampled_from((PUT, DELETE, MERGE, DELETE_RANGE) if version in {2, 4} else (PUT, DELETE))


@st.composite
def changelogs(draw: st.DrawFn) -> tuple[ChangelogVersion, Lineage, list[Record], bytes]:
    version = draw(versions)
    lineage = tuple(draw(lineages)) if version >= 3 else ()
    records: list[Record] = [
        (kind, draw(fields), b"" if kind == DELETE else draw(fields))
        for kind in draw(st.lists(kinds(version), max_size=12))
    ]
    body = b"".join(encode_record(version, record) for record in records)
    return version, lineage, records, encode_header(version, lineage) + body + encode_end(version)


def cut(data: bytes, places: Sequence[int]) -> Iterator[bytes]:
    ends = sorted(place % (len(data) + 1) for place in places)
    for start, end in zip([0, *ends], [*ends, len(data)], strict=True):
        yield data[start:end]


@given(changelogs(), st.lists(st.integers(0, 10_000), max_size=30))
def test_what_is_written_is_read_however_it_is_cut(
    changelog: tuple[ChangelogVersion, Lineage, list[Record], bytes], places: list[int]
) -> None:
    version, lineage, records, data = changelog
    decoder = ChangelogDecoder()
    read = [record for chunk in cut(data, places) for record in decoder.feed(chunk)]
    decoder.finish()
    assert read == records
    assert decoder.header == ChangelogHeader(version, lineage, len(encode_header(version, lineage)))


@given(changelogs(), st.integers(0, 10_000), st.lists(st.integers(0, 10_000), max_size=5))
def test_a_changelog_that_ends_early_is_damaged_and_gives_only_what_was_written(
    changelog: tuple[ChangelogVersion, Lineage, list[Record], bytes], length: int, places: list[int]
) -> None:
    _, _, records, data = changelog
    decoder = ChangelogDecoder()
    read = [record for chunk in cut(data[: length % len(data)], places) for record in decoder.feed(chunk)]
    assert read == records[: len(read)]
    with pytest.raises(DamagedChangelogError):
        decoder.finish()


@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda tail: b"\0\2v4\0\2[]" + tail), st.integers(1, 9))
def test_any_bytes_are_records_or_a_typed_error_and_never_held_beyond_a_record(data: bytes, chunk_bytes: int) -> None:
    decoder = ChangelogDecoder(field_bytes_max=16)
    hint = "none is needed"
    try:
        for at in range(0, len(data), chunk_bytes):
            decoder.feed(data[at : at + chunk_bytes])
            assert decoder.header is None or decoder.buffered_bytes < 1 + 4 + 16 + 4 + 16
        decoder.finish()
    except FormatError as error:
        hint = error.hint
    assert hint


@given(lineages)
def test_a_lineage_is_read_as_it_was_written(items: list[LineageItem]) -> None:
    assert decode_lineage(encode_lineage(items)) == tuple(items)


@given(st.sampled_from(("snapshot", "changelog")), st.integers(0, 2**63 - 1), st.none() | unique_ids)
def test_a_name_parses_back_to_what_it_was_made_of(kind: str, version: int, unique_id: UniqueId | None) -> None:
    of = StateVersion(version, unique_id)
    parsed = parse_state_name(state_name("snapshot" if kind == "snapshot" else "changelog", of))
    assert parsed is not None
    assert (parsed.kind, parsed.of, parsed.checksum) == (kind, of, False)


# --- histories --------------------------------------------------------------------------------------------------------

State = dict[int, int]


class Attempt(msgspec.Struct):
    """One version of a random history: what it grew from, what it changed, and what was stored of it."""

    of: StateVersion
    parent: "Attempt | None"
    changes: dict[int, int | None]
    has_changelog: bool
    has_snapshot: bool
    header: Lineage = ()

    @property
    def ancestry(self) -> list["Attempt"]:
        """From version 1 to this one."""
        before = [] if self.parent is None else self.parent.ancestry
        return [*before, self]

    @property
    def state(self) -> State:
        state: State = {}
        for attempt in self.ancestry:
            apply(state, attempt.changes)
        return state

    @property
    def loadable(self) -> bool:
        """By the definition of a state store: a snapshot, or a change to something that is loadable."""
        return self.has_snapshot or (self.has_changelog and (self.parent is None or self.parent.loadable))


def apply(state: State, changes: Mapping[int, int | None]) -> None:
    for key, value in changes.items():
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value


@st.composite
def histories(draw: st.DrawFn) -> list[Attempt]:
    """Some versions without ids, then a tree of versions with ids; snapshots and changelogs as they happen to be."""
    changes = st.dictionaries(st.integers(0, 5), st.none() | st.integers(0, 99), max_size=3)
    attempts: list[Attempt] = []
    by_number: list[Attempt] = []
    for version in range(1, draw(st.integers(0, 4)) + 1):
        parent = by_number[-1] if by_number else None
        has_changelog = draw(st.booleans())
        attempt = Attempt(
            StateVersion(version), parent, draw(changes), has_changelog, draw(st.booleans()) or not has_changelog
        )
        by_number.append(attempt)
    attempts += by_number
    # Where the query goes on with ids; whatever is above belongs to a history that was taken back.
    kept = draw(st.integers(0, len(by_number)))
    roots: list[Attempt | None] = [by_number[kept - 1] if kept else None]
    with_ids: list[Attempt] = []
    for number in range(draw(st.integers(0, 9))):
        parent = draw(st.sampled_from(roots + list(with_ids)))
        version = 1 if parent is None else parent.of.version + 1
        has_changelog = draw(st.integers(0, 3)) > 0
        attempt = Attempt(
            StateVersion(version, UniqueId(f"u{number}")),
            parent,
            draw(changes),
            has_changelog,
            draw(st.booleans()) or not has_changelog,
        )
        attempt.header = header_of(draw, attempt)
        with_ids.append(attempt)
    return attempts + with_ids


def header_of(draw: st.DrawFn, attempt: Attempt) -> Lineage:
    """From a snapshot that was known at load, which need not be the newest, to the version before."""
    before = [a for a in attempt.ancestry[:-1] if a.of.unique_id is not None]
    only_snapshots = [i for i, a in enumerate(before) if not a.has_changelog]
    least = only_snapshots[-1] if only_snapshots else 0
    starts = [i for i, a in enumerate(before) if i >= least and (a.has_snapshot or i == 0)]
    start = draw(st.sampled_from(starts)) if starts else 0
    return tuple(LineageItem(a.of.version, a.of.unique_id) for a in before[start:] if a.of.unique_id is not None)


def present_of(attempts: Sequence[Attempt]) -> Present:
    return Present.of_names(
        [state_name("snapshot", a.of) for a in attempts if a.has_snapshot]
        + [state_name("changelog", a.of) for a in attempts if a.has_changelog]
    )


def ask(of: StateVersion, present: Present, headers: Mapping[StateVersion, Lineage]) -> Resolution:
    """Drive `resolve` as a loader does, and count that it asks for nothing twice."""
    for _ in range(len(headers) + 1):
        answer = resolve(of.version, of.unique_id, present)
        if isinstance(answer, Resolution):
            return answer
        assert answer.changelog in present.changelogs
        assert answer.changelog not in present.headers
        present = present.with_headers({answer.changelog: headers[answer.changelog]})
    raise AssertionError("the same header was asked for again")


def replay(answer: Resolution, attempts: Mapping[StateVersion, Attempt]) -> State:
    state = {} if answer.base is None else dict(attempts[answer.base].state)
    for changelog in answer.changelogs:
        apply(state, attempts[changelog].changes)
    return state


@given(histories(), st.data())
@settings(max_examples=100, deadline=None)
def test_what_is_resolved_replays_to_the_state_of_its_own_history(attempts: list[Attempt], data: st.DataObject) -> None:
    by_name = {attempt.of: attempt for attempt in attempts}
    headers = {attempt.of: attempt.header for attempt in attempts}
    # Deleted up to some version, of every id, and snapshots that turned out not to open.
    oldest = data.draw(st.integers(0, 8), label="oldest kept")
    for attempt in attempts:
        if attempt.of.version < oldest:
            attempt.has_snapshot = attempt.has_changelog = False
        elif attempt.has_snapshot and data.draw(st.integers(0, 4), label=f"{attempt.of} opens") == 0:
            attempt.has_snapshot = False
    present = present_of(attempts)
    for attempt in attempts:
        if not attempt.loadable:
            with pytest.raises(VersionMissingError):
                ask(attempt.of, present, headers)
            continue
        answer = ask(attempt.of, present, headers)
        assert answer.target == attempt.of
        assert replay(answer, by_name) == attempt.state
        check_resolution(answer, present)
        assert answer.lineage == tuple(
            LineageItem(a.of.version, a.of.unique_id)
            for a in attempt.ancestry
            if a.of.unique_id is not None and (answer.base is None or a.of.version >= answer.base.version)
        )


def check_resolution(answer: Resolution, present: Present) -> None:
    assert answer.base is None or answer.base in present.snapshots
    assert set(answer.changelogs) <= present.changelogs
    first = 1 if answer.base is None else answer.base.version + 1
    assert [of.version for of in answer.changelogs] == list(range(first, answer.target.version + 1))


@given(histories(), st.data())
@settings(deadline=None)
def test_an_index_answers_as_a_listing_with_headers_does(attempts: list[Attempt], data: st.DataObject) -> None:
    with_ids = [attempt for attempt in attempts if attempt.of.unique_id is not None]
    if not with_ids:
        return
    headers = {attempt.of: attempt.header for attempt in attempts}
    present = present_of(attempts)
    newest = data.draw(st.sampled_from(with_ids), label="version of the index")
    before = [a for a in newest.ancestry[:-1] if a.of.unique_id is not None]
    lineage = tuple(
        LineageItem(a.of.version, a.of.unique_id)
        for a in before
        if a.of.unique_id is not None and data.draw(st.integers(0, 4), label=f"index knows {a.of}") > 0
    )
    index = SnapshotIndex(
        metadata=SnapshotMetadata(
            job="job",
            task="task",
            store="default",
            version=newest.of.version,
            unique_id=newest.of.unique_id or UniqueId(""),
            lineage=lineage,
        ),
        session=SESSION,
        dir=DirIndex("", files_present=tuple(file_index(name) for name in names_of(attempts))),
    )
    for attempt in [*before, newest]:
        of = attempt.of
        assert target_in_index(of.version, of.unique_id, index) == of.unique_id
        assert ask(of, present_in_index(index), headers) == ask(of, present, headers)
    if lineage == tuple(LineageItem(a.of.version, a.of.unique_id) for a in before if a.of.unique_id is not None) and (
        newest.ancestry[0].of.unique_id is not None
    ):
        # It knows everything, so it asks for nothing.
        assert ask(newest.of, present_in_index(index), {}) == ask(newest.of, present, headers)


def names_of(attempts: Sequence[Attempt]) -> list[str]:
    present = present_of(attempts)
    return sorted(
        [state_name("snapshot", of) for of in present.snapshots]
        + [state_name("changelog", of) for of in present.changelogs]
    )


@given(histories(), st.data())
@settings(deadline=None)
def test_a_full_lineage_is_the_history_of_its_end(attempts: list[Attempt], data: st.DataObject) -> None:
    with_ids = [attempt for attempt in attempts if attempt.of.unique_id is not None]
    if not with_ids:
        return
    end = data.draw(st.sampled_from(with_ids))
    history = [LineageItem(a.of.version, a.of.unique_id) for a in end.ancestry if a.of.unique_id is not None]
    start = data.draw(st.integers(0, len(history) - 1))
    headers = {attempt.of: attempt.header for attempt in attempts}
    known: dict[StateVersion, Lineage] = {}
    for _ in range(len(attempts) + 1):
        answer = full_lineage(history[start].version, history[-1], known)
        if not isinstance(answer, HeaderNeeded):
            assert answer == tuple(history[start:])
            return
        known[answer.changelog] = headers[answer.changelog]
    raise AssertionError("the same header was asked for again")


small_items = st.builds(LineageItem, st.integers(0, 6), st.builds(UniqueId, st.sampled_from("ab")))
small_versions = st.builds(StateVersion, st.integers(0, 6), st.none() | st.builds(UniqueId, st.sampled_from("ab")))


@given(
    st.frozensets(small_versions, max_size=4),
    st.frozensets(small_versions, max_size=14),
    st.dictionaries(small_versions, st.lists(small_items, max_size=4).map(tuple)),
    st.integers(1, 6),
    st.none() | st.just(UniqueId("a")),
)
@settings(max_examples=100, deadline=None)
def test_hostile_headers_end_in_an_answer_or_a_typed_error(
    snapshots: frozenset[StateVersion],
    found: frozenset[StateVersion],
    headers: dict[StateVersion, Lineage],
    version: int,
    unique_id: UniqueId | None,
) -> None:
    present = Present(snapshots, found)
    headers = {of: headers.get(of, ()) for of in found}
    try:
        answer = ask(StateVersion(version, unique_id), present, headers)
    except (LineageError, VersionMissingError):
        return
    check_resolution(answer, present)
    assert sorted(answer.changelogs) == list(answer.changelogs)
