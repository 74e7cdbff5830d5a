"""Reading roots and following them, again where another collector came in between (design 0002, D4)."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from engine.errors import DamagedError
from engine.records.indexes import is_missing
from engine.records.roots import References, Roots
from index.snapshot.model import IndexReference

# A collector that is overtaken by a commit and another collector plans again this often.
PLANS_MAX: Final = 3

Chosen = TypeVar("Chosen")
Found = TypeVar("Found")

# Reads the roots; records of an earlier reading are not read again.
ReadRoots = Callable[[Roots | None], Awaitable[Roots]]


async def read_until_not_overtaken(
    read: ReadRoots,
    known: Roots | None,
    choose: Callable[[Roots], tuple[References, Chosen]],
    follow: Callable[[Roots, References, Chosen], Awaitable[Found]],
) -> tuple[Roots, References, Found]:
    """Read roots and follow what they lead to; again if something missing shows that this collector was overtaken.

    Returns:
        The roots, the indexes that were followed, and what that found.

    Raises:
        DamagedError: Something is missing though the roots still need it, or is altered.
    """
    overtaken: tuple[frozenset[IndexReference], DamagedError] | None = None
    for attempt in range(PLANS_MAX):
        known = await read(known)
        references, chosen = choose(known)
        if overtaken is not None and references.required == overtaken[0]:
            raise overtaken[1]
        try:
            return known, references, await follow(known, references, chosen)
        except DamagedError as error:
            if not is_missing(error) or attempt == PLANS_MAX - 1:
                raise
            overtaken = references.required, error
    raise AssertionError("unreachable: the last attempt returns or raises")
