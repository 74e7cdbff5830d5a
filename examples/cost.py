"""What a repository on an object store costs: requests, bytes stored, dollars a day.

The formulas are those of `design/0002-commit-protocol.md`, "Cost", which a test holds the code to, as
`docs/how-to/cost.md` explains them. Prices are options; the defaults were list prices of S3 Standard in one region when
this was written: look yours up.

    python examples/cost.py --stores 64 --store-bytes 4G --commits-per-day 1440 --new-bytes 40M --new-files 5
"""

import argparse
import math
import sys
from typing import Final

import msgspec

UNITS: Final = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
KEYS_PER_LIST: Final = 1_000
DAYS_PER_MONTH: Final = 30.44
GB: Final = 1e9
# design 0001, section 7: bytes of an index of a few changes, for each of them, and of a record for each store.
DELTA_BYTES: Final = 400
DELTA_BYTES_PER_FILE: Final = 60
RECORD_BYTES_PER_STORE: Final = 61


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """A day of one job."""

    # PUT, LIST and tagging, which cost the same.
    writes: float
    reads: float
    stored_bytes: float
    restore_reads: float
    restore_bytes: float


def main() -> int:
    """Say what a day costs."""
    options = _options()
    day = count(options)
    writes_usd = day.writes / 1_000 * options.usd_per_1000_writes
    reads_usd = day.reads / 1_000 * options.usd_per_1000_reads
    stored_usd = day.stored_bytes / GB * options.usd_per_gb_month / DAYS_PER_MONTH
    print(f"writes  {day.writes:>12,.0f} a day  ${writes_usd:>8,.2f}")
    print(f"reads   {day.reads:>12,.0f} a day  ${reads_usd:>8,.2f}")
    print(f"stored  {day.stored_bytes / GB:>12,.1f} GB     ${stored_usd:>8,.2f}")
    print(f"a day                        ${writes_usd + reads_usd + stored_usd:>8,.2f}")
    print(f"a restore of all: {day.restore_reads:,.0f} GETs, {day.restore_bytes / GB:,.1f} GB")
    return 0


def count(options: argparse.Namespace) -> Day:
    """Apply the formulas, with the letters of design 0002 where it has one.

    `f` here are all blobs that a backup of a store uploads: files by themselves, packs of small ones, and the further
    blobs of files that need more than one.
    """
    s, f, commits = options.stores, options.new_files, options.commits_per_day
    n = s * (f + 1)
    per_commit = s * (f + 1) + 1 + 1 + n  # PUTs of blobs and indexes; the record; a LIST; TTL removals
    retained = commits * options.keep_days
    blobs, indexes = s * options.files + retained * s * f, retained * s
    p = math.ceil(blobs / KEYS_PER_LIST) + math.ceil(indexes / KEYS_PER_LIST)
    collections = options.collections_per_day
    index_bytes = DELTA_BYTES + DELTA_BYTES_PER_FILE * f
    new_bytes = commits * s * (options.new_bytes + index_bytes + RECORD_BYTES_PER_STORE)
    restore = s * (options.files + 2)
    return Day(
        writes=commits * per_commit + collections * p,
        reads=collections * (retained + indexes) + options.restores_per_day * restore,
        stored_bytes=s * options.store_bytes + new_bytes * options.keep_days,
        restore_reads=restore,
        restore_bytes=s * options.store_bytes,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stores", type=int, default=64, help="stores of the job, usually one per task")
    add("--store-bytes", type=_size, default="4G", help="bytes of one store")
    add("--files", type=int, default=64, help="blobs of one store")
    add("--commits-per-day", type=float, default=1_440)
    add("--new-bytes", type=_size, default="40M", help="new bytes of a store with each commit")
    add("--new-files", type=int, default=5, help="new blobs of a store with each commit")
    add("--keep-days", type=float, default=7, help="how long commits are kept")
    add("--collections-per-day", type=float, default=1)
    add("--restores-per-day", type=float, default=0.1)
    add("--usd-per-1000-writes", type=float, default=0.005, help="PUT, LIST and tagging")
    add("--usd-per-1000-reads", type=float, default=0.0004, help="GET and HEAD")
    add("--usd-per-gb-month", type=float, default=0.023)
    return parser.parse_args()


def _size(text: str) -> float:
    unit = text[-1:]
    return float(text.removesuffix(unit)) * UNITS[unit] if unit in UNITS else float(text)


if __name__ == "__main__":
    sys.exit(main())
