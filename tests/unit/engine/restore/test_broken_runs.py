"""Ranges of packs that come wrong and then break off: what has come right is neither damaged nor fetched again."""

from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from blobstore.base import BlobStore, Buffer, Sink
from blobstore.errors import BlobCorruptError, InvalidRequestError, StoreError
from engine.errors import DamagedError
from engine.restore.restore import RestoreResult
from tests.doubles import InterposedStore
from tests.unit.engine.restore.restore_kit import backed_up, blob_of, restored_whole

BREAKS = (BlobCorruptError, InvalidRequestError)
# The index, the pack, a file in one blob, and one in three.
REQUESTS = 1 + 1 + 1 + 3


class _Altering(Sink):
    """Flips a bit of the first byte, if it is to."""

    def __init__(self, sink: Sink, *, flips: bool) -> None:
        self._sink = sink
        self._flips = flips

    @override
    def write(self, data: Buffer) -> None:
        altered = bytearray(data)
        altered[0] ^= self._flips
        self._flips = False
        self._sink.write(altered)


class BreakingStore(InterposedStore):
    """Reads of one blob: whether the first byte of each is flipped, and what it ends with once its bytes have come."""

    def __init__(self, inner: BlobStore, key: str, *reads: tuple[bool, StoreError | None]) -> None:
        super().__init__(inner)
        self._key = key
        self._reads = list(reads)

    @override
    async def read_into(
        self, key: str, sink: Sink, *, start: int = 0, size_bytes: int | None = None, **how: Any
    ) -> None:
        flips, error = self._reads.pop(0) if key == self._key and self._reads else (False, None)
        await super().read_into(key, _Altering(sink, flips=flips), start=start, size_bytes=size_bytes)
        if error is not None:
            raise error


async def restored(tmp_path: Path, *reads: tuple[bool, StoreError | None]) -> RestoreResult:
    """A restore of every form of file whose pack comes like that."""
    bench = await backed_up(tmp_path)
    bench.store = BreakingStore(bench.metered, await blob_of(bench, "packed-1"), *reads)
    result = await bench.restore()
    assert restored_whole(bench)
    return result


@pytest.mark.parametrize("error", BREAKS)
async def test_a_second_fetch_that_breaks_off_once_all_is_right_is_enough(
    tmp_path: Path, error: type[StoreError]
) -> None:
    result = await restored(tmp_path, (True, None), (False, error("broke off", operation="get", key="k")))
    assert result.requests == REQUESTS + 1


@pytest.mark.parametrize("error", BREAKS)
async def test_a_first_fetch_that_breaks_off_once_all_is_right_is_enough(
    tmp_path: Path, error: type[StoreError]
) -> None:
    result = await restored(tmp_path, (False, error("broke off", operation="get", key="k")))
    assert result.requests == REQUESTS


@pytest.mark.parametrize("error", BREAKS)
async def test_a_second_fetch_that_breaks_off_with_a_file_wrong_is_damage(
    tmp_path: Path, error: type[StoreError]
) -> None:
    broken = error("broke off", operation="get", key="k")
    with pytest.raises(DamagedError, match="packed-1") as raised:
        await restored(tmp_path, (True, None), (True, broken))
    assert raised.value.__cause__ is broken
