"""What the entries of a log say of each other: an altered name or setting still parses (design 0005, K2). Pure.

JSON has no checksum, and Spark passes over fields that it does not know. But the entries of a log are written by one
query, so one that lacks what all others have, and has what none of them has, is not what was written.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from index.decoding import UNDECODABLE

_JSON_STARTS: Final = ("{", "[")
_ENTRIES_MIN: Final = 3


class EntryFields(msgspec.Struct, frozen=True):
    """What a file of `offsets/` or `commits/` has beside what is decoded of it."""

    names: frozenset[str]
    # The settings that the query is pinned to; none in a commit.
    conf: dict[str, Any]


def entry_fields(data: bytes) -> EntryFields:
    """The names of the fields of an entry, whether they are known or not; none where there is no JSON."""
    lines = data.split(b"\n", 2)
    try:
        fields = msgspec.json.decode(lines[1]) if len(lines) > 1 else {}
    except UNDECODABLE:
        fields = {}
    if not isinstance(fields, dict):
        fields = {}
    conf = fields.get("conf")
    return EntryFields(frozenset(fields), conf if isinstance(conf, dict) else {})


def find_altered(entries: Mapping[int, EntryFields]) -> Iterator[tuple[int, str]]:
    """Batches whose entries have a name that no other has in the place of one that all others have, and that name.

    Of two nobody can say which one is altered.

    Args:
        entries: By batch.
    """
    if len(entries) < _ENTRIES_MIN:
        return
    for batch, entry in entries.items():
        others = [other for number, other in entries.items() if number != batch]
        for own, theirs in (
            (entry.names, [other.names for other in others]),
            (frozenset(entry.conf), [frozenset(other.conf) for other in others]),
        ):
            lacking = frozenset.intersection(*theirs) - own
            alone = own - frozenset.union(*theirs)
            if lacking and alone:
                yield batch, f"has {', '.join(sorted(alone))!r} where all others have {', '.join(sorted(lacking))!r}"


def find_odd_settings(entries: Mapping[int, EntryFields]) -> Iterator[tuple[int, str]]:
    """Batches that are pinned to another setting than the one before and the one after, and its name.

    A query changes its settings when it is started again, and then they stay for more than a batch.
    """
    for batch, entry in entries.items():
        before, after = entries.get(batch - 1), entries.get(batch + 1)
        if before is None or after is None or before.conf != after.conf or entry.conf == before.conf:
            continue
        different = sorted(name for name in before.conf if entry.conf.get(name) != before.conf[name])
        yield batch, ", ".join(different)


def is_cut_json(text: str | None) -> bool:
    """Whether the offset of a source begins as JSON and is none: not every source writes JSON, but none half of it."""
    if text is None or not text.startswith(_JSON_STARTS):
        return False
    try:
        msgspec.json.decode(text)
    except (*UNDECODABLE, UnicodeEncodeError):
        return True
    return False


def judge_watermarks(batch: int, announced: int, begun: Mapping[int, int]) -> str:
    """Which of two files is altered, where `commits/<batch>` announces another watermark than the next batch has.

    Watermarks never go back: one that is below that of the batch itself, or above that of the batch after the next, is
    none that a query has written.

    Args:
        batch: The committed one.
        announced: By its commit.
        begun: What each batch in `offsets/` begins with.

    Returns:
        "commits" or "offsets", or "" if that is not certain.
    """
    if batch not in begun or batch + 2 not in begun:
        return ""
    least, most = begun[batch], begun[batch + 2]
    fits = [least <= watermark <= most for watermark in (announced, begun[batch + 1])]
    if least > most or fits[0] == fits[1]:
        return ""
    return "offsets" if fits[0] else "commits"
