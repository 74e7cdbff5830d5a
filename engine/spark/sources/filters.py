"""Filters that Spark pushes down, on columns that name the store of a row (design 0005, D3)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

# Null fits none of these, nor their opposite.
_COMPARED: Final[dict[type[Filter], Callable[[Any, Any], bool]]] = {
    EqualTo: lambda value, wanted: value == wanted,
    GreaterThan: lambda value, wanted: value > wanted,
    GreaterThanOrEqual: lambda value, wanted: value >= wanted,
    LessThan: lambda value, wanted: value < wanted,
    LessThanOrEqual: lambda value, wanted: value <= wanted,
    In: lambda value, wanted: value in wanted,
    StringContains: lambda value, wanted: wanted in value,
    StringEndsWith: lambda value, wanted: value.endswith(wanted),
    StringStartsWith: lambda value, wanted: value.startswith(wanted),
}


class StoreFilters:
    """The filters of one read that are carried out here, on columns that are known before anything is read."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = frozenset(columns)
        self._taken: list[Filter] = []

    def take(self, filters: Sequence[Filter]) -> list[Filter]:
        """Keep what can be carried out here; returns the others, which are Spark's."""
        mine = [of for of in filters if self._is_mine(of)]
        self._taken += mine
        return [of for of in filters if of not in mine]

    def accept(self, column: Mapping[str, object]) -> bool:
        """Return whether rows with these values are wanted; an unknown value counts as wanted."""
        return all(_holds(of, column) for of in self._taken)

    def _is_mine(self, of: Filter) -> bool:
        of, _ = _without_not(of)
        if isinstance(of, In) and None in of.value:
            return False
        known = isinstance(of, EqualNullSafe | IsNull | IsNotNull) or type(of) in _COMPARED
        attribute: tuple[str, ...] = getattr(of, "attribute", ())
        return known and len(attribute) == 1 and attribute[0] in self._columns


def _holds(of: Filter, column: Mapping[str, object]) -> bool:
    """Evaluate a filter as SQL does: neither a comparison with null holds, nor its opposite."""
    of, is_opposite = _without_not(of)
    name: str = of.attribute[0]  # type: ignore[attr-defined]  # all that are taken have one
    if name not in column:
        return True
    value = column[name]
    match of:
        case IsNull():
            fits = value is None
        case IsNotNull():
            fits = value is not None
        case EqualNullSafe(value=wanted):
            fits = value == wanted
        case _:
            if value is None:
                return False
            fits = _COMPARED[type(of)](value, of.value)  # type: ignore[attr-defined]  # as above
    return fits != is_opposite


def _without_not(of: Filter) -> tuple[Filter, bool]:
    is_opposite = False
    while isinstance(of, Not):
        of, is_opposite = of.child, not is_opposite
    return of, is_opposite
