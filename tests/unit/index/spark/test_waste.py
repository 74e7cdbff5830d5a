"""What nobody needs by its name and the newest commit (design 0005, W2 and W3)."""

import uuid

import pytest

from blobstore.checkpoint_files import FileStatus
from index.snapshot.model import UniqueId
from index.spark.query_logs import BatchCommit
from index.spark.waste import WasteReason, find_waste

BATCH = 9
WON, LOST, OTHER = (UniqueId(str(uuid.UUID(int=n))) for n in range(3))
# Operator 0 has two partitions with one store each, operator 1 one with two stores.
COMMIT = BatchCommit(version=2, unique_ids={0: ((WON,), (OTHER,)), 1: ((WON, OTHER),)})
NEEDED = (
    "metadata",
    "commits/9",
    "offsets/10",
    "state/0/_metadata/metadata",
    f"state/0/0/10_{WON}.zip",
    f"state/0/0/10_{WON}.zip.crc",
    f"state/0/1/10_{OTHER}.changelog",
    f"state/1/0/left-keyToNumValues/10_{OTHER}.changelog",
    # Only the commit of its own batch would say.
    f"state/0/0/9_{LOST}.changelog",
    # Of the batch under way.
    f"state/0/0/11_{LOST}.changelog",
    "state/0/0/SSTs/000008-1f.sst",
    "state/0/0/not of Spark",
)


def found(*paths: str, commit: BatchCommit = COMMIT) -> dict[str, WasteReason]:
    files = [FileStatus(path=path, is_directory=False, size_bytes=7) for path in (*NEEDED, *paths)]
    waste = find_waste(files, BATCH, commit)
    assert {each.size_bytes for each in waste} <= {7}
    return {each.path: each.reason for each in waste}


def test_what_is_needed_is_no_waste() -> None:
    assert found() == {}


@pytest.mark.parametrize(
    "path, reason",
    [
        (f"state/1/0/right-keyToNumValues/10_{LOST}.changelog", "lost attempt"),
        (f"state/1/0/left-keyToNumValues/10_{LOST}.zip.crc", "lost attempt"),
        (f"state/1/0/left-keyToNumValues/10_{LOST}.zip", "lost attempt"),
        (f"state/1/1/4_{WON}.zip", "dead partition"),
        ("state/1/1/SSTs/000001-1f.sst", "dead partition"),
        (f"state/2/0/4_{WON}.zip", "dead operator"),
        ("state/2/0/SSTs/000001-1f.sst", "dead operator"),
        (f"state/0/0/12_{WON}.changelog", "later version"),
    ],
)
def test_waste_of_each_kind_is_found(path: str, reason: WasteReason) -> None:
    assert found(path) == {path: reason}


def test_an_operator_that_begins_with_the_batch_under_way_is_no_waste() -> None:
    assert found(f"state/2/0/11_{WON}.changelog", "state/2/0/SSTs/000001-1f.sst") == {}


def test_a_partition_of_a_batch_that_is_still_in_the_log_is_no_waste() -> None:
    """The query was given fewer partitions, and older batches can still be read."""
    assert found("commits/3", f"state/1/1/4_{WON}.zip", "state/1/1/SSTs/000001-1f.sst") == {}
    assert found("commits/3", f"state/2/0/4_{WON}.zip", "state/2/1/SSTs/000001-1f.sst") == {}


def test_without_ids_only_versions_count() -> None:
    later, before = "state/7/0/12.changelog", "state/7/0/4.zip"
    assert found(later, before, commit=BatchCommit()) == {later: "later version"}
