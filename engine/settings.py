"""How bytes are cut, packed, compared and moved: the settings behind a backup and a restore."""

from typing import Final

import msgspec

from engine.errors import UsageError
from index.plan.backup import BackupLimits

KIB: Final = 1024
MIB: Final = 1024 * KIB

# A body yields chunks of at most this (`blobstore.base.Body`).
CHUNK_BYTES_MAX: Final = 8 * MIB
IN_FLIGHT_MAX: Final = 1024


class TransferSettings(BackupLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of memory and parallelism, and the sizes by which a file's form of storage is chosen.

    Sizes may differ from one backup to the next: what is stored says itself how it was cut.
    """

    # Requests under way at once.
    in_flight_max: int = 16
    # Bytes held at once by all of them together.
    memory_bytes_max: int = 64 * MIB
    # Files are read and written in pieces of this size.
    chunk_bytes: int = 1 * MIB
    # A larger file is cut into blobs of this size, which are sent and fetched in parallel.
    blob_bytes_max: int = 64 * MIB
    # Files up to this size share a pack (design 0002, P1) of up to `pack_bytes_max`.
    pack_file_bytes_max: int = 256 * KIB
    pack_bytes_max: int = 8 * MIB
    # Files up to this size are in the index itself, while all of them together stay within `inline_bytes_max`.
    inline_file_bytes_max: int = 1 * KIB
    inline_bytes_max: int = 64 * KIB
    # Neighbours in a pack are fetched together in ranges of up to this size.
    range_bytes: int = 16 * MIB
    # Take a local file for unchanged where its stat is: a restore reuses what an earlier one has written and synced, a
    # backup retains what it has hashed before. Without this a restore hashes all that it reuses, and a backup every
    # file that is not written once, such as MANIFEST: rot moves no stat, nor does a write through a shared mapping.
    trust_stat: bool = False

    def __post_init__(self) -> None:
        """Refuse, with a `UsageError`, numbers that contradict each other."""
        held = max(self.pack_bytes_max, self.range_bytes, 2 * self.chunk_bytes)
        rules = (
            ("in_flight_max", 1 <= self.in_flight_max <= IN_FLIGHT_MAX, "is not within 1 and 1,024"),
            ("chunk_bytes", 4 * KIB <= self.chunk_bytes <= CHUNK_BYTES_MAX, "is not within 4 KiB and 8 MiB"),
            ("blob_bytes_max", self.chunk_bytes <= self.blob_bytes_max, "is less than chunk_bytes"),
            ("pack_bytes_max", 0 <= self.pack_bytes_max <= self.blob_bytes_max, "exceeds blob_bytes_max"),
            ("pack_file_bytes_max", 0 <= self.pack_file_bytes_max <= self.pack_bytes_max, "exceeds pack_bytes_max"),
            ("inline_file_bytes_max", 0 <= self.inline_file_bytes_max <= 64 * KIB, "exceeds 64 KiB"),
            ("inline_bytes_max", 0 <= self.inline_bytes_max <= 16 * MIB, "exceeds 16 MiB"),
            ("range_bytes", self.chunk_bytes <= self.range_bytes, "is less than chunk_bytes"),
            ("memory_bytes_max", held <= self.memory_bytes_max, "does not hold one pack, one range or two chunks"),
        )
        for name, holds, reason in rules:
            if not holds:
                raise UsageError(f"{reason}: {getattr(self, name)}", operation="settings", subject=name)


# State stores of one checkpoint, or of one partition of Spark, unless the caller knows better.
STORES_AT_ONCE: Final = 8
# Stores of a job: fewer, as each may be large, and has its share of the requests to the end.
TASKS_AT_ONCE: Final = 4


def share_among(settings: TransferSettings, at_once_max: int) -> tuple[int, TransferSettings]:
    """Return how many stores, at least 1, may be worked on at once, and the settings of each of them.

    That many times their memory and requests is within what was given.
    """
    needed_bytes = max(settings.pack_bytes_max, 2 * settings.chunk_bytes)
    at_once = max(1, min(at_once_max, settings.in_flight_max, settings.memory_bytes_max // needed_bytes))
    memory_bytes = settings.memory_bytes_max // at_once
    share = msgspec.structs.replace(
        settings,
        in_flight_max=settings.in_flight_max // at_once,
        memory_bytes_max=memory_bytes,
        # A pack is never cut by this: it is not larger than the share.
        range_bytes=min(settings.range_bytes, memory_bytes),
    )
    return at_once, share
