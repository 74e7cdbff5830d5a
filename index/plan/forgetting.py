"""How a scope is forgotten: the boundary that closes what is in its log, and what is on its way (design 0002, D8)."""

from collections.abc import Sequence
from typing import Final

from index.plan.commits import LogListing
from index.snapshot.records import Boundary

# How far above the newest number the boundary stands. A writer may commit between the listing and the writing of the
# boundary, and remember what it committed; nobody commits this often meanwhile (three years at ten a second).
FORGOTTEN_AHEAD: Final = 1_000_000_000


def plan_forget(listing: LogListing, boundaries: Sequence[Boundary]) -> Boundary | None:
    """The boundary that closes every record of a scope, found or on its way.

    Args:
        listing: The whole log of the scope.
        boundaries: Every listed boundary that can be read.

    Returns:
        A boundary that keeps nothing; None if there is nothing to close: the newest boundary keeps nothing, and no
        record has come since.
    """
    newest = max(boundaries, key=lambda b: b.number, default=None)
    if newest is None:
        if not listing.records:
            return None
    elif (
        not newest.kept
        and listing.newest_number == newest.number
        and all(number < newest.number for number, _ in listing.records)
    ):
        return None
    return Boundary(scope=listing.scope, number=listing.newest_number + FORGOTTEN_AHEAD)
