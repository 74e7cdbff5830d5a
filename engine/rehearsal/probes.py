"""Short looks at the store and at the disk by themselves, each with a bound on its bytes (design 0009, B2 to B4)."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.bounded import carry_out_all
from blobstore.errors import StoreError
from blobstore.local_files import flush
from blobstore.sinks import Buffer, CountedSink, Sink
from engine.cores import cores_count
from engine.doctor_patient import pattern
from engine.rehearsal.model import Measured
from engine.transfer_settings import KIB, MIB
from index.model import BlobKey
from index.restore_plan import RestorePlan

PROBE_BYTES_MAX: Final = 64 * MIB
PIECE_BYTES_MAX: Final = 4 * MIB
PIECE_BYTES_MIN: Final = 256 * KIB
PROBE_S_MAX: Final = 5.0
ROUND_TRIPS_MAX: Final = 8
WRITERS_COUNT: Final = 8
SMALL_FILES_COUNT: Final = 32
SMALL_FILE_BYTES: Final = 4 * KIB


class Piece(msgspec.Struct, frozen=True):
    """A range of a blob."""

    key: BlobKey
    start: int
    size_bytes: int


def choose_pieces(plans: Sequence[RestorePlan], *, fetch_bytes: int, at_once: int) -> tuple[Piece, ...]:
    """Ranges for the network's probe, from all over the given plans.

    Args:
        plans: Of some of the stores.
        fetch_bytes: What a restore of all stores fetches.
        at_once: So many of them will be asked for at once; there are as many, unless they would be too small.

    Returns:
        Ranges of at most `PIECE_BYTES_MAX` each, together all of it or about `PROBE_BYTES_MAX`.
    """
    wanted_bytes = min(PROBE_BYTES_MAX, fetch_bytes)
    piece_bytes = max(PIECE_BYTES_MIN, min(PIECE_BYTES_MAX, wanted_bytes // at_once))
    ranges = [
        *(Piece(run.key, run.start, run.size_bytes) for plan in plans for run in plan.runs),
        *(
            Piece(blob.key, blob.blob_offset_bytes, blob.size_bytes)
            for plan in plans
            for file in plan.streams
            for blob in file.entry.blobs
        ),
    ]
    cut = [
        Piece(whole.key, whole.start + at, min(piece_bytes, whole.size_bytes - at))
        for whole in ranges
        for at in range(0, whole.size_bytes, piece_bytes)
    ]
    there_bytes = sum(piece.size_bytes for piece in cut)
    if not cut:
        return ()
    # Every n-th of them, so that what is chosen stands far apart.
    step = max(1, there_bytes // max(1, wanted_bytes))
    return tuple(cut[::step])


async def probe_store(
    store: BlobStore, pieces: Sequence[Piece], *, in_flight_max: int, monotonic_s: Callable[[], float], into: Measured
) -> Measured:
    """Measure a round trip, and how many bytes per second come when nobody hashes or writes them.

    Requests: up to `ROUND_TRIPS_MAX` GETs of a byte one after the other, and one GET for each piece.
    """
    if not pieces:
        return into
    round_trip_s = await _round_trip_s(store, pieces, monotonic_s)
    fetched_bytes = 0
    began_s, cpu_s, loop_cpu_s = monotonic_s(), time.process_time(), time.thread_time()

    async def fetch(piece: Piece) -> None:
        nonlocal fetched_bytes
        if monotonic_s() - began_s <= PROBE_S_MAX:
            # Not in one line: what the others have added meanwhile would be lost.
            size_bytes = await _fetch(store, piece)
            fetched_bytes += size_bytes

    await carry_out_all(fetch, pieces, in_flight_max=in_flight_max)
    took_s = max(1e-6, monotonic_s() - began_s)
    busy_s = max(time.thread_time() - loop_cpu_s, (time.process_time() - cpu_s) / cores_count())
    # What goes by until the first bytes come is told as requests, and is not the network's.
    rounds = -(-len(pieces) // in_flight_max)
    moving_s = max(took_s / 10, took_s - rounds * round_trip_s)
    return msgspec.structs.replace(
        into,
        round_trip_s=round_trip_s,
        network_bytes_per_s=fetched_bytes / moving_s,
        network_busy=min(1.0, busy_s / took_s),
    )


class _Nowhere(Sink):
    @override
    def write(self, data: Buffer) -> None:
        """Let go of it."""


async def _fetch(store: BlobStore, piece: Piece) -> int:
    """How many bytes came: what does not come any more makes a probe shorter, and spoils no rehearsal that is done."""
    counted = CountedSink(_Nowhere())
    with suppress(StoreError):
        await store.pour(piece.key, counted, start=piece.start, size_bytes=piece.size_bytes)
    return counted.size_bytes


async def _round_trip_s(store: BlobStore, pieces: Sequence[Piece], monotonic_s: Callable[[], float]) -> float:
    times_s: list[float] = []
    began_s = monotonic_s()
    for piece in pieces[:: max(1, len(pieces) // ROUND_TRIPS_MAX)][:ROUND_TRIPS_MAX]:
        asked_s = monotonic_s()
        await _fetch(store, Piece(piece.key, piece.start, 1))
        times_s.append(monotonic_s() - asked_s)
        if monotonic_s() - began_s > PROBE_S_MAX:
            break
    return sorted(times_s)[len(times_s) // 2]


def probe_disk(directory: Path, *, size_bytes: int, monotonic_s: Callable[[], float], into: Measured) -> Measured:
    """Measure how fast files are written and synced in a directory, by several threads; they are removed again.

    Args:
        directory: There already; they are written to a fresh one in it.
        size_bytes: What a restore writes; no more than that, nor than `PROBE_BYTES_MAX`, is written in large files.
        monotonic_s: Seconds that never go backwards.
        into: What else was measured.

    Raises:
        OSError: As the file system says.
    """
    data = pattern(MIB, "rehearsal")
    small = data[:SMALL_FILE_BYTES]
    megabytes = max(1, min(size_bytes, PROBE_BYTES_MAX) // MIB // WRITERS_COUNT)
    # No encoded name of a task, which may stand beside it, begins with a dot.
    with TemporaryDirectory(prefix=".probe-", dir=directory) as room:
        paths = [Path(room, str(number)) for number in range(SMALL_FILES_COUNT)]
        with ThreadPoolExecutor(WRITERS_COUNT) as pool:
            began_s = monotonic_s()
            list(pool.map(lambda path: _write(path, [small]), paths))
            small_s = monotonic_s() - began_s
            began_s = monotonic_s()
            list(pool.map(lambda path: _write(path, [data] * megabytes), paths[:WRITERS_COUNT]))
            large_s = monotonic_s() - began_s
    file_s = small_s / SMALL_FILES_COUNT
    # The large files are files too: what each costs as such is not the bytes'.
    moving_s = max(large_s / 10, large_s - WRITERS_COUNT * file_s)
    rate = WRITERS_COUNT * megabytes * MIB / max(1e-6, moving_s)
    return msgspec.structs.replace(into, disk_bytes_per_s=rate, disk_file_s=file_s)


def _write(path: Path, chunks: Sequence[bytes]) -> None:
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            file.write(chunk)
        flush(file.fileno())
