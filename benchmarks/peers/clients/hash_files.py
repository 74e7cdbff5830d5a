"""BLAKE3 of each file of a directory, printed as b3sum prints it: `hash_files.py DIRECTORY`."""

import sys
from pathlib import Path

from blake3 import blake3

if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).rglob("*")):
        if path.is_file():
            print(blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest(), path)
