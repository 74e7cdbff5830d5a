"""Write and read text as Spark and Samza do: the UTF-8 of Java's `writeUTF`, and the JSON of Jackson.

`writeUTF` has two bytes of length, big-endian, and modified UTF-8, which writes NUL as two bytes, and a character
beyond the basic plane as two surrogates of three bytes each. Jackson writes no spaces, fields in order, and its own
escapes.
"""

import re
import struct
from typing import Any, Final, TypeVar

import msgspec

from index.errors import UNDECODABLE, FormatError

_Value = TypeVar("_Value")

UTF_BYTES_MAX: Final = 0xFFFF

_LENGTH = struct.Struct(">H")
# The first byte of a sequence of four, which modified UTF-8 does not have.
_FOUR_BYTES_FIRST: Final = 0xF0

# A JSON escape; matched from left to right, so that an escaped backslash is never taken for the start of another.
_ESCAPE = re.compile(rb"\\(?:u00[01][0-9a-f]|.)")


def decode_json(
    data: bytes | memoryview | str,
    kind: type[_Value],
    refusal: type[FormatError],
    what: str,
    *,
    subject: str,
    hint: str = "",
) -> _Value:
    """Decode one JSON value; where it is not of its kind, the `refusal` begins with `what` that says so."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise refusal(f"{what}: {error}", subject=subject, hint=hint) from error


def encode_modified_utf8(text: str) -> bytes:
    """Encode a text in modified UTF-8, without its length; surrogates on their own are kept."""
    raw = text.encode("utf-16-be", "surrogatepass")
    units = "".join(map(chr, struct.unpack(f">{len(raw) // 2}H", raw)))
    return units.encode("utf-8", "surrogatepass").replace(b"\0", b"\xc0\x80")


def decode_modified_utf8(data: bytes) -> str:
    """Invert `encode_modified_utf8`; a ValueError for other bytes, such as sequences longer than Java writes them."""
    if data and max(data) >= _FOUR_BYTES_FIRST:
        raise ValueError("a sequence of four bytes is not modified UTF-8")
    units = data.replace(b"\xc0\x80", b"\0").decode("utf-8", "surrogatepass")
    return units.encode("utf-16-be", "surrogatepass").decode("utf-16-be", "surrogatepass")


def encode_utf(text: str) -> bytes:
    """Encode a text as `writeUTF` writes it; a ValueError if it takes more than 65,535 bytes."""
    data = encode_modified_utf8(text)
    if len(data) > UTF_BYTES_MAX:
        raise ValueError(f"a text of {len(data)} bytes does not fit the {UTF_BYTES_MAX} of Java's writeUTF")
    return _LENGTH.pack(len(data)) + data


def decode_utf(data: bytes, start: int = 0) -> tuple[str, int] | None:
    """Decode one text as `readUTF` does; return it, and where what follows begins; None if it ends beyond `data`.

    Raises:
        ValueError: The bytes are not modified UTF-8.
    """
    if len(data) < start + _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data, start)
    start += _LENGTH.size
    if len(data) < start + length:
        return None
    return decode_modified_utf8(data[start : start + length]), start + length


def encode_jackson(value: Any) -> bytes:  # noqa: ANN401 (whatever msgspec can encode)
    """Encode a value as Jackson would, or raise a UnicodeEncodeError for a text that is not valid Unicode."""
    encoded = msgspec.json.encode(value)
    if b"\\u" not in encoded:
        return encoded
    # Jackson writes the hexadecimal digits of a control character in capitals.
    return _ESCAPE.sub(lambda m: m[0][:2] + m[0][2:].upper() if m[0][1:2] == b"u" else m[0], encoded)
