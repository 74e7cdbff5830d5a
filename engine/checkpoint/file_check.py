"""Read a file of a checkpoint whole, and refuse it if it is not what was written (design 0005, K2 to K4).

A changelog or a zip is read more strictly than by a load: Spark reads a zip from its front, by what is before and
behind each entry, and we by the list at its end; so both are looked at. Hadoop's hidden checksums, which no store
lists, are there on this machine's file systems only.

An SST is walked block by block, each against its stored checksum. RocksDB verifies a block when it reads it, and
Spark's iterators pass over what it says then: a bad block is an early end. So every block is looked at here, whether a
reader would have come by it or not, from the footer on; and the blocks have to account for every byte of the file.

All of it blocks.
"""

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from engine.checkpoint.errors import reading
from engine.errors import DamagedError, bare_message
from engine.local.checksums import BLOCK_SUMS, crc32c, sum_block
from engine.local.scan import READ_FLAGS, opened
from engine.rocksdb.sst_blocks import decompress_sst_block
from engine.state.blocks import BLOCK_MARGIN_BYTES, Blocks, TakeBlocks
from engine.state.compression import Codec, decompress_chunks
from engine.state.zips import ZIP_BYTES_MAX, StateZip, read_state_zip
from index.errors import DamagedChangelogError, FormatError
from index.rocksdb import sst
from index.spark import checksums
from index.spark.changelog import PUT, ChangelogDecoder, ChangelogHeader, check_header
from index.spark.names import StateVersion, checksum_name, snapshot_name

_CHUNK_BYTES: Final = 256 * 1024
_HINT: Final = "the file was altered or cut short; take it from a backup, or let an older version be loaded"

# Of a zip: what is before an entry, its line in the list at the end, and the end of that list.
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_LISTED: Final = struct.Struct("<4s6H3L5H2L")
_END: Final = struct.Struct("<4s4H2LH")
_LOCAL_MAGIC: Final = b"PK\x03\x04"
_LISTED_MAGIC: Final = b"PK\x01\x02"
_DESCRIPTOR_MAGIC: Final = b"PK\x07\x08"
_END_MAGIC: Final = b"PK\x05\x06"
_DESCRIPTOR: Final = struct.Struct("<3L")
_FOLLOWED: Final = 0x8

_HIDDEN_BYTES_MAX: Final = 256 * 1024 * 1024
_HIDDEN_HINT: Final = "the file was replaced by something else, or the disk fails; take it from a backup"


class ChangelogReport(msgspec.Struct, frozen=True, kw_only=True):
    """A changelog in which nothing is wrong."""

    header: ChangelogHeader
    records: int
    # How many bytes its lineage takes of the 65,535 that it may (design 0005, K6).
    lineage_bytes: int


def check_changelog_file(path: Path, codec: Codec, at: StateVersion, *, checksum: bytes | None) -> ChangelogReport:
    """Read a changelog from its beginning to its end, a bounded part of it at a time. Blocks.

    Its name says what it is `at`, the offset log the codec, and `checksum` is the `.crc` beside it, if there is one.

    Raises:
        DamagedError: It does not decompress, or cannot be read, then with the `OSError` as its cause.
        DamagedChangelogError: Header, records or end mark are not what a writer writes, or go with another name: one of
            a snapshot of the HDFS-backed provider deletes nothing (0004, N1a).
        FileChecksumError: It does not fit its `.crc`, or that is none.
        UnknownFormatError: A newer Spark wrote the file or its `.crc`.
        UnsafeNameError: An id in its lineage cannot be part of a file name.
        TargetError: This machine lacks what it takes to read it.
    """
    subject = str(path)
    expected = None if checksum is None else checksums.decode_file_checksum(checksum, subject=checksum_name(subject))
    decoder = ChangelogDecoder(subject)
    records = sum_ = size_bytes = 0

    def summed() -> Iterator[bytes]:
        nonlocal sum_, size_bytes
        for chunk in _chunks(path, _CHUNK_BYTES):
            sum_ = crc32c(chunk, sum_)
            size_bytes += len(chunk)
            yield chunk

    is_snapshot = at.is_hdfs and path.name == snapshot_name(at)
    with reading(path, _HINT):
        for piece in decompress_chunks(codec, summed(), subject=subject):
            for start in range(0, len(piece), _CHUNK_BYTES):
                found = decoder.feed(piece[start : start + _CHUNK_BYTES])
                records += len(found)
                if is_snapshot and any(kind != PUT for kind, _, _ in found):
                    raise DamagedChangelogError("deletes a key, and is a snapshot", subject=subject, hint=_HINT)
        decoder.finish()
    header = decoder.header
    assert header is not None  # noqa: S101 — `finish` refuses a file without one
    check_header(header, at, subject=subject)
    if expected is not None:
        checksums.check_file_checksum(expected, crc32c=sum_, size_bytes=size_bytes, subject=subject)
    # Two strings, each with its length before it, of which the first is the version.
    lineage_bytes = max(0, header.size_bytes - 6)
    return ChangelogReport(header=header, records=records, lineage_bytes=lineage_bytes)


def check_zip_file(source: Path | bytes, *, checksum: bytes | None, subject: str = "") -> StateZip:
    """Read a snapshot's zip whole: as we load it, and as Spark does. Blocks.

    What stays unseen without a `.crc` is what neither reads: the times of its entries. Whether its SSTs are there, and
    of the sizes that it says, is for the caller to see.

    Raises:
        DamagedError: Not such a zip, or unreadable, then with the `OSError` as its cause.
        UnsafeNameError: A name in it is unsafe.
        FormatError: Its metadata cannot be read, or it does not fit its `.crc`.
        TargetError: This machine lacks what it takes to read it.
    """
    subject = subject or (str(source) if isinstance(source, Path) else "zip")
    with reading(Path(subject), _HINT):
        data = source if isinstance(source, bytes) else b"".join(_chunks(source, _CHUNK_BYTES))
    if len(data) > ZIP_BYTES_MAX:
        raise DamagedError(f"has more than {ZIP_BYTES_MAX} bytes", operation="check", subject=subject, hint=_HINT)
    if checksum is not None:
        expected = checksums.decode_file_checksum(checksum, subject=checksum_name(subject))
        checksums.check_file_checksum(expected, crc32c=crc32c(data), size_bytes=len(data), subject=subject)
    found = read_state_zip(data, subject=subject)
    try:
        _check_stream(data)
    except (ValueError, struct.error) as error:
        message = f"cannot be read from its front, as Spark reads it: {error}"
        raise DamagedError(message, operation="check", subject=subject, hint=_HINT) from error
    return found


def find_misfit(path: Path, checksum: bytes) -> str:
    """Compare a file whose name has no id with its `.crc`; return in which way they differ, or "". Blocks.

    Either may be the one that is right: a later Spark writes such a name again without its `.crc` (0004, N5).
    """
    sum_ = size_bytes = 0
    with reading(path, _HINT):
        for chunk in _chunks(path, _CHUNK_BYTES):
            sum_ = crc32c(chunk, sum_)
            size_bytes += len(chunk)
    try:
        expected = checksums.decode_file_checksum(checksum, subject=path.name)
        checksums.check_file_checksum(expected, crc32c=sum_, size_bytes=size_bytes, subject=path.name)
    except FormatError as error:
        return f"does not fit {path.name} ({bare_message(error)})"
    return ""


def _opened(path: Path) -> io.FileIO:
    return io.FileIO(path, opener=lambda name, _: os.open(name, READ_FLAGS))


def _chunks(path: Path, size_bytes: int) -> Iterator[bytes]:
    with _opened(path) as source:
        while chunk := source.read(size_bytes):
            yield chunk


def _check_stream(data: bytes) -> None:
    """Check that entries follow each other from the first byte on, and that the list at the end says the same.

    `read_state_zip` has taken the zip before: the list is whole, and the contents fit the checksums in it.

    Raises:
        ValueError: Something is between them, or is said twice and differently.
        struct.error: It ends too soon.
    """
    end = data.rfind(_END_MAGIC)
    _, disk, first_disk, here, count, list_bytes, list_at, comment = _END.unpack_from(data, end)
    if (disk, first_disk, here, comment) != (0, 0, count, 0) or end + _END.size != len(data):
        raise ValueError("its end record is none that a snapshot has")
    if list_at + list_bytes != end:
        raise ValueError("its list of entries does not end where the end record begins")
    at, listed_at = 0, list_at
    for _ in range(count):
        listed = _LISTED.unpack_from(data, listed_at)
        magic, _, needed, flags, method, _, _, crc, packed, plain, name_bytes, extra, remark, *_, entry_at = listed
        if magic != _LISTED_MAGIC or entry_at != at:
            raise ValueError(f"its list has an entry at byte {entry_at}, and one is at {at}")
        name = data[listed_at + _LISTED.size : listed_at + _LISTED.size + name_bytes]
        listed_at += _LISTED.size + name_bytes + extra + remark
        at = _check_entry(data, at, name, (needed, flags, method), (crc, packed, plain))
    if (at, listed_at) != (list_at, end):
        raise ValueError(f"there are bytes between its entries and the list of them, from byte {at} on")


def _check_entry(data: bytes, at: int, name: bytes, kind: tuple[int, int, int], content: tuple[int, int, int]) -> int:
    """Check one entry by what is before and behind its data; return where the next one begins."""
    magic, needed, flags, method, _, _, crc, packed, plain, name_bytes, extra = _LOCAL.unpack_from(data, at)
    name_at = at + _LOCAL.size
    data_at = name_at + name_bytes + extra
    if magic != _LOCAL_MAGIC or (needed, flags, method) != kind or data[name_at : name_at + name_bytes] != name:
        raise ValueError(f"what is at byte {at} is not the entry {name!r} that its list says")
    end: int = data_at + content[1]
    if not flags & _FOLLOWED:
        if (crc, packed, plain) != content:
            raise ValueError(f"the entry {name!r} and the list say different sizes or checksums of it")
        return end
    if (crc, packed, plain) not in ((0, 0, 0), content):
        raise ValueError(f"the entry {name!r} says sizes or checksums both before and behind it")
    if data.startswith(_DESCRIPTOR_MAGIC, end):
        end += len(_DESCRIPTOR_MAGIC)
    if _DESCRIPTOR.unpack_from(data, end) != content:
        raise ValueError(f"what is behind the entry {name!r} and the list say different sizes or checksums of it")
    return end + _DESCRIPTOR.size


def check_hidden(path: Path) -> None:
    """Compare a file with Hadoop's hidden checksum, if it has one; FileChecksumError: they do not fit.

    DamagedError: one of them cannot be read. TargetError: this machine lacks what it takes to read them.
    """
    hidden = path.with_name(checksums.hadoop_checksum_name(path.name))
    with reading(hidden, _HIDDEN_HINT):
        try:
            source = _opened(hidden)
        except FileNotFoundError:
            return
    with reading(path, _HIDDEN_HINT):
        with io.BufferedReader(source) as buffered:
            size_bytes = path.stat().st_size
            stored = buffered.read(min(_HIDDEN_BYTES_MAX, checksums.hadoop_checksum_bytes(size_bytes, 1)) + 1)
        sums = checksums.HadoopSums(stored, subject=str(path))
        for data in _chunks(path, _WINDOW_BYTES):
            sums.update(data)
        sums.finish()


_WINDOW_BYTES: Final = 1024 * 1024
# What is parsed is held in memory: an index of a file of several gigabytes. Data blocks and filters are only summed up.
_PARSED_BYTES_MAX: Final = 256 * 1024 * 1024
# All of them together, beyond that: a multiple of the size of the file. No index is packed so well.
_RATIO_MAX: Final = 32
_UINT32: Final = 0xFFFFFFFF
_BLOCK_SUM: Final = struct.Struct("<L")
_SST_HINT: Final = "the file was altered or cut short; take it from a backup, or restore the checkpoint"


class SstReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at of an SST in which nothing is wrong."""

    # Blocks that fit their checksums, data or not.
    blocks: int = 0
    # Why it could not be checked; "" if it was.
    unchecked: str = ""


# Of blocks that are taken at once, but for the last one.
_TAKEN_BYTES: Final = 4 * 1024 * 1024


def check_sst(path: Path, take: TakeBlocks | None = None) -> SstReport:
    """Read every block of an SST, and compare it with its checksum. Blocks.

    Whether it is still the file that was meant when all of it was read is for the caller to know. `take` gets all data
    blocks, each once it fits its checksum, some of them at once; without it none of them is decompressed. A ValueError
    of it is damage, and a NotImplementedError leaves the SST unchecked.

    A table without checksums is unchecked, and so is one of a kind, version, checksum or compression of its index that
    is unknown here.

    Raises:
        DamagedError: A block does not fit its checksum, or does not lead to where blocks are; bytes belong to no block;
            the footer is none; or the file cannot be read, then with the `OSError` as its cause.
        TargetError: This machine lacks what it takes to read it.
    """
    with reading(path, _SST_HINT), opened(path) as descriptor:
        return _Walk(path, descriptor, take).report()


class _Walk:
    def __init__(self, path: Path, descriptor: int, take: TakeBlocks | None) -> None:
        self._path = path
        self._take = take
        # Data blocks to be taken: where they are in the window, and those that were compressed.
        self._begins: list[int] = []
        self._sizes: list[int] = []
        self._plain: list[bytes] = []
        self._plain_held_bytes = 0
        self._descriptor = descriptor
        self._size_bytes = os.fstat(descriptor).st_size
        # The part of the file that was read last, in one buffer: a new one each time costs more than to read it.
        self._window_bytes = _WINDOW_BYTES if take is None else _TAKEN_BYTES
        self._buffer = bytearray(min(self._window_bytes, self._size_bytes) + 2 * BLOCK_MARGIN_BYTES)
        self._window = memoryview(b"")
        self._window_at = 0
        self._blocks = 0
        # What blocks that are parsed hold, decompressed.
        self._plain_bytes = 0
        # What blocks cover, in the order in which they were read: first and last byte of each run.
        self._runs: list[list[int]] = []

    def report(self) -> SstReport:
        tail = self._read(max(0, self._size_bytes - sst.FOOTER_BYTES), sst.FOOTER_BYTES)
        if other := sst.OTHER_TABLES.get(int.from_bytes(tail[-8:], "little")):
            return SstReport(unchecked=f"is {other}, which has no checksums of blocks")
        try:
            footer = sst.decode_footer(tail, self._size_bytes)
        except ValueError as error:
            raise self._damaged(str(error)) from error
        if footer.checksum not in BLOCK_SUMS:
            return self._without_sums(footer)
        self._footer = footer
        self._sum = BLOCK_SUMS[footer.checksum]
        if not footer.is_whole(self._sum):
            raise self._damaged(f"footer at offset {footer.offset} does not fit its checksum")
        if footer.format_version > sst.FORMAT_VERSION_MAX:
            known = sst.FORMAT_VERSION_MAX
            return SstReport(unchecked=f"is of format version {footer.format_version}, and {known} is known")
        try:
            self._walk(footer)
        except NotImplementedError as error:
            return SstReport(unchecked=f"has {error}, which nobody here knows")
        self._check_coverage(footer.offset)
        return SstReport(blocks=self._blocks)

    def _walk(self, footer: sst.SstFooter) -> None:
        contents = self._contents("metaindex", footer.metaindex)
        with self._parsing("metaindex", footer.metaindex):
            meta = dict(sst.decode_entries(contents))
        handles = {name: self._handle(name, value) for name, value in meta.items()}
        if self._take is not None and sst.COMPRESSION_DICTIONARY in handles:
            raise NotImplementedError("a compression dictionary")
        form = sst.IndexForm()
        if (properties := handles.get(sst.PROPERTIES_BLOCK)) is not None:
            contents = self._contents("properties", properties)
            with self._parsing("properties", properties):
                form = sst.decode_index_form(dict(sst.decode_entries(contents)))
            if form.format_version not in (None, footer.format_version):
                raise self._damaged(
                    f"footer says format version {footer.format_version}, and the properties {form.format_version}"
                )
        index = footer.index or handles.get(sst.INDEX_BLOCK)
        if index is None:
            raise self._damaged("metaindex block leads to no index")
        for name, handle in handles.items():
            if sst.is_filter_index(name):
                self._check_index("filter", handle, form)
            elif name not in (sst.INDEX_BLOCK, sst.PROPERTIES_BLOCK):
                self._check(sst.meta_block_kind(name), handle)
        if form.two_levels:
            data_blocks = self._check_partitions(index, form)
        else:
            data_blocks, _ = self._check_index("data", index, form)
        self._pass_on()
        if form.data_blocks not in (None, data_blocks):
            raise self._damaged(f"properties block counts {form.data_blocks} data blocks, and {data_blocks} are there")

    def _check_partitions(self, index: sst.BlockHandle, form: sst.IndexForm) -> int:
        """Check every block that an index of two levels leads to; return the number of data blocks."""
        data_blocks = above = reached = 0
        for partition in self._index("index", index, form):
            block = sst.BlockHandle(*partition)
            if block.offset < above:
                raise self._damaged(f"index block at offset {index.offset} leads back to offset {block.offset}")
            above = block.end
            count, reached = self._check_index("data", block, form, "index partition", reached)
            data_blocks += count
        return data_blocks

    def _check_index(
        self, of: str, handle: sst.BlockHandle, form: sst.IndexForm, kind: str = "index", reached: int = 0
    ) -> tuple[int, int]:
        """Check every block of an index block, ascending; return their number, and where they end. The hot loop."""
        kind = f"{of} {kind}" if of == "filter" else kind
        takes = self._take is not None and of == "data"
        begins, sizes = self._begins, self._sizes
        count, run = 0, [0, 0]
        block_sum, base, stored_sum = self._sum, self._footer.base_context_checksum, _BLOCK_SUM.unpack_from
        window, window_at, window_end = memoryview(b""), 0, 0
        for offset, size in self._index(kind, handle, form):
            if window is not self._window:
                window, window_at, window_end = self._window, self._window_at, self._window_at + len(self._window)
            if offset < reached:
                raise self._damaged(f"{kind} block at offset {handle.offset} leads back to offset {offset}")
            count += 1
            reached = offset + size + sst.TRAILER_BYTES
            if offset < window_at or reached > window_end:
                self._check(of, sst.BlockHandle(offset, size))
                self._hold(of, sst.BlockHandle(offset, size))
                continue
            at, stop = offset - window_at, reached - window_at - 4
            found = block_sum(window[at:stop])
            if base:
                found = found + sst.checksum_modifier(base, offset) & _UINT32
            if found != stored_sum(window, stop)[0]:
                raise self._misfit(of, sst.BlockHandle(offset, size))
            self._blocks += 1
            if run[1] == offset:
                run[1] = reached
            else:
                run = [offset, reached]
                self._runs.append(run)
            if takes and window[stop - 1] == 0:
                begins.append(at + BLOCK_MARGIN_BYTES)
                sizes.append(size)
            elif takes:
                self._hold(of, sst.BlockHandle(offset, size))
        return count, reached

    def _index(self, kind: str, handle: sst.BlockHandle, form: sst.IndexForm) -> Iterator[tuple[int, int]]:
        contents = self._contents(kind, handle)
        with self._parsing(kind, handle):
            yield from sst.decode_index(contents, form)

    def _handle(self, name: bytes, value: bytes) -> sst.BlockHandle:
        try:
            return sst.decode_handle(value)[0]
        except ValueError as error:
            raise self._damaged(f"metaindex block has no place of {name!r}: it {error}") from error

    @contextmanager
    def _parsing(self, kind: str, handle: sst.BlockHandle) -> Iterator[None]:
        """Let a ValueError name the block that a part of the file was parsed from."""
        try:
            yield
        except ValueError as error:
            raise self._damaged(f"{kind} block at offset {handle.offset} {error}") from error

    def _hold(self, of: str, handle: sst.BlockHandle) -> None:
        """Decompress a block that is to be taken."""
        if self._take is None or of != "data":
            return
        block = self._decompressed(of, handle)
        self._plain.append(block)
        self._plain_held_bytes += len(block)
        if self._plain_held_bytes >= _TAKEN_BYTES:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._take is None:
            return
        try:
            if self._begins:
                self._take(Blocks(self._buffer, self._begins, self._sizes))
            if self._plain:
                self._take(Blocks.joined(self._plain))
        except ValueError as error:
            raise self._damaged(f"a data block before offset {self._window_at + len(self._window)} {error}") from error
        self._begins.clear()
        self._sizes.clear()
        self._plain, self._plain_held_bytes = [], 0

    def _contents(self, kind: str, handle: sst.BlockHandle) -> bytes:
        """Return the content of a block that is parsed, once it fits its checksum."""
        self._check(kind, handle)
        plain = self._decompressed(kind, handle)
        if len(plain) > handle.size_bytes:
            self._plain_bytes += len(plain)
        if self._plain_bytes > _PARSED_BYTES_MAX + _RATIO_MAX * self._size_bytes:
            raise self._damaged(f"{kind} block at offset {handle.offset} holds more than an index can have")
        return plain

    def _decompressed(self, kind: str, handle: sst.BlockHandle) -> bytes:
        """Return the content of a block that fits its checksum."""
        if handle.size_bytes > _PARSED_BYTES_MAX:
            raise NotImplementedError(f"a {kind} block of {handle.size_bytes} bytes")
        at, size = handle.offset - self._window_at, handle.size_bytes + 1
        is_there = at >= 0 and at + size <= len(self._window)
        data = bytes(self._window[at : at + size]) if is_there else self._read(handle.offset, size)
        contents, compression = data[:-1], data[-1]
        if compression == 0:
            return contents
        with self._parsing(kind, handle):
            return decompress_sst_block(
                compression, contents, sized=self._footer.format_version > 1, plain_bytes_max=_PARSED_BYTES_MAX
            )

    def _check(self, kind: str, handle: sst.BlockHandle) -> None:
        """Compare one block with its checksum, and read on from there."""
        if handle.end > self._footer.offset:
            raise self._damaged(
                f"{kind} block at offset {handle.offset} would have {handle.size_bytes} bytes, more than there are"
            )
        is_whole = self._sum_of(handle, self._footer.checksum) == self._stored_sum(handle)
        if not is_whole and not (kind == "properties" and self._is_ingested(handle)):
            raise self._misfit(kind, handle)
        self._blocks += 1
        self._runs.append([handle.offset, handle.end])

    def _is_ingested(self, handle: sst.BlockHandle) -> bool:
        """Return whether properties fit their checksum but for a number that an ingestion wrote there."""
        if handle.size_bytes > _PARSED_BYTES_MAX:
            return False
        found = self._sum(sst.without_global_sequence(self._read(handle.offset, handle.size_bytes + 1)))
        modifier = sst.checksum_modifier(self._footer.base_context_checksum, handle.offset)
        return found + modifier & _UINT32 == self._stored_sum(handle)

    def _sum_of(self, handle: sst.BlockHandle, checksum: int) -> int:
        size = handle.size_bytes + 1
        if size + 4 <= self._window_bytes:
            self._slide(handle.offset)
            at = handle.offset - self._window_at
            found = BLOCK_SUMS[checksum](self._window[at : at + size])
        else:
            pieces = (
                self._read(at, min(_WINDOW_BYTES, handle.offset + handle.size_bytes - at))
                for at in range(handle.offset, handle.offset + handle.size_bytes, _WINDOW_BYTES)
            )
            found = sum_block(checksum, pieces, self._read(handle.offset + handle.size_bytes, 1))
        return found + sst.checksum_modifier(self._footer.base_context_checksum, handle.offset) & _UINT32

    def _stored_sum(self, handle: sst.BlockHandle) -> int:
        return int.from_bytes(self._read(handle.end - 4, 4), "little")

    def _slide(self, offset: int) -> None:
        self._pass_on()
        size_bytes = min(self._window_bytes, self._size_bytes - offset)
        self._window = memoryview(self._buffer)[BLOCK_MARGIN_BYTES : BLOCK_MARGIN_BYTES + size_bytes]
        self._window_at = offset
        done = 0
        while done < size_bytes:
            read = os.preadv(self._descriptor, [self._window[done:]], offset + done)
            if not read:
                raise self._shorter()
            done += read

    def _read(self, offset: int, size_bytes: int) -> bytes:
        data = os.pread(self._descriptor, size_bytes, offset)
        while len(data) < min(size_bytes, self._size_bytes - offset):
            more = os.pread(self._descriptor, size_bytes - len(data), offset + len(data))
            if not more:
                raise self._shorter()
            data += more
        return data

    def _check_coverage(self, footer_offset: int) -> None:
        """Check that there are only blocks, and zeros between them."""
        reached = 0
        for offset, end in [*sorted(self._runs), [footer_offset, footer_offset]]:
            if offset < reached:
                raise self._damaged(f"two blocks have the bytes from offset {offset} on")
            for at in range(reached, offset, _WINDOW_BYTES):
                if any(self._read(at, min(_WINDOW_BYTES, offset - at))):
                    raise self._damaged(f"the {offset - reached} bytes from offset {reached} on belong to no block")
            reached = end

    def _without_sums(self, footer: sst.SstFooter) -> SstReport:
        """Report a checksum type that is none or unknown: the byte that says so may be what is damaged."""
        self._footer = footer
        handle = footer.metaindex
        name = sst.CHECKSUM_NAMES.get(footer.checksum, f"{footer.checksum}")
        if handle.offset >= 0 and handle.end <= footer.offset:
            stored = self._stored_sum(handle)
            if any(self._sum_of(handle, known) == stored for known in BLOCK_SUMS):
                raise self._damaged(f"footer says checksum type {name}, and its blocks have another")
            if footer.checksum != sst.NO_CHECKSUM or stored == sst.checksum_modifier(
                footer.base_context_checksum, handle.offset
            ):
                what = "no checksums" if footer.checksum == sst.NO_CHECKSUM else f"checksums of the unknown type {name}"
                return SstReport(unchecked=f"was written with {what}")
        raise self._damaged(f"footer says checksum type {name}, and leads to no block of that kind")

    def _misfit(self, kind: str, handle: sst.BlockHandle) -> DamagedError:
        if handle.end > self._size_bytes:
            return self._damaged(f"{kind} block at offset {handle.offset} reaches beyond the file")
        return self._damaged(
            f"{kind} block at offset {handle.offset} of {handle.size_bytes} bytes does not fit its checksum"
        )

    def _shorter(self) -> DamagedError:
        return self._damaged(f"has become shorter than {self._size_bytes} bytes while it was read")

    def _damaged(self, message: str) -> DamagedError:
        return DamagedError(message, operation="check", subject=str(self._path), hint=_SST_HINT)
