"""Makes the golden files of RocksDB itself: run once for each release of rocksdict, never again for an old one.

    python -m tests.golden.make_rocksdb_golden tests/golden/rocksdb

A MANIFEST with three column families, of which one was dropped, of 60 flushes with keys of 300 bytes and the
compactions between them, and what RocksDB says its live files are. Written by rocksdict 0.3.29, which is RocksDB 9.8.4.
"""

import json
import sys
import tempfile
from pathlib import Path

from rocksdict import Options, Rdict


def make(target: Path) -> None:
    """Write `MANIFEST` and `live.json`."""
    options = Options(raw_mode=True)
    options.set_level_zero_file_num_compaction_trigger(4)
    with tempfile.TemporaryDirectory() as directory:
        db = Rdict(directory, options)
        kept, dropped = (db.create_column_family(name, options) for name in ("kept", "dropped"))
        for n in range(20):
            for family in (db, kept, dropped):
                for key in range(n, n + 5):
                    family[b"%0300d" % key] = b"value %d" % n
                family.flush()
        dropped.close()
        db.drop_column_family("dropped")
        db.compact_range(None, None)
        db[b"last"] = b"value"
        db.flush()
        live = [
            {
                "number": int(file["name"].strip("/").removesuffix(".sst")),
                "level": file["level"],
                "size_bytes": file["size"],
                "smallest": file["start_key"].hex(),
                "largest": file["end_key"].hex(),
            }
            for file in db.live_files()
        ]
        kept.close()
        (manifest,) = Path(directory).glob("MANIFEST-*")
        (target / "MANIFEST").write_bytes(manifest.read_bytes())
        db.close()
    (target / "live.json").write_text(json.dumps(live, indent=1) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
