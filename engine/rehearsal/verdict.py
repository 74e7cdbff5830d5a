"""What a restore was bound by: pure, from what was measured (design 0009, B1 to B8)."""

from collections.abc import Mapping
from typing import Final

import msgspec

from engine.rehearsal.model import Bound, Rehearsal

# From here on the network's probe has measured the processor.
BUSY_SHARE_MAX: Final = 0.8
# Of two that are as near as this, both are told.
NEAR_SHARE: Final = 0.9

_HINTS: Final = {
    Bound.NETWORK: "a faster way to the store, or a share of the stores for each of several executors",
    Bound.DISK: "a faster disk, or a share of the stores for each of several executors with disks of their own",
    Bound.REQUESTS: "a store that is nearer, more requests at once (--in-flight-max), or fewer and larger files",
    Bound.CPU: "a share of the stores for each of several executors; this machine's processor is what is used up",
    Bound.ROCKSDB_OPEN: "fewer and larger SST files (compact before the backup), or fewer stores on each executor",
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What bound a restore."""

    bound: Bound
    # How long each would have taken by itself; what was not looked at is missing.
    alone_s: dict[Bound, float]
    # What share of the phase it was in the winner explains; well below 1, nothing that was measured does.
    explained: float
    # As near to the winner as can be told.
    near: tuple[Bound, ...]
    hint: str


def judge(rehearsal: Rehearsal) -> Verdict:
    """Name what a restore was bound by.

    Args:
        rehearsal: What was measured.

    Returns:
        The opening of RocksDB if that took longer than the restore itself; else what would have taken longest alone.
    """
    alone_s = _alone_s(rehearsal)
    opens_s = rehearsal.open_s
    of_restore: dict[Bound, float] = {bound: s for bound, s in alone_s.items() if bound is not Bound.ROCKSDB_OPEN}
    longest = max(of_restore, key=lambda bound: of_restore[bound])
    if opens_s > rehearsal.restore_s:
        return Verdict(
            bound=Bound.ROCKSDB_OPEN, alone_s=alone_s, explained=1.0, near=(), hint=_HINTS[Bound.ROCKSDB_OPEN]
        )
    return Verdict(
        bound=longest,
        alone_s=alone_s,
        explained=_share(of_restore[longest], rehearsal.restore_s),
        near=_near(of_restore, longest),
        hint=_HINTS[longest],
    )


def _near(alone_s: Mapping[Bound, float], longest: Bound) -> tuple[Bound, ...]:
    least_s = NEAR_SHARE * alone_s[longest]
    return tuple(bound for bound, s in alone_s.items() if bound is not longest and 0 < least_s <= s)


def _alone_s(rehearsal: Rehearsal) -> dict[Bound, float]:
    """B2 to B6; none of the first four took longer than the restore, whatever a probe saw (B7)."""
    measured, most_s = rehearsal.measured, rehearsal.restore_s
    cpu_s = max(measured.loop_cpu_s, measured.cpu_s / rehearsal.cores_count)
    alone_s = {Bound.CPU: min(most_s, cpu_s)}
    if measured.round_trip_s:
        requests_s = measured.requests_count * measured.round_trip_s / rehearsal.in_flight_max
        alone_s[Bound.REQUESTS] = min(most_s, requests_s)
    if measured.network_bytes_per_s:
        network_s = measured.bytes_fetched / measured.network_bytes_per_s
        waits_s = measured.answers_s + measured.bytes_s
        waited_s = most_s * _share(waits_s, waits_s + measured.taker_s)
        busy = measured.network_busy >= BUSY_SHARE_MAX
        alone_s[Bound.NETWORK] = 0.0 if busy else min(network_s, waited_s)
    if measured.disk_bytes_per_s:
        disk_s = measured.bytes_written / measured.disk_bytes_per_s + measured.files_written * measured.disk_file_s
        alone_s[Bound.DISK] = min(most_s, disk_s)
    if measured.opened_count:
        alone_s[Bound.ROCKSDB_OPEN] = rehearsal.open_s
    return alone_s


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
