"""Targets for what Spark and RocksDB write: changelogs, zips, logs, schemas, SSTs, rows."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from engine.checkpoint.check import entry_fields, is_cut_json
from engine.checkpoint.file_check import check_sst, check_zip_file
from engine.errors import DamagedError
from engine.local.checksums import crc32c
from engine.rocksdb.merge import parse_current
from engine.rocksdb.sst_blocks import decompress_sst_block
from engine.state.compression import CODECS, Compressor, compress_block, decompress_block, decompress_chunks
from engine.state.settings import SPARK_OLD_CHECKPOINT, StateStoreSettings
from engine.state.zips import read_state_zip
from index.errors import BatchLogError, DamagedChangelogError, FormatError, LineageError
from index.java_text import decode_modified_utf8, decode_utf, encode_modified_utf8, encode_utf
from index.rocksdb import lookup, manifest, sst
from index.rocksdb.sst import parse_range_deletions, parse_sst_counts, parse_sst_tail
from index.snapshot.model import LineageItem, UniqueId
from index.spark import changelog, checkpoint, query_logs
from index.spark import names as state_names
from index.spark import schema as state_schema
from index.spark.checksums import (
    HadoopSums,
    check_file_checksum,
    decode_file_checksum,
    encode_file_checksum,
    split_values,
    unwrap_deleted_key,
    unwrap_record,
    unwrap_value,
)
from index.spark.hdfs_rows import RowForm, prefix_key_splitter
from index.spark.lineage import HeaderNeeded, Lineage, Present, decode_lineage, encode_lineage, full_lineage, resolve
from index.spark.metadata import decode_state_metadata, encode_state_metadata
from index.spark.replica import Replica, decode_fence, decode_replica, encode_fence, encode_replica
from index.spark.rescale import repartition_operator
from tests.fuzz.target import Scratch, Target, check_refusal
from tests.unit.index.spark.written_metadata import encode_operator, encode_query_id

SUBJECT: Final = "fuzzed"
# What an input of a few kilobytes may become before a target has seen enough: a stream is taken in pieces.
_PLAIN_BYTES_SEEN: Final = 4 * 1024 * 1024
_BLOCK_BYTES_MAX: Final = 1024 * 1024
_STEPS_MAX: Final = 64
_SEVENTH: Final = state_names.StateVersion(7, UniqueId("u"))
_KEY_TYPES: Final[tuple[state_schema.DataType, ...]] = (
    state_schema.AtomType("string"),
    state_schema.DecimalType(38, 2),
    state_schema.AtomType("long"),
)
_SPLIT_KEY: Final = prefix_key_splitter(
    state_schema.StructType(tuple(state_schema.Field(f"c{n}", of, True) for n, of in enumerate(_KEY_TYPES))), 1
)
_scratch = Scratch()


def run_codec(data: bytes) -> None:
    """The first byte chooses the codec, the rest is the stream; what goes in comes out again."""
    codec = CODECS[data[0] % len(CODECS)] if data else CODECS[0]
    compressor = Compressor(codec)
    packed = compressor.write(data) + compressor.finish()
    assert b"".join(decompress_chunks(codec, [packed])) == data
    seen = 0
    for piece in decompress_chunks(codec, [data[1:9], b"", data[9:]], subject=SUBJECT):
        seen += len(piece)
        if seen > _PLAIN_BYTES_SEEN:
            return


def run_changelog(data: bytes) -> None:
    """However a file is cut into chunks, the same records come of it, or the same refusal."""
    whole, error = _records(iter([data]))
    pieces = (data[at : at + 7] for at in range(0, len(data), 7))
    again, again_error = _records(pieces)
    assert type(error) is type(again_error)
    if error is not None:
        # What is refused in the end may have been read until there; of that, both have read the same.
        shorter = min(len(whole), len(again))
        assert whole[:shorter] == again[:shorter]
        raise error
    assert whole == again
    decoder = changelog.ChangelogDecoder(SUBJECT)
    decoder.feed(data)
    header = decoder.header
    assert header is not None
    written = changelog.encode_header(header.version, header.lineage)
    written += b"".join(changelog.encode_record(header.version, record) for record in whole)
    assert _records(iter([written + changelog.encode_end(header.version)])) == (whole, None)


def _records(chunks: Iterator[bytes]) -> tuple[list[changelog.Record], FormatError | None]:
    decoder = changelog.ChangelogDecoder(SUBJECT)
    found: list[changelog.Record] = []
    try:
        for chunk in chunks:
            found += decoder.feed(chunk)
        decoder.finish()
    except FormatError as error:
        return found, error
    return found, None


def run_changelog_header(data: bytes) -> None:
    for complete in (False, True):
        header = changelog.decode_header(data, complete=complete, subject=SUBJECT)
        assert header is not None or not complete
        if header is not None:
            try:
                changelog.check_header(header, _SEVENTH, subject=SUBJECT)
                changelog.check_leads_back(header, _SEVENTH, state_names.StateVersion(6, UniqueId("t")))
            except (DamagedChangelogError, LineageError) as error:
                check_refusal(error)


def run_lineage(data: bytes) -> None:
    items = decode_lineage(data.decode("utf-8", "surrogatepass"))
    assert decode_lineage(encode_lineage(items)) == items


class _Chain(msgspec.Struct):
    """What a directory claims: names of files, and what the header of each changelog says."""

    names: list[str]
    headers: dict[str, list[tuple[int, str]]]
    version: int
    unique_id: str | None


def run_resolve(data: bytes) -> None:
    """Headers that lead in circles, back, twice or nowhere: every step goes down, so there is an end (H6)."""
    chain = msgspec.json.decode(data, type=_Chain)
    present = Present.of_names(chain.names)
    known: dict[state_names.StateVersion, Lineage] = {}
    for name, items in chain.headers.items():
        parsed = state_names.parse_state_name(name)
        if parsed is not None:
            known[parsed.of] = tuple(LineageItem(version, UniqueId(unique_id)) for version, unique_id in items)
    unique_id = None if chain.unique_id is None else UniqueId(chain.unique_id)
    for _ in range(_STEPS_MAX):
        found = resolve(chain.version, unique_id, present)
        if not isinstance(found, HeaderNeeded):
            versions = [of.version for of in found.changelogs]
            assert versions == sorted(set(versions))
            break
        if found.changelog not in known:
            return
        present = present.with_headers({found.changelog: known[found.changelog]})
    else:
        raise AssertionError("a lineage without an end")
    if unique_id is not None:
        full_lineage(1, LineageItem(chain.version, unique_id), known)


def run_java_utf(data: bytes) -> None:
    text = decode_modified_utf8(data)
    assert decode_modified_utf8(encode_modified_utf8(text)) == text
    decoded = decode_utf(data)
    if decoded is not None:
        assert decode_utf(encode_utf(decoded[0])) is not None


def run_state_names(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    parsed = state_names.parse_state_name(text)
    if parsed is not None:
        name = state_names.state_name(parsed.kind, parsed.of)
        assert (state_names.checksum_name(name) if parsed.checksum else name) == text
    batch = query_logs.parse_batch_name(text)
    assert batch is None or str(batch) == text
    for check in (
        state_names.check_unique_id,
        lambda name: state_names.check_local_name(name, ".sst"),
        lambda name: state_names.check_local_name(name, ".log"),
        state_names.check_zip_entry,
        state_names.check_store_dir,
    ):
        try:
            assert check(text) == text
        except FormatError as error:
            check_refusal(error)
        else:
            assert not {"/", "\\", "\0"} & set(text)


def run_state_metadata(data: bytes) -> None:
    metadata = decode_state_metadata(data)
    assert decode_state_metadata(encode_state_metadata(metadata)) == metadata


def run_state_zip(data: bytes) -> None:
    found = read_state_zip(data, subject=SUBJECT)
    assert not any("/" in name for name in found.files)
    check_zip_file(data, checksum=None, subject=SUBJECT)


def run_state_schema(data: bytes) -> None:
    for schema in state_schema.decode_state_schema(data):
        state_schema.with_unique_names(schema.key)
        state_schema.with_unique_names(schema.value)
        if schema.key_encoder:
            state_schema.decode_key_form(schema)


def run_type(data: bytes) -> None:
    state_schema.with_unique_names(state_schema.decode_type(data.decode("utf-8", "surrogatepass")))


def run_file_checksum(data: bytes) -> None:
    checksum = decode_file_checksum(data, subject=SUBJECT)
    assert decode_file_checksum(encode_file_checksum(checksum), subject=SUBJECT) == checksum
    check_file_checksum(checksum, crc32c=checksum.crc32c, size_bytes=checksum.main_file_size_bytes, subject=SUBJECT)


def run_hadoop_checksum(data: bytes) -> None:
    """The length of the checksum file before it; the rest is the file."""
    length = data[0] if data else 0
    sums = HadoopSums(data[1 : 1 + length], subject=SUBJECT)
    sums.update(data[1 + length : 20 + length])
    sums.update(data[20 + length :])
    sums.finish()


def run_row_checksum(data: bytes) -> None:
    key, stored = data[:4], data[4:]
    for sum_ in (None, crc32c):
        for delimiter in (b"", b","):
            for check in (
                lambda: split_values(key, stored, delimiter=delimiter, crc32c=sum_),  # noqa: B023  (called at once)
                lambda: unwrap_value(key, stored, delimiter=delimiter, crc32c=sum_),  # noqa: B023  (as above)
                lambda: unwrap_deleted_key(stored, sum_),  # noqa: B023  (as above)
                lambda: unwrap_record((changelog.PUT, key, stored), delimiter=delimiter, crc32c=sum_),  # noqa: B023
            ):
                try:
                    check()
                except FormatError as error:
                    check_refusal(error)


def run_hdfs_row(data: bytes) -> None:
    """A byte says how long the key is. A row goes to RocksDB's form and back; a split key is bounded by the row."""
    size = data[0] if data else 0
    key, value = data[1 : 1 + size], data[1 + size :]
    row = value[: len(value) // 8 * 8]
    for sums in (False, True):
        form = RowForm(sums, crc32c)
        stored = form.from_rocksdb(b"\0" + key, b"\0" + row)
        _, stored_key, framed = form.to_rocksdb(stored)
        found = unwrap_value(stored_key, framed, delimiter=b"", crc32c=crc32c) if sums else framed
        assert (stored_key, found) == (b"\0" + key, b"\0" + row)
        for record in ((changelog.PUT, key, value), (changelog.DELETE, key, b"")):
            try:
                form.to_rocksdb(record)
            except FormatError as error:
                check_refusal(error)
    assert len(_SPLIT_KEY(key)) <= (len(_KEY_TYPES) + 1) * len(key) + 64


def run_batch_logs(data: bytes) -> None:
    """Offsets, commits, an operator's metadata and the id of a query: each is asked, as nobody knows which it is."""
    for decode, encode in _LOGS:
        try:
            found = decode(data)
        except FormatError as error:
            check_refusal(error)
            continue
        if isinstance(found, query_logs.OperatorMetadata):
            query_logs.decode_state_variables(found.properties)
        is_offsets = isinstance(found, query_logs.BatchOffsets)
        # An empty offset at the end is a line that Spark confuses with the end of the one before; it writes none.
        if not (is_offsets and found.offsets and found.offsets[-1].offset == ""):
            assert decode(encode(found)) == found, decode
        if is_offsets:
            StateStoreSettings.from_conf(found.conf, SPARK_OLD_CHECKPOINT)
            for offset in found.offsets:
                is_cut_json(offset.offset)
                newest = checkpoint.newest_entry(offset)
                if newest is not None:
                    checkpoint.plan_cut(["0", "1", "9.compact"], newest)
                    checkpoint.missing_entries(["0", "1"], newest)
    entry_fields(data)
    if (moved_to := decode_fence(data)) is not None:
        assert decode_fence(encode_fence(moved_to)) == moved_to


def _decode_replica(data: bytes) -> Replica:
    found = decode_replica(data, subject=SUBJECT)
    if found is None:
        raise BatchLogError("is that of no replica", subject=SUBJECT)
    return found


_LOGS: Final[tuple[tuple[Callable[[bytes], Any], Callable[[Any], bytes]], ...]] = (
    (query_logs.decode_offsets, query_logs.encode_offsets),
    (query_logs.decode_commit, query_logs.encode_commit),
    (query_logs.decode_operator, encode_operator),
    (query_logs.decode_query_id, encode_query_id),
    (_decode_replica, encode_replica),
)


def run_source_log(data: bytes) -> None:
    moved = checkpoint.PathMap({"/data": "/new", "s3a://b/x": "s3a://c/y"}).relocate_log(data)
    assert checkpoint.PathMap({}).relocate_log(moved) == moved
    checkpoint.PathMap({"/data": "/new"}).relocate(data.decode("utf-8", "replace"))
    checkpoint.check_entry(data, subject=SUBJECT)
    checkpoint.join_entries([("0", data), ("1", data)], 7)


def run_relocation(data: bytes) -> None:
    repartition_operator(data, 7, subject=SUBJECT)
    for target in ("/new", "s3://bucket/new"):
        checkpoint.relocate_operator(data, target, subject=SUBJECT)


def run_sst_tail(data: bytes) -> None:
    """No input raises, as an identity and counts may be missing; whether ranges are deleted has to be known."""
    for size_bytes in (len(data), len(data) + 4096):
        parse_sst_tail(data, size_bytes)
        parse_sst_counts(data, size_bytes)
        with contextlib.suppress(ValueError):
            parse_range_deletions(data, size_bytes)


def run_sst_blocks(data: bytes) -> None:
    """Every function by itself: a checksum does not keep out who writes the checksum too."""

    def parse_footer() -> None:
        sst.decode_footer(data[-53:], len(data) or 1)

    def parse_entries() -> None:
        sst.decode_index_form(dict(sst.decode_entries(data)))

    def parse_index() -> None:
        for delta in (False, True):
            for first_keys in (False, True):
                list(sst.decode_index(data, sst.IndexForm(delta=delta, first_keys=first_keys)))

    def parse_handle() -> None:
        handle, _ = sst.decode_handle(data)
        assert handle.offset >= 0
        assert sst.decode_varint(data, 0)[0] == handle.offset

    for parse in (parse_footer, parse_entries, parse_index, parse_handle):
        try:
            parse()
        except ValueError as error:
            check_refusal(error)


def run_sst_lookup(data: bytes) -> None:
    """The first byte says the form of the index; the next eight are the key."""
    if not data:
        return

    def seek() -> None:
        flags = [bool(data[0] & bit) for bit in (1, 2, 4)]
        properties = sst.IndexForm(delta=flags[0], first_keys=flags[1], user_keys=flags[2])
        key = data[1:9]
        for separator, handle in lookup.BlockIndex(data[9:], properties).seek(key):
            assert separator >= key
            assert handle.offset >= 0
            assert handle.size_bytes >= 0

    def versions() -> None:
        known = [(of.key, of.kind, of.value) for of in lookup.decode_versions(data)]
        assert known == list(sst.decode_rows(data))

    lookup.may_contain(data[8:], data[:8])
    for parse in (seek, versions, lambda: lookup.decode_deleted_ranges(data)):
        try:
            parse()
        except (ValueError, NotImplementedError) as error:
            check_refusal(error)


def run_write_batch(data: bytes) -> None:
    with contextlib.suppress(DamagedError):
        assert "/" not in parse_current(data, SUBJECT)
    assert all(family >= 0 and write.sequence >= 0 for family, write in lookup.decode_writes(data))


def run_sst(data: bytes) -> None:
    check_sst(_scratch.file(data))


def run_manifest(data: bytes) -> None:
    """As a file, and as the payload of a record that fits its checksum."""
    for is_live in (False, True):
        try:
            manifest.decode_manifest(data, crc32c=crc32c, is_live=is_live, subject=SUBJECT)
        except FormatError as error:
            check_refusal(error)
    assert 0 <= manifest.measure_log(data) <= len(data)
    edit = manifest.decode_edit(data, subject=SUBJECT)
    assert manifest.decode_edit(manifest.encode_edit(edit), subject=SUBJECT) == edit
    state = manifest.apply_edits([edit], subject=SUBJECT)
    written = manifest.encode_manifest(state, crc32c=crc32c)
    assert manifest.decode_manifest(written, crc32c=crc32c, subject=SUBJECT) == state


def run_sst_compression(data: bytes) -> None:
    """The first byte has the algorithm, and whether the size is written."""
    if not data:
        return
    plain = decompress_sst_block(data[0] & 0x7F, data[1:], sized=data[0] >= 0x80, plain_bytes_max=_BLOCK_BYTES_MAX)
    assert len(plain) <= _BLOCK_BYTES_MAX + 1


def run_lzf(data: bytes) -> None:
    """Two bytes of size before the block."""
    packed = compress_block(data)
    assert packed is None or decompress_block(packed, len(data)) == data
    size_bytes = int.from_bytes(data[:2], "big")
    assert len(decompress_block(data[2:], size_bytes)) == size_bytes


TARGETS: Final = (
    Target(name="codec", run=run_codec, covers=(decompress_chunks,)),
    Target(name="changelog", run=run_changelog, covers=(changelog.ChangelogDecoder.feed,)),
    Target(
        name="changelog-header",
        run=run_changelog_header,
        covers=(changelog.decode_header, changelog.check_header, changelog.check_leads_back),
        bytes_max=2048,
    ),
    Target(name="lineage", run=run_lineage, covers=(decode_lineage,), refuses=(UnicodeDecodeError,), bytes_max=2048),
    Target(
        name="resolve",
        run=run_resolve,
        covers=(resolve, full_lineage),
        refuses=(msgspec.MsgspecError, UnicodeDecodeError),
    ),
    Target(
        name="java-utf",
        run=run_java_utf,
        covers=(decode_modified_utf8, decode_utf),
        refuses=(ValueError,),
        bytes_max=512,
    ),
    Target(
        name="state-names",
        run=run_state_names,
        covers=(state_names.parse_state_name, query_logs.parse_batch_name),
        bytes_max=512,
    ),
    Target(name="state-metadata", run=run_state_metadata, covers=(decode_state_metadata,)),
    Target(name="state-zip", run=run_state_zip, covers=(read_state_zip, check_zip_file), bytes_max=8192),
    Target(
        name="state-schema",
        run=run_state_schema,
        covers=(state_schema.decode_state_schema, state_schema.decode_key_form),
    ),
    Target(name="type", run=run_type, covers=(state_schema.decode_type,), refuses=(UnicodeDecodeError,)),
    Target(name="file-checksum", run=run_file_checksum, covers=(decode_file_checksum,), bytes_max=1024),
    Target(name="hadoop-checksum", run=run_hadoop_checksum, covers=(HadoopSums,), bytes_max=1024),
    Target(
        name="row-checksum",
        run=run_row_checksum,
        covers=(split_values, unwrap_value, unwrap_deleted_key, unwrap_record),
        bytes_max=512,
    ),
    Target(
        name="hdfs-row",
        run=run_hdfs_row,
        covers=(RowForm.from_rocksdb, RowForm.to_rocksdb, prefix_key_splitter),
        bytes_max=512,
    ),
    Target(
        name="batch-logs",
        run=run_batch_logs,
        covers=(
            *(decode for decode, _ in _LOGS[:-1]),
            decode_fence,
            decode_replica,
            StateStoreSettings.from_conf,
            checkpoint.newest_entry,
            entry_fields,
            query_logs.decode_state_variables,
            is_cut_json,
        ),
    ),
    Target(
        name="source-log",
        run=run_source_log,
        covers=(checkpoint.check_entry, checkpoint.join_entries, checkpoint.PathMap.relocate_log),
    ),
    Target(name="relocation", run=run_relocation, covers=(checkpoint.relocate_operator, repartition_operator)),
    Target(name="sst-tail", run=run_sst_tail, covers=(parse_sst_tail, parse_sst_counts, parse_range_deletions)),
    Target(
        name="sst-blocks",
        run=run_sst_blocks,
        covers=(
            sst.decode_footer,
            sst.decode_index_form,
            sst.decode_entries,
            sst.decode_index,
            sst.read_index_entries,
            sst.decode_handle,
            sst.decode_varint,
        ),
    ),
    Target(
        name="sst-lookup",
        run=run_sst_lookup,
        covers=(
            lookup.BlockIndex.seek,
            lookup.decode_versions,
            lookup.decode_deleted_ranges,
            lookup.may_contain,
            sst.read_entries,
        ),
    ),
    Target(
        name="write-batch",
        run=run_write_batch,
        covers=(lookup.decode_writes, parse_current),
        refuses=(ValueError, NotImplementedError),
    ),
    Target(
        name="manifest", run=run_manifest, covers=(manifest.decode_log, manifest.decode_edit, manifest.decode_manifest)
    ),
    Target(name="sst", run=run_sst, covers=(check_sst,)),
    Target(
        name="sst-compression",
        run=run_sst_compression,
        covers=(decompress_sst_block,),
        refuses=(ValueError, NotImplementedError),
    ),
    Target(name="lzf", run=run_lzf, covers=(decompress_block,), refuses=(ValueError,), bytes_max=2048),
)
