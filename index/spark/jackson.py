"""JSON as Jackson writes it, which is what Spark writes: no spaces, fields in order, its own escapes."""

import re
from typing import Any

import msgspec

# A JSON escape; matched from left to right, so that an escaped backslash is never taken for the start of another.
_ESCAPE = re.compile(rb"\\(?:u00[01][0-9a-f]|.)")

_encoder = msgspec.json.Encoder()


def encode_jackson(value: Any) -> bytes:  # noqa: ANN401 (whatever msgspec can encode)
    """The bytes that Jackson would write for a value that msgspec can encode.

    Raises:
        UnicodeEncodeError: A text is not valid Unicode.
    """
    encoded = _encoder.encode(value)
    if b"\\u" not in encoded:
        return encoded
    # Jackson writes the hexadecimal digits of a control character in capitals.
    return _ESCAPE.sub(lambda m: m[0][:2] + m[0][2:].upper() if m[0][1:2] == b"u" else m[0], encoded)
