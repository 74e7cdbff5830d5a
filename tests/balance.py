"""Which tests `make test` leaves out, which stay together on one worker, and which of them begin first.

A worker that gets a long file last works alone at the end, so the long ones begin. Files stay whole, because a file's
tests share what its fixtures start; so do the files of a directory that starts a JVM, which takes longer to start and
to warm up than most of its tests take. Documents share nothing: each is a unit.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable
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
    "tests/contract/test_s3.py::TestS3BelowAPrefix",
    "tests/contract/test_s3_versions.py",
    "tests/integration/test_checkpoint_backup_s3.py::test_a_query_on_s3_is_backed_up_while_it_goes_on",
    "tests/integration/test_checkpoint_restore_s3.py",
    "tests/integration/test_cli_process.py",
    "tests/integration/test_example_airflow.py",
    "tests/integration/test_example_cron.py",
    "tests/integration/test_example_notebook.py",
    "tests/integration/test_memory.py",
    "tests/integration/test_moving_s3.py",
    "tests/integration/test_planted_damage.py",
    "tests/integration/test_s3_bandwidth.py",
    "tests/integration/test_s3_content_faults.py",
    "tests/integration/test_s3_doctor.py",
    "tests/integration/test_state_store_s3.py::test_another_machine_goes_on_where_a_killed_process_was",
    "tests/integration/test_wheel.py",
    "tests/simulation/faults/test_crash_points.py::test_stopped_before_any_effect_nothing_is_lost_and_nothing_leaks",
    "tests/simulation/model/test_model.py::test_what_a_killed_process_had_just_opened_is_closed_at_the_end",
    "tests/unit/benchmarks/test_guard.py::test_both_trees_do_the_work",
    "tests/unit/engine/checkpoint/follow/test_cutover.py::test_a_cutover_that_is_killed",
    "tests/unit/engine/checkpoint/follow/test_follower.py::test_a_follower_that_is_killed",
    "tests/unit/engine/repository/test_by_id.py::test_a_crash_at_any_step_loses_nothing_and_leaks_nothing",
    "tests/unit/engine/rocksdb/test_in_place.py::test_a_small_block_makes_no_memory_of_its_entries",
    "tests/unit/engine/rocksdb/test_in_place.py::test_each_flipped_byte_of_an_sst_is_damage_or_changes_no_row",
    "tests/unit/engine/state/test_overlay.py::test_rows_are_those_of_a_replay",
)
# Of the cases of a parametrized test there, `make test` runs one in `THIN_OUT`; the test's name decides which.
THINNED_OUT: Final = (
    "tests/contract/test_s3",
    "tests/hostile",
    "tests/integration",
    "tests/simulation/faults",
    "tests/unit/blobstore",
    "tests/unit/engine",
)
THIN_OUT: Final = 4
# What `make test` has of Spark, whose tests start JVMs and queries.
QUICK_ON_SPARK: Final = (
    "tests/spark/checkpoint/test_listener.py",
    "tests/spark/state/test_restored.py",
    "tests/spark/test_collect_backend.py",
    "tests/spark/test_parallel.py",
    "tests/spark/test_repository_cache.py",
    "tests/spark/test_rocksdb.py",
    "tests/spark/test_session.py",
    "tests/spark/test_stateful_job.py::test_running_the_newest_version_again_does_nothing",
    "tests/spark/test_stateful_job.py::test_state_survives_the_loss_of_the_disks",
    "tests/spark/test_store_claims.py",
    "tests/spark/test_store_task.py",
    "tests/spark/test_tracing.py",
)
# The documents that it runs, of all.
_QUICK_DOCUMENTS: Final = ("README.md",)
_RANKS: Final = {unit: rank for rank, unit in enumerate(LONGEST_FIRST)}
# Each starts a JVM of its own, in a process of its own.
_ALONE: Final = frozenset({"tests/spark/test_canary.py", "tests/spark/test_connect.py"})


def unit_of(nodeid: str) -> str:
    """What a test stays together with: its file, or its directory where that shares a JVM; nothing, if a document."""
    if nodeid.startswith(_DOCUMENT):
        return nodeid
    file = nodeid.split("::", 1)[0]
    return file.rpartition("/")[0] if file.startswith("tests/spark/") and file not in _ALONE else file


def slow_ones(nodeids: Iterable[str]) -> set[str]:
    """Return the tests that `make test` leaves out."""
    tests: dict[str, list[str]] = defaultdict(list)
    for nodeid in nodeids:
        tests[nodeid.partition("[")[0]].append(nodeid)
    slow = set()
    for test, cases in tests.items():
        # Not the first case of each: that would be the same format and the same kind of store each time.
        kept = zlib.crc32(test.encode()) % min(THIN_OUT, len(cases)) if test.startswith(THINNED_OUT) else None
        for i, nodeid in enumerate(cases):
            if _is_slow(nodeid) or kept not in {None, i % THIN_OUT}:
                slow.add(nodeid)
    return slow


def _is_slow(nodeid: str) -> bool:
    if nodeid.startswith(_DOCUMENT):
        return not any(f"[{document}]" in nodeid for document in _QUICK_DOCUMENTS)
    if nodeid.startswith("tests/spark/"):
        return not nodeid.startswith(QUICK_ON_SPARK)
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
