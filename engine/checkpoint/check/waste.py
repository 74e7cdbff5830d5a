"""What stands in the directory of a state store and is of no committed version (design 0005, K7). Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from blobstore.checkpoint_files import FileStatus
from engine.checkpoint.findings import DELETE, Finding
from index.spark.names import CHECKSUM_SUFFIX, StateFileName, StateVersion, is_shared_path, parse_state_name

_SUFFIXES: Final = (".zip", ".changelog", CHECKSUM_SUFFIX)


def find_waste(
    store: str,
    statuses: Iterable[FileStatus],
    *,
    needed: Collection[str],
    committed: Mapping[int, StateVersion],
    newest_batch: int,
) -> Iterator[Finding]:
    """Names that no committed version needs and that no retention explains.

    Args:
        store: Path of the directory.
        statuses: What stands directly in it.
        needed: Names of zips and changelogs that committed versions take.
        committed: Every version that is in the commit log, by its number.
        newest_batch: The newest batch that was committed when the directory had been listed. Files of the next one are
            its attempts, and of what comes before the oldest committed one, retention has the say.
    """
    files = {status.name: status for status in statuses if not status.is_directory}
    oldest = min(committed, default=0)
    # A batch that runs writes the version after that of the newest committed one.
    running = newest_batch + 2
    for name, status in files.items():
        path = f"{store}/{name}"
        parsed = parse_state_name(name)
        if parsed is None:
            if not name.startswith("."):
                yield _foreign(path, status)
            continue
        if parsed.checksum:
            # One is there before its file, and may outlive it for a moment: that of a committed version says nothing.
            if name.removesuffix(CHECKSUM_SUFFIX) not in files and _is_lost(parsed, committed):
                yield _waste(path, "is the checksum of a file that is not there", status)
            continue
        if name in needed or parsed.of.version < oldest or parsed.of.version == running:
            continue
        if parsed.of.version > running:
            yield Finding(
                kind="warning",
                path=path,
                message=f"is of version {parsed.of.version}, and the newest committed batch is {newest_batch}",
                hint="unless a query runs here, another history left it: Spark's maintenance would count from it, and "
                "delete what the committed versions need; restore the checkpoint to an empty directory",
                rule="K7",
            )
        elif _is_lost(parsed, committed):
            yield _waste(path, "is of an attempt that was not committed", status)


def find_unnamed(
    store: str, shared: Iterable[FileStatus], named: Collection[str], newest_snapshot_ms: int
) -> Iterator[Finding]:
    """SSTs and logs that no snapshot names.

    Args:
        store: Path of the directory.
        shared: What stands in `SSTs` and `logs`.
        named: Paths that a snapshot names, whether anybody needs it or not.
        newest_snapshot_ms: When the newest zip came. What is younger may be of a snapshot that is on its way.
    """
    for status in shared:
        if status.is_directory or status.path in named or status.name.startswith("."):
            continue
        if not is_shared_path(status.path):
            yield _foreign(f"{store}/{status.path}", status)
        elif status.modified_at_ms < newest_snapshot_ms:
            yield _waste(f"{store}/{status.path}", "is named by no snapshot", status)


def _is_lost(parsed: StateFileName, committed: Mapping[int, StateVersion]) -> bool:
    of = committed.get(parsed.of.version)
    return of is not None and of != parsed.of


def _foreign(path: str, status: FileStatus) -> Finding:
    if path.endswith(_SUFFIXES):
        return Finding(
            kind="warning",
            path=path,
            message="has a name that is none of Spark's, with an ending of Spark's",
            hint="nothing of Spark's wrote it, so it may be moved away: Spark's listing of the directory fails on it, "
            "and its maintenance stops",
            rule="K7",
        )
    return _waste(path, "has a name that is none of Spark's", status)


def _waste(path: str, message: str, status: FileStatus) -> Finding:
    return Finding(kind="waste", path=path, message=message, hint=DELETE, rule="K7", size_bytes=status.size_bytes)
