"""Walks an SST block by block, each against its stored checksum (design 0005, K3).

RocksDB verifies a block when it reads it, and Spark's iterators pass over what it says then: a bad block is an early
end. So every block is looked at here, whether a reader would have come by it or not, from the footer on; and the blocks
have to account for every byte of the file. All of it blocks.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from engine.checkpoint.errors import unreadable
from engine.errors import DamagedError
from engine.local.hashing import BLOCK_SUMS, sum_block
from engine.local.scan import READ_FLAGS
from engine.state.compression import decompress_sst_block
from index.rocksdb.sst import (
    CHECKSUM_NAMES,
    FOOTER_BYTES,
    FORMAT_VERSION_MAX,
    INDEX_BLOCK,
    NO_CHECKSUM,
    OTHER_TABLES,
    PROPERTIES_BLOCK,
    BlockHandle,
    IndexForm,
    SstFooter,
    checksum_modifier,
    decode_entries,
    decode_footer,
    decode_handle,
    decode_index,
    decode_index_form,
    is_filter_index,
    meta_block_kind,
)

_WINDOW_BYTES: Final = 1024 * 1024
# What is parsed is held in memory: an index of a file of several gigabytes. Data blocks and filters are only summed up.
_PARSED_BYTES_MAX: Final = 256 * 1024 * 1024
# All of them together, beyond that: a multiple of the size of the file. No index is packed so well.
_RATIO_MAX: Final = 32
_UINT32: Final = 0xFFFFFFFF
_HINT: Final = "the file was altered or cut short; take it from a backup, or restore the checkpoint"


class SstReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at of an SST in which nothing is wrong."""

    size_bytes: int
    # False: it could not be checked, and `reason` says why.
    checked: bool = True
    reason: str = ""
    format_version: int = 0
    # Which checksum its blocks have.
    checksum: str = ""
    data_blocks: int = 0
    # All blocks, data or not.
    blocks: int = 0
    # Bytes between blocks, all of them zero.
    padding_bytes: int = 0
    # Of all kinds: a key may have several. None: the file does not say.
    entries: int | None = None


def check_sst(path: Path) -> SstReport:
    """Read every block of an SST, and compare it with its checksum. Blocks.

    Args:
        path: The file. Whether it is still the one that was meant when all of it was read is for the caller to know.

    Returns:
        What there was; `checked` is False for a table without checksums, and for one of a kind, version, checksum or
        compression of its index that is unknown here.

    Raises:
        DamagedError: A block does not fit its checksum, or does not lead to where blocks are; bytes belong to no block;
            the footer is none; or the file cannot be read, then with the `OSError` as its cause.
        TargetError: This machine lacks what it takes to read it.
    """
    try:
        descriptor = os.open(path, READ_FLAGS)
    except OSError as error:
        raise unreadable(path, error, _HINT) from error
    try:
        return _Walk(path, descriptor).report()
    except OSError as error:
        raise unreadable(path, error, _HINT) from error
    finally:
        os.close(descriptor)


def _damaged(path: Path, message: str) -> DamagedError:
    return DamagedError(message, operation="check", subject=str(path), hint=_HINT)


class _Walk:
    """One walk through one file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._size_bytes = os.fstat(descriptor).st_size
        # The part of the file that was read last.
        self._window = memoryview(b"")
        self._window_at = 0
        self._blocks = 0
        # What blocks that are parsed hold, decompressed.
        self._plain_bytes = 0
        # What blocks cover, in the order in which they were read: first and last byte of each run.
        self._runs: list[list[int]] = []

    def report(self) -> SstReport:
        tail = self._read(max(0, self._size_bytes - FOOTER_BYTES), FOOTER_BYTES)
        if other := OTHER_TABLES.get(int.from_bytes(tail[-8:], "little")):
            return self._unchecked(f"is {other}, which has no checksums of blocks")
        try:
            footer = decode_footer(tail, self._size_bytes)
        except ValueError as error:
            raise self._damaged(str(error)) from error
        if footer.checksum not in BLOCK_SUMS:
            return self._without_sums(footer)
        self._footer = footer
        self._sum = BLOCK_SUMS[footer.checksum]
        if footer.stored_sum is not None:
            found = self._sum(footer.summed) + checksum_modifier(footer.base_context_checksum, footer.offset)
            if found & _UINT32 != footer.stored_sum:
                raise self._damaged(f"footer at offset {footer.offset} does not fit its checksum")
        if footer.format_version > FORMAT_VERSION_MAX:
            return self._unchecked(f"is of format version {footer.format_version}, and {FORMAT_VERSION_MAX} is known")
        try:
            form, data_blocks = self._walk(footer)
        except NotImplementedError as error:
            return self._unchecked(f"has {error}, which nobody here knows")
        return SstReport(
            size_bytes=self._size_bytes,
            format_version=footer.format_version,
            checksum=CHECKSUM_NAMES[footer.checksum],
            data_blocks=data_blocks,
            blocks=self._blocks,
            padding_bytes=self._check_coverage(footer.offset),
            entries=form.entries,
        )

    def _walk(self, footer: SstFooter) -> tuple[IndexForm, int]:
        """Check every block; return the number of data blocks."""
        meta = dict(self._entries(self._contents("metaindex", footer.metaindex), "metaindex", footer.metaindex))
        handles = {name: self._handle(name, value) for name, value in meta.items()}
        form = IndexForm()
        if (properties := handles.get(PROPERTIES_BLOCK)) is not None:
            form = self._form(properties)
            if form.format_version not in (None, footer.format_version):
                raise self._damaged(
                    f"footer says format version {footer.format_version}, and the properties {form.format_version}"
                )
        index = footer.index or handles.get(INDEX_BLOCK)
        if index is None:
            raise self._damaged("metaindex block leads to no index")
        for name, handle in handles.items():
            if is_filter_index(name):
                self._check_index("filter", handle, form)
            elif name not in (INDEX_BLOCK, PROPERTIES_BLOCK):
                self._check(meta_block_kind(name), handle)
        if form.two_levels:
            data_blocks = self._check_partitions(index, form)
        else:
            data_blocks, _ = self._check_index("data", index, form)
        if form.data_blocks not in (None, data_blocks):
            raise self._damaged(f"properties block counts {form.data_blocks} data blocks, and {data_blocks} are there")
        return form, data_blocks

    def _check_partitions(self, index: BlockHandle, form: IndexForm) -> int:
        """Check every block that an index of two levels leads to; return the number of data blocks."""
        data_blocks = above = reached = 0
        for partition in self._index("index", index, form):
            block = BlockHandle(*partition)
            if block.offset < above:
                raise self._damaged(f"index block at offset {index.offset} leads back to offset {block.offset}")
            above = block.end
            count, reached = self._check_index("data", block, form, "index partition", reached)
            data_blocks += count
        return data_blocks

    def _form(self, properties: BlockHandle) -> IndexForm:
        contents = self._contents("properties", properties)
        try:
            return decode_index_form(dict(decode_entries(contents)))
        except ValueError as error:
            raise self._unusable("properties", properties, error) from error

    def _check_index(
        self, of: str, handle: BlockHandle, form: IndexForm, kind: str = "index", reached: int = 0
    ) -> tuple[int, int]:
        """Check every block of an index block, ascending; return their number, and where they end. The hot loop."""
        kind = f"{of} {kind}" if of == "filter" else kind
        count = 0
        block_sum, base = self._sum, self._footer.base_context_checksum
        for offset, size in self._index(kind, handle, form):
            if offset < reached:
                raise self._damaged(f"{kind} block at offset {handle.offset} leads back to offset {offset}")
            count += 1
            end = offset + size + 1
            reached = end + 4
            at = offset - self._window_at
            if at < 0 or end + 4 - self._window_at > len(self._window):
                self._check(of, BlockHandle(offset, size))
                continue
            stop = end - self._window_at
            window = self._window
            found = block_sum(window[at:stop])
            if base:
                found = found + checksum_modifier(base, offset) & _UINT32
            if found != int.from_bytes(window[stop : stop + 4], "little"):
                raise self._misfit(of, BlockHandle(offset, size))
            self._cover(offset, reached)
        return count, reached

    def _index(self, kind: str, handle: BlockHandle, form: IndexForm) -> Iterator[tuple[int, int]]:
        contents = self._contents(kind, handle)
        try:
            yield from decode_index(contents, form)
        except ValueError as error:
            raise self._unusable(kind, handle, error) from error

    def _handle(self, name: bytes, value: bytes) -> BlockHandle:
        try:
            return decode_handle(value)[0]
        except ValueError as error:
            raise self._damaged(f"metaindex block has no place of {name!r}: it {error}") from error

    def _entries(self, contents: bytes, kind: str, handle: BlockHandle) -> Iterator[tuple[bytes, bytes]]:
        try:
            yield from decode_entries(contents)
        except ValueError as error:
            raise self._unusable(kind, handle, error) from error

    def _contents(self, kind: str, handle: BlockHandle) -> bytes:
        """Return the content of a block, once it fits its checksum."""
        if handle.size_bytes > _PARSED_BYTES_MAX:
            self._check(kind, handle)
            raise NotImplementedError(f"a {kind} block of {handle.size_bytes} bytes")
        self._check(kind, handle)
        data = self._read(handle.offset, handle.size_bytes + 1)
        contents, compression = data[:-1], data[-1]
        if compression == 0:
            return contents
        try:
            plain = decompress_sst_block(
                compression, contents, sized=self._footer.format_version > 1, plain_bytes_max=_PARSED_BYTES_MAX
            )
        except ValueError as error:
            raise self._unusable(kind, handle, error) from error
        self._plain_bytes += len(plain)
        if self._plain_bytes > _PARSED_BYTES_MAX + _RATIO_MAX * self._size_bytes:
            raise self._damaged(f"{kind} block at offset {handle.offset} holds more than an index can have")
        return plain

    def _check(self, kind: str, handle: BlockHandle) -> None:
        """Compare one block with its checksum, and read on from there."""
        if handle.end > self._footer.offset:
            raise self._damaged(
                f"{kind} block at offset {handle.offset} would have {handle.size_bytes} bytes, more than there are"
            )
        if self._sum_of(handle, self._footer.checksum) != self._stored_sum(handle):
            raise self._misfit(kind, handle)
        self._cover(handle.offset, handle.end)

    def _sum_of(self, handle: BlockHandle, checksum: int) -> int:
        size = handle.size_bytes + 1
        if size + 4 <= _WINDOW_BYTES:
            self._slide(handle.offset)
            at = handle.offset - self._window_at
            found = BLOCK_SUMS[checksum](self._window[at : at + size])
        else:
            pieces = (
                self._read(at, min(_WINDOW_BYTES, handle.offset + handle.size_bytes - at))
                for at in range(handle.offset, handle.offset + handle.size_bytes, _WINDOW_BYTES)
            )
            found = sum_block(checksum, pieces, self._read(handle.offset + handle.size_bytes, 1))
        return found + checksum_modifier(self._footer.base_context_checksum, handle.offset) & _UINT32

    def _stored_sum(self, handle: BlockHandle) -> int:
        return int.from_bytes(self._read(handle.end - 4, 4), "little")

    def _slide(self, offset: int) -> None:
        """Read on, from this block."""
        self._window = memoryview(self._read(offset, min(_WINDOW_BYTES, self._size_bytes - offset)))
        self._window_at = offset

    def _read(self, offset: int, size_bytes: int) -> bytes:
        data = os.pread(self._descriptor, size_bytes, offset)
        while len(data) < min(size_bytes, self._size_bytes - offset):
            more = os.pread(self._descriptor, size_bytes - len(data), offset + len(data))
            if not more:
                raise self._damaged(f"has become shorter than {self._size_bytes} bytes while it was read")
            data += more
        return data

    def _cover(self, offset: int, end: int) -> None:
        runs = self._runs
        self._blocks += 1
        if runs and runs[-1][1] == offset:
            runs[-1][1] = end
        else:
            runs.append([offset, end])

    def _check_coverage(self, footer_offset: int) -> int:
        """Check that there are only blocks, and zeros between them; return the number of zeros."""
        padding_bytes = reached = 0
        for offset, end in [*sorted(self._runs), [footer_offset, footer_offset]]:
            if offset < reached:
                raise self._damaged(f"two blocks have the bytes from offset {offset} on")
            for at in range(reached, offset, _WINDOW_BYTES):
                if any(self._read(at, min(_WINDOW_BYTES, offset - at))):
                    raise self._damaged(f"the {offset - reached} bytes from offset {reached} on belong to no block")
            padding_bytes += offset - reached
            reached = end
        return padding_bytes

    def _without_sums(self, footer: SstFooter) -> SstReport:
        """Report a checksum type that is none or unknown: the byte that says so may be what is damaged."""
        self._footer = footer
        handle = footer.metaindex
        name = CHECKSUM_NAMES.get(footer.checksum, f"{footer.checksum}")
        if handle.offset >= 0 and handle.end <= footer.offset:
            stored = self._stored_sum(handle)
            if any(self._sum_of(handle, known) == stored for known in BLOCK_SUMS):
                raise self._damaged(f"footer says checksum type {name}, and its blocks have another")
            if footer.checksum != NO_CHECKSUM or stored == checksum_modifier(
                footer.base_context_checksum, handle.offset
            ):
                what = "no checksums" if footer.checksum == NO_CHECKSUM else f"checksums of the unknown type {name}"
                return self._unchecked(f"was written with {what}")
        raise self._damaged(f"footer says checksum type {name}, and leads to no block of that kind")

    def _unchecked(self, reason: str) -> SstReport:
        return SstReport(size_bytes=self._size_bytes, checked=False, reason=reason)

    def _misfit(self, kind: str, handle: BlockHandle) -> DamagedError:
        if handle.end > self._size_bytes:
            return self._damaged(f"{kind} block at offset {handle.offset} reaches beyond the file")
        return self._damaged(
            f"{kind} block at offset {handle.offset} of {handle.size_bytes} bytes does not fit its checksum"
        )

    def _unusable(self, kind: str, handle: BlockHandle, error: ValueError) -> DamagedError:
        return self._damaged(f"{kind} block at offset {handle.offset} {error}")

    def _damaged(self, message: str) -> DamagedError:
        return _damaged(self._path, message)
