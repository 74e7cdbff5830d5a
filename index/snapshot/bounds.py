"""The small checks that every stored value shares: numbers in range, texts that fit, hashes of the right length."""

import re
from typing import Final

from index.errors import IndexInvariantError
from index.snapshot.model import SIZE_BYTES_MAX

HASH_BYTES: Final = 32
TEXT_BYTES_MAX: Final = 1024

_SESSION = re.compile(r"[0-9a-f]{20}")


def broken(rule: str, message: str, subject: str) -> IndexInvariantError:
    """The error that names the numbered rule of design 0001 which a value breaks."""
    return IndexInvariantError(f"{message} ({rule})", subject=subject)


def check_number(value: int, rule: str, what: str, *, low: int = 0, high: int = SIZE_BYTES_MAX) -> None:
    """Refuse a number outside `[low, high]`; by default one that is negative or does not fit 63 bits.

    Raises:
        IndexInvariantError: It is outside.
    """
    if not low <= value <= high:
        raise broken(rule, f"{value} is not within {low} to {high}", what)


def check_text(value: str, rule: str, what: str, *, bytes_max: int = TEXT_BYTES_MAX, empty: bool = False) -> None:
    """Refuse a text that is empty (unless `empty`), is not valid Unicode, or takes more than `bytes_max` in UTF-8.

    Raises:
        IndexInvariantError: It is one of these.
    """
    if value.isascii() and 0 < len(value) <= bytes_max:
        return
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise broken(rule, "is not valid Unicode", what) from None
    if size_bytes > bytes_max or (size_bytes == 0 and not empty):
        raise broken(rule, f"is empty or longer than {bytes_max} bytes", what)


def check_hash(value: bytes, rule: str, what: str) -> None:
    """Refuse a hash that is not 32 bytes long.

    Raises:
        IndexInvariantError: It is not.
    """
    if len(value) != HASH_BYTES:
        raise broken(rule, f"has {len(value)} bytes, not {HASH_BYTES}", what)


def check_session(value: str, rule: str, what: str) -> None:
    """Refuse an id that is not 20 lower-case hexadecimal digits.

    Raises:
        IndexInvariantError: It is not.
    """
    if _SESSION.fullmatch(value) is None:
        raise broken(rule, f"{value[:40]!r} is not 20 lower-case hexadecimal digits", what)
