"""Which picture a batch is restored from, and which files of the query come with it (design 0005, R1 and R2)."""

from collections.abc import Iterable, Sequence
from typing import Final

from index.errors import BatchLogError
from index.plan.commits import Commit
from index.spark.checkpoint import Picture
from index.spark.query_logs import parse_batch_name

FilePath = tuple[str, ...]
Taken = tuple[Commit, Picture]

COMMITS: Final = "commits"
OFFSETS: Final = "offsets"
SOURCES: Final = "sources"
STATE: Final = "state"
QUERY_ID: FilePath = ("metadata",)


def choose_picture(pictures: Sequence[Taken], *, batch: int | None = None, at_ms: int | None = None) -> Taken | None:
    """The picture to restore from (R1); None if there is none that fits.

    Where a query was taken back and went on, there are two of some batches: those that led to the newest picture come
    first, as far as the numbers tell.

    Args:
        pictures: Newest first.
        batch: The batch to restore; not together with `at_ms`.
        at_ms: A time by the store's clock: the picture that was the newest then.
    """
    if batch is None:
        return next((p for p in pictures if at_ms is None or p[0].committed_at_ms <= at_ms), None)
    return _choose(_current(pictures), batch) or _choose(pictures, batch)


def _choose(pictures: Sequence[Taken], batch: int) -> Taken | None:
    own = next((p for p in pictures if p[1].batch == batch), None)
    later = [p for p in pictures if p[1].oldest_batch <= batch <= p[1].batch]
    return own or min(reversed(later), key=lambda taken: taken[1].batch, default=None)


def _current(pictures: Sequence[Taken]) -> list[Taken]:
    """Those whose batch is none that was given up later: going back in time, batches never rise."""
    kept: list[Taken] = []
    for taken in pictures:
        if not kept or taken[1].batch <= kept[-1][1].batch:
            kept.append(taken)
    return kept


def select_query_files(paths: Iterable[FilePath], *, oldest_batch: int, batch: int) -> tuple[FilePath, ...]:
    """Which files of the query belong to a batch and nothing newer (R2).

    Args:
        paths: Of the files that the picture has of the query.
        oldest_batch: The oldest batch whose commit is to be there.
        batch: The batch to restore.

    Raises:
        BatchLogError: A file without which the query does not go on is not there; the error names it.
    """
    there = sorted(set(paths))
    needed = (QUERY_ID, (OFFSETS, str(batch)), *((COMMITS, str(b)) for b in range(oldest_batch, batch + 1)))
    for path in needed:
        if path not in there:
            raise BatchLogError(
                "is not in the picture",
                subject="/".join(path),
                hint="the picture is not whole; restore from another one",
            )
    return tuple(path for path in there if belongs(path, oldest_batch, batch))


def belongs(path: FilePath, oldest_batch: int, batch: int) -> bool:
    """Whether a file of a query is of these batches, or of all (P7, R2)."""
    match path:
        case ("commits", name):
            return _is_within(name, oldest_batch, batch)
        case ("offsets", name):
            return _is_within(name, oldest_batch - 1, batch + 1)
        case ("state", operator, "_metadata", "v2", name):
            return parse_batch_name(operator) is not None and _is_within(name, 0, batch)
        case ("state", operator, "_metadata", "metadata") | ("state", operator, "_stateSchema", _, _):
            return parse_batch_name(operator) is not None
        case _:
            return path == QUERY_ID or path[0] == SOURCES


def _is_within(name: str, oldest: int, newest: int) -> bool:
    found = parse_batch_name(name)
    return found is not None and oldest <= found <= newest
