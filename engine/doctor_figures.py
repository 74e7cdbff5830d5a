"""How fast `doctor` finds a store to be."""

from collections.abc import Awaitable, Callable
from typing import Final

from blobstore.base import BytesBody, read_blob
from blobstore.bounded import map_bounded
from blobstore.s3_settings import MIB
from engine.doctor_patient import SMALL_BYTES, Patient, pattern
from engine.doctor_verdict import Check, Evidence

LATENCY_SAMPLES_MAX: Final = 40
LATENCY_S_MAX: Final = 2.0
BULK_BYTES: Final = 4 * MIB
BULK_TOTAL_BYTES: Final = 64 * MIB
BULK_S_MAX: Final = 6.0


async def measure_latency(patient: Patient) -> Evidence:
    """How long small requests take, one after the other."""
    data = pattern(SMALL_BYTES, "latency")
    keys = [patient.key(f"latency/{number:02d}") for number in range(LATENCY_SAMPLES_MAX)]
    for key in keys[:1]:
        await patient.put(0, key, data)
    known = keys[0]

    async def get(_: str) -> None:
        await read_blob(patient.client(0), known, size_bytes_max=SMALL_BYTES)

    figures: dict[str, float] = {}
    told: list[str] = []
    requests: dict[str, Callable[[str], Awaitable[object]]] = {
        "PUT": lambda key: patient.client(0).put(key, BytesBody(data)),
        "GET": get,
        "HEAD": lambda _: patient.client(0).stat(known),
        "LIST": lambda _: patient.client(0).list_page(patient.root + "latency/"),
    }
    for name, request in requests.items():
        times_ms: list[float] = []
        until_s = patient.monotonic_s() + LATENCY_S_MAX
        for key in keys:
            began_s = patient.monotonic_s()
            if times_ms and began_s > until_s:
                break
            await patient.tried(lambda r=request, k=key: r(k))  # type: ignore[misc]
            times_ms.append(1000 * (patient.monotonic_s() - began_s))
        times_ms.sort()
        p50, p99 = times_ms[len(times_ms) // 2], times_ms[min(len(times_ms) - 1, int(len(times_ms) * 0.99))]
        figures |= {f"{name.lower()}_p50_ms": round(p50, 2), f"{name.lower()}_p99_ms": round(p99, 2)}
        told.append(f"{name} {_few_digits(p50)}/{_few_digits(p99)}")
    return Evidence(check=Check.LATENCY, figure=f"p50/p99 ms: {', '.join(told)}", figures=figures)


async def measure_throughput(patient: Patient) -> Evidence:
    """How many bytes per second go up and come down over all clients together."""
    data = pattern(BULK_BYTES, "bulk")
    keys = [patient.key(f"bulk/{number:02d}") for number in range(BULK_TOTAL_BYTES // BULK_BYTES)]
    sent: list[str] = []
    fetched = 0
    broken = ""
    until_s = patient.monotonic_s() + BULK_S_MAX

    async def up(numbered: tuple[int, str]) -> None:
        if patient.monotonic_s() < until_s:
            await patient.put(*numbered, data)
            sent.append(numbered[1])

    async def down(numbered: tuple[int, str]) -> None:
        nonlocal fetched, broken
        if patient.monotonic_s() < until_s:
            if await patient.read(*numbered) != data:
                broken = "a large object came back as something else"
            fetched += BULK_BYTES

    began_s = patient.monotonic_s()
    await map_bounded(up, enumerate(keys), in_flight_max=len(patient.clients))
    up_mb_s = len(sent) * BULK_BYTES / 1e6 / max(patient.monotonic_s() - began_s, 1e-9)
    began_s = patient.monotonic_s()
    until_s = began_s + BULK_S_MAX
    await map_bounded(down, enumerate(sent), in_flight_max=len(patient.clients))
    down_mb_s = fetched / 1e6 / max(patient.monotonic_s() - began_s, 1e-9)
    return Evidence(
        check=Check.THROUGHPUT,
        figure=f"{up_mb_s:.0f} MB/s up, {down_mb_s:.0f} MB/s down",
        figures={"up_mb_per_s": round(up_mb_s, 1), "down_mb_per_s": round(down_mb_s, 1)},
        broken=broken,
    )


def _few_digits(number: float) -> str:
    return f"{number:.1f}" if number < 10 else f"{number:.0f}"  # noqa: PLR2004
