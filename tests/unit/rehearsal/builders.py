"""Rehearsals without a restore."""

from typing import Any

import msgspec

from engine.rehearsal.model import FailedRehearsal, Measured, Rehearsal

MIB = 1024 * 1024

# Read at 100 MiB/s where 50 would have been waited for; written at 400; a processor that was not much in use.
MEASURED = Measured(
    requests_count=40,
    bytes_fetched=1000 * MIB,
    bytes_written=1000 * MIB,
    files_written=100,
    first_byte_p50_s=0.02,
    first_byte_p99_s=0.05,
    first_byte_max_s=0.06,
    answers_s=10,
    bytes_s=60,
    taker_s=10,
    load=0.5,
    cpu_s=4,
    loop_cpu_s=1,
    round_trip_s=0.02,
    network_bytes_per_s=100 * MIB,
    network_busy=0.2,
    disk_bytes_per_s=400 * MIB,
    disk_file_s=0.001,
    opened_count=4,
    open_slowest_s=0.3,
)
REHEARSAL = Rehearsal(
    began_at_ms=1_700_000_000_000,
    release="0.1.0",
    repository_id="0" * 20,
    job="flights",
    task=None,
    commit_number=7,
    version=8,
    pinned=True,
    to_disk=True,
    cores_count=2,
    in_flight_max=16,
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


def rehearsal(**changes: Any) -> Rehearsal:
    """One that took 12.6 s; what names a field of `Measured` is changed there."""
    inner = {name: value for name, value in changes.items() if name in Measured.__struct_fields__}
    outer = {name: value for name, value in changes.items() if name not in inner}
    return msgspec.structs.replace(REHEARSAL, measured=measured(**inner), **outer)


def failed(**changes: Any) -> FailedRehearsal:
    made = FailedRehearsal(
        began_at_ms=1_700_000_100_000,
        release="0.1.0",
        repository_id="0" * 20,
        job="flights",
        task=None,
        error="DamagedError",
        message="a blob is missing",
    )
    return msgspec.structs.replace(made, **changes)
