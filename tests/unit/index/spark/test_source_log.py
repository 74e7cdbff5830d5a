import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.errors import BatchLogError
from index.spark.checkpoint import LogCut, join_entries, newest_entries, newest_entry, plan_cut
from index.spark.query_logs import SourceOffset

Log = dict[str, bytes]


def content(entries: range | list[int]) -> bytes:
    lines = [json.dumps({"path": f"file:///in/{n}", "timestamp": 1, "batchId": n}).encode() for n in entries]
    return b"\n".join([b"v1", *lines])


def entry_of(name: str) -> int:
    return int(name.removesuffix(".compact"))


def written_by_spark(entries: int, interval: int, *, deleted_up_to: int) -> Log:
    """The log of a file source after that many entries; what a compact one has may have been deleted since."""
    log: Log = {}
    for entry in range(entries):
        if (entry + 1) % interval == 0:
            log[f"{entry}.compact"] = content(range(entry + 1))
        else:
            log[str(entry)] = content([entry])
    compacts = [entry_of(name) for name in log if name.endswith(".compact")]
    oldest = max((entry for entry in compacts if entry <= deleted_up_to), default=-1)
    return {name: data for name, data in log.items() if entry_of(name) >= oldest}


def as_spark_reads(log: Log, default_interval: int) -> list[int]:
    """Every entry that Spark's CompactibleFileStreamLog finds when it starts; KeyError where it would fail."""
    compacts = sorted((entry_of(name) for name in log if name.endswith(".compact")), reverse=True)
    if not log:
        return []
    interval = default_interval
    if len(compacts) > 1:
        interval = compacts[0] - compacts[1]
    elif compacts:
        end = interval = compacts[0] + 1
        if default_interval < end // 2:
            interval = next(n for n in range(default_interval, end + 1) if end % n == 0)
    newest = max(map(entry_of, log))
    read: list[int] = []
    for entry in range(max(0, (newest + 1) // interval * interval - 1), newest + 1):
        name = f"{entry}.compact" if (entry + 1) % interval == 0 else str(entry)
        read += [json.loads(text)["batchId"] for text in log[name].split(b"\n")[1:]]
    return read


def cut_back(log: Log, newest: int) -> Log:
    cut = plan_cut(list(log), newest)
    left = {name: data for name, data in log.items() if name not in cut.dropped}
    if cut.written:
        left[cut.written] = join_entries([(name, log[name]) for name in cut.joined], newest)
    return left


@given(entries=st.integers(1, 60), interval=st.integers(1, 12), deleted=st.integers(-1, 60), back=st.integers(0, 60))
def test_spark_finds_every_entry_up_to_the_newest_and_none_after_it(
    entries: int, interval: int, deleted: int, back: int
) -> None:
    log = written_by_spark(entries, interval, deleted_up_to=deleted)
    assert as_spark_reads(log, interval) == list(range(entries))  # the model reads what Spark wrote
    newest = max(-1, entries - 1 - back)
    assert as_spark_reads(cut_back(log, newest), interval) == list(range(newest + 1))


def test_a_log_that_is_not_ahead_stays() -> None:
    assert plan_cut(["0", "1", "2"], 2) == LogCut()


def test_nothing_is_read_where_every_entry_stands_alone() -> None:
    assert plan_cut(["0", "1", "2", "3"], 1) == LogCut(dropped=("2", "3"))


def test_what_is_no_entry_stays() -> None:
    assert plan_cut(["0", "1", "notes"], 0) == LogCut(dropped=("1",))


def test_a_log_with_a_gap_is_left_alone() -> None:
    assert plan_cut(["0", "2", "3"], 2) == LogCut()


@pytest.mark.parametrize(
    "offset, entry",
    [
        ('{"logOffset":3}', 3),
        ('{"logOffset":-1}', -1),
        ('{"topic":{"0":12}}', None),
        ('{"logOffset":3,"more":1}', None),
        ('{"logOffset":"3"}', None),
        ("12", None),
        ("not json", None),
        (None, None),
    ],
)
def test_only_a_file_source_s_offset_names_an_entry(offset: str | None, entry: int | None) -> None:
    assert newest_entry(SourceOffset("0", offset)) == entry


@pytest.mark.parametrize("data", [b"", b"v1\nnot json", b'v1\n{"path":"x"}', b"\xff\xff"])
def test_a_damaged_file_is_named(data: bytes) -> None:
    with pytest.raises(BatchLogError, match=r"9\.compact"):
        join_entries([("9.compact", data)], 3)


def said(*texts: int | str) -> list[SourceOffset]:
    """What a batch has of its sources, one after another; a number is the newest entry of a file source."""
    written = [f'{{"logOffset":{text}}}' if isinstance(text, int) else text for text in texts]
    return [SourceOffset(str(at), text) for at, text in enumerate(written)]


@pytest.mark.parametrize(
    "history, logs, expected",
    [
        ([said(3, 5)], {"0": 3, "1": 5}, {"0": 3, "1": 5}),
        ([said(*[5] * 12)], {"0": 5}, {"0": 5}),
        ([said(3, 3, 5)], {"0": 3, "1": 5}, {"0": 3, "1": 5}),
        ([said(3, 5, 3)], {"0": 3, "1": 6}, {"0": 3, "1": 5}),
        # Two sources that go on together have a log each.
        ([said(3, 3, 5)], {"0": 3, "1": 3, "2": 5}, {"0": 3, "1": 3, "2": 5}),
        # They were not equal before, so one log is lost.
        ([said(2, 4), said(3, 3)], {"0": 3}, {"0": 3, "1": 3}),
        ([said(3, 5)], {"0": 3}, {"0": 3, "1": 5}),
        # The log with number 1 is of the source that has other offsets.
        ([said(3, 3, '{"t":1}')], {"0": 3, "1": 0}, {"0": 3}),
        ([said("7", "7", 2)], {"2": 2}, {"2": 2}),
    ],
)
def test_a_source_that_is_used_twice_has_two_offsets_and_one_log(
    history: list[list[SourceOffset]], logs: dict[str, int], expected: dict[str, int]
) -> None:
    paths = [("sources", log, str(entry)) for log, newest in logs.items() for entry in range(newest + 1)]
    assert newest_entries(history, paths) == expected


def test_sources_with_names_have_their_logs_by_name() -> None:
    offsets = [SourceOffset("a", '{"logOffset":1}'), SourceOffset("b", '{"logOffset":1}')]
    assert newest_entries([offsets], [("sources", "a", "0")]) == {"a": 1, "b": 1}
