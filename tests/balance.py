"""Which tests `make test` leaves out, which stay together on one worker, and which of them begin first.

A worker that gets a long file last works alone at the end, so the long ones begin. Files stay whole, because a file's
tests share what its fixtures start; so do the files of a directory that starts a JVM, which takes longer to start and
to warm up than most of its tests take. Documents share nothing: each is a unit.
"""

from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

_DOCUMENT: Final = "tests/docs/test_documents.py::test_each_command_does_what_the_document_says"
# What the workers begin with, longest first. Whatever is not named here takes less than the last of them.
LONGEST_FIRST: Final = (
    "tests/spark",
    "tests/spark/checkpoint",
    "tests/spark/state",
    "tests/spark/sources",
    "tests/spark/test_connect.py",
    f"{_DOCUMENT}[docs/how-to/spark.md]",
    "tests/contract/test_wrappers.py",
    f"{_DOCUMENT}[docs/how-to/s3.md]",
    "tests/integration/test_s3_wire_faults.py",
    "tests/contract/test_s3.py",
    "tests/integration/test_s3_doctor.py",
    "tests/simulation/faults/test_crash_points.py",
    "tests/spark/test_canary.py",
    "tests/unit/engine/checkpoint/check/test_check.py",
    "tests/unit/engine/checkpoint/check/test_running.py",
    f"{_DOCUMENT}[docs/how-to/free-space.md]",
    f"{_DOCUMENT}[docs/how-to/time-travel.md]",
    f"{_DOCUMENT}[docs/how-to/troubleshoot.md]",
    "tests/integration/test_s3_policies.py",
    "tests/integration/test_cli_process.py",
    "tests/integration/test_s3_content_faults.py",
    "tests/contract/test_s3_moto.py",
    "tests/unit/blobstore/wrappers/test_overload.py",
    "tests/unit/blobstore/s3/test_client.py",
    "tests/property/test_index_laws.py",
    "tests/integration/test_memory.py",
)
# What `make test` leaves out, and `make check` and CI run: what takes long, where something quicker shows the same. The
# ids of tests begin so.
SLOW: Final = (
    "tests/integration/test_checkpoint_restore_s3.py::test_executors_rescale_a_backup",
    "tests/integration/test_checkpoint_restore_s3.py::test_a_query_is_followed_to_a_prefix",
    "tests/simulation/faults/test_crash_points.py::test_stopped_before_any_effect_nothing_is_lost_and_nothing_leaks",
    "tests/spark/checkpoint/test_matrix.py::test_a_lost_query",
    "tests/spark/state/test_converted.py::test_stores_are_converted_on_the_executors",
    "tests/spark/state/test_key_partitions.py::test_every_key_is_where_spark_put_it",
    "tests/spark/test_canary.py",
    "tests/spark/test_connect.py",
    "tests/spark/test_s3.py::test_of_64_stores",
    "tests/unit/engine/checkpoint/test_replica.py::test_a_cutover_that_is_killed",
    "tests/unit/engine/checkpoint/test_replica.py::test_a_follower_that_is_killed",
)
# The documents that `make test` runs, of all.
_QUICK_DOCUMENTS: Final = ("README.md", "docs/getting-started.md", "docs/how-to/live-backup.md")
_RANKS: Final = {unit: rank for rank, unit in enumerate(LONGEST_FIRST)}
# Each starts a JVM of its own, in a process of its own.
_ALONE: Final = frozenset({"tests/spark/test_canary.py", "tests/spark/test_connect.py"})


def unit_of(nodeid: str) -> str:
    """What a test stays together with: its file, or its directory where that shares a JVM; nothing, if a document."""
    if nodeid.startswith(_DOCUMENT):
        return nodeid
    file = nodeid.split("::", 1)[0]
    return file.rpartition("/")[0] if file.startswith("tests/spark/") and file not in _ALONE else file


def is_slow(nodeid: str) -> bool:
    """Whether a test is left out of `make test`."""
    if nodeid.startswith(_DOCUMENT):
        return not any(f"[{document}]" in nodeid for document in _QUICK_DOCUMENTS)
    return nodeid.startswith(SLOW)


def sort_longest_first(items: list[pytest.Item]) -> None:
    """Bring the long units to the front; within a unit, and among all others, the order stays."""
    items.sort(key=lambda item: _RANKS.get(unit_of(item.nodeid), len(_RANKS)))


def schedule_units(config: pytest.Config, log: Any) -> Any:
    """A scheduler that gives each worker that has nothing to do the next unit, in the order of collection."""
    # By default it would begin with the units that have most tests, however short.
    config.option.loadscopereorder = False
    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = unit_of
    return scheduler
