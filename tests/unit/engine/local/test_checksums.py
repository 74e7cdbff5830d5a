"""Checksums of files: the library's are zlib's, and zlib computes them where there is no library."""

import runpy
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.local import checksums


@given(st.lists(st.binary(max_size=100)))
def test_the_crc32_is_that_of_zlib_however_the_bytes_come(pieces: list[bytes]) -> None:
    crc = 0
    for piece in pieces:
        crc = checksums.crc32(memoryview(piece), crc)
    assert crc == zlib.crc32(b"".join(pieces))


def test_without_the_library_it_is_zlib_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert runpy.run_path(checksums.__file__)["crc32"] is zlib.crc32
    monkeypatch.undo()
    assert runpy.run_path(checksums.__file__)["crc32"] is checksums.crc32
