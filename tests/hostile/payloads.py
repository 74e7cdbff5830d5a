"""Pickles that leave a trace when somebody loads them."""

import os
import pickle
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

# rocksdict writes the kind of a value before it, and pickles what it has no kind for.
_KINDS: Final = tuple(bytes([kind]) for kind in range(8))


class Canary:
    """A value whose pickle makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def payloads(canary: Path) -> list[bytes]:
    """The pickle in every protocol, as it is and behind each byte that rocksdict writes before a value."""
    pickles = [pickle.dumps(Canary(canary), protocol) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    return [*pickles, *(kind + data for kind in _KINDS for data in pickles)]
