"""Java's texts: two bytes of length and modified UTF-8."""

import pytest

from index.java_text import decode_modified_utf8, decode_utf, encode_modified_utf8, encode_utf


@pytest.mark.parametrize(
    "text,data",
    [
        ("", b""),
        ("v3", b"v3"),
        ("naïve", b"na\xc3\xafve"),
        ("€", b"\xe2\x82\xac"),
        ("\0", b"\xc0\x80"),
        ("\U0001f600", b"\xed\xa0\xbd\xed\xb8\x80"),
        ("a\ud83dz", b"a\xed\xa0\xbdz"),
    ],
)
def test_texts_are_written_and_read_as_java_does(text: str, data: bytes) -> None:
    assert encode_modified_utf8(text) == data
    assert decode_modified_utf8(data) == text
    assert encode_utf(text) == len(data).to_bytes(2, "big") + data
    assert decode_utf(b"xx" + encode_utf(text) + b"more", 2) == (text, 4 + len(data))


@pytest.mark.parametrize("data", [b"\xff", b"\xc3", b"\x80", b"\xf0\x9f\x98\x80", b"a\xe2\x82"])
def test_what_is_no_modified_utf8_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"UTF-8|utf-8"):
        decode_modified_utf8(data)


def test_a_text_that_goes_on_beyond_the_data_is_distinguished_from_one_that_is_damaged() -> None:
    whole = encode_utf("text")
    assert [decode_utf(whole[:length]) for length in range(len(whole))] == [None] * len(whole)
    assert decode_utf(whole) == ("text", 6)


def test_a_text_that_is_too_long_for_its_length_is_refused() -> None:
    assert len(encode_utf("x" * 65_535)) == 65_537
    for text in ("x" * 65_536, "€" * 21_846):
        with pytest.raises(ValueError, match="does not fit"):
            encode_utf(text)
