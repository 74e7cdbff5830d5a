"""Flip one bit in the middle of a file, to see what Tidemark says of damage: `python examples/flip_byte.py FILE`."""

import sys
from pathlib import Path

path = Path(sys.argv[1])
data = bytearray(path.read_bytes())
data[len(data) // 2] ^= 1
path.chmod(0o600)
path.write_bytes(data)
