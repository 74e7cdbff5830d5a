"""Which of the records of one name counts (design 0002, D5)."""

from collections.abc import Iterable

import msgspec

from index.collect_plan import name_is_live
from index.model import NameRecord


class Naming(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a name, as it stands in the store."""

    key: str
    # By the store's clock, as everything that decides.
    created_at_ms: int
    id: str
    record: NameRecord

    @property
    def is_live(self) -> bool:
        """Whether it protects what it refers to."""
        return name_is_live(self.record, self.created_at_ms)


def choose_naming(namings: Iterable[Naming]) -> Naming | None:
    """The one that a name stands for: the earliest that is live, by creation and then by id; None if none is."""
    return min((n for n in namings if n.is_live), key=lambda n: (n.created_at_ms, n.id), default=None)
