"""Decoding what anybody may have written: what can go wrong, and one JSON object of a run."""

from typing import Final, TypeVar

import msgspec

from index.errors import CorruptIndexError

# What msgspec raises for bytes that are not what they should be.
UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

Value = TypeVar("Value")


def decode_json(data: bytes, kind: type[Value], *, what: str, subject: str) -> Value:
    """Decode one JSON object.

    Args:
        data: Its bytes.
        kind: Its type.
        what: What other bytes are, for errors, such as "no audit record".
        subject: Where it was, for errors.

    Raises:
        CorruptIndexError: It is none.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise CorruptIndexError(f"is {what}: {error}", subject=subject) from error
