"""Which of the records of one name counts (design 0002, D5)."""

from collections.abc import Iterable

import msgspec

from index.plan.collect import name_is_live
from index.plan.commits import Commit
from index.snapshot.records import NEVER_MS, CommitRecord, NameRecord


class Naming(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a name, as it stands in the store."""

    key: str
    # By the store's clock, as everything that decides.
    created_at_ms: int
    id: str
    record: NameRecord
    # When the repository record was created; 0 where nobody has looked, because the record came in time.
    repository_created_at_ms: int = 0

    @property
    def is_live(self) -> bool:
        """Whether it protects what it refers to."""
        return name_is_live(self.record, self.created_at_ms, self.repository_created_at_ms)


def choose_naming(namings: Iterable[Naming]) -> Naming | None:
    """The one that a name stands for: the earliest that is live, by creation and then by id; None if none is."""
    return min((n for n in namings if n.is_live), key=lambda n: (n.created_at_ms, n.id), default=None)


def commit_of_name(name: NameRecord) -> Commit:
    """The commit as its name has kept it: the log's record may be gone."""
    record = CommitRecord(
        scope=name.scope,
        number=name.source.number,
        write_id=name.source.write_id,
        version=name.version,
        offsets=name.offsets,
        layout=name.layout,
        stores=name.stores,
        valid_until_ms=NEVER_MS,
    )
    return Commit(
        record=record,
        created_at_ms=name.committed_at_ms,
        committed_at_ms=name.committed_at_ms,
        settled=True,
        name=name.name,
    )
