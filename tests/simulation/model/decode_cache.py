"""Cache by content what pure functions of bytes return: most bytes are read again and again.

Within a campaign the same record is decoded by every process that meets it, by the history and by the walker, and
those that a schedule begins with by every schedule. What comes out cannot be changed, and so is shared.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

from index.plan import collect as collect_plan
from index.snapshot import codec, contents, invariants, keys

# Some megabytes.
_KEPT_MAX: Final = 4096

_unsealed: Final[dict[tuple[object, ...], bytes]] = {}
_unpacked: Final[dict[tuple[object, ...], object]] = {}
_unseal: Final = codec.unseal
_unpack: Final = codec._unpack
_parse_upload_key: Final = lru_cache(maxsize=_KEPT_MAX)(keys.parse_upload_key)


def _unseal_once(data: bytes, kind: bytes, *, bytes_max: int, raw_bytes_max: int, subject: str) -> bytes:
    of = data, kind, bytes_max, raw_bytes_max
    found = _unsealed.get(of)
    if found is None:
        found = _unseal(data, kind, bytes_max=bytes_max, raw_bytes_max=raw_bytes_max, subject=subject)
        _keep(_unsealed, of, found)
    return found


def _unpack_once(payload: bytes, decode: Callable[[bytes], Any], check: Callable[[Any], None], subject: str) -> Any:
    of = payload, check
    found = _unpacked.get(of)
    if found is None:
        found = _unpack(payload, decode, check, subject)
        _keep(_unpacked, of, found)
    return found


def _keep(known: dict[tuple[object, ...], Any], of: tuple[object, ...], found: object) -> None:
    # Errors are not remembered: they depend on which key it was.
    if len(known) >= _KEPT_MAX:
        known.clear()
    known[of] = found


# Where what is replaced is known, and by which name. Nothing is compressed: that depends on the bytes alone, too, and
# those of a record are never the same twice.
_REPLACED: Final[tuple[tuple[ModuleType, str, Any], ...]] = (
    (codec, "_COMPRESS_BYTES_MIN", sys.maxsize),
    (codec, "unseal", _unseal_once),
    (codec, "_unpack", _unpack_once),
    *((module, "parse_upload_key", _parse_upload_key) for module in (collect_plan, contents, invariants)),
)


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Within, nothing is decoded and checked twice."""
    before = [getattr(module, name) for module, name, _ in _REPLACED]
    for module, name, remembering in _REPLACED:
        setattr(module, name, remembering)
    try:
        yield
    finally:
        for (module, name, _), original in zip(_REPLACED, before, strict=True):
            setattr(module, name, original)
