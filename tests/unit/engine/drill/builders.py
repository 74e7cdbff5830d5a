"""Restore drills without a restore."""

from typing import Any

import msgspec

from engine.drill.drill import FailedDrill, Measured, RestoreDrill

MIB = 1024 * 1024

MEASURED = Measured(requests_count=40, bytes_fetched=1000 * MIB, opened_count=4)
DRILL = RestoreDrill(
    began_at_ms=1_700_000_000_000,
    release="0.1.0",
    repository_id="0" * 20,
    job="flights",
    task=None,
    commit_number=7,
    version=8,
    pinned=True,
    to_disk=True,
    stores_at_once=4,
    stores_count=8,
    files_count=100,
    size_bytes=1000 * MIB,
    largest_store_bytes=125 * MIB,
    find_s=0.1,
    restore_s=12.0,
    open_s=0.5,
    measured=MEASURED,
)


def measured(**changes: Any) -> Measured:
    return msgspec.structs.replace(MEASURED, **changes)


def drill(**changes: Any) -> RestoreDrill:
    """One that took 12.6 s; what names a field of `Measured` is changed there."""
    inner = {name: value for name, value in changes.items() if name in Measured.__struct_fields__}
    outer = {name: value for name, value in changes.items() if name not in inner}
    return msgspec.structs.replace(DRILL, measured=measured(**inner), **outer)


def failed(**changes: Any) -> FailedDrill:
    made = FailedDrill(
        began_at_ms=1_700_000_100_000,
        release="0.1.0",
        repository_id="0" * 20,
        job="flights",
        task=None,
        error="DamagedError",
        message="a blob is missing",
    )
    return msgspec.structs.replace(made, **changes)
