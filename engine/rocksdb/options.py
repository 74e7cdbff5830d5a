"""What RocksDB is opened with: settings that can be written to a file, and rocksdict's options made of them.

What rocksdict has no call for, a merge operator for one, comes from an `OPTIONS` text of our own, in a directory of our
own.
"""

import tempfile
from pathlib import Path
from typing import Final, Literal

import msgspec
import rocksdict

from engine.errors import UsageError

KIB: Final = 1024
MIB: Final = 1024 * 1024

# The least that RocksDB takes for the text of its options.
_TEXT: Final = """\
[Version]
  rocksdb_version=9.8.4
  options_file_version=1.1

[DBOptions]

[CFOptions "default"]
%s
[TableOptions/BlockBasedTable "default"]
"""
# This form is the only one that RocksDB reads back as it was: the bare name, which it writes itself for an empty
# delimiter, means a comma to its parser.
_MERGE_OPERATOR: Final = "  merge_operator={id=StringAppendOperator;delimiter=%s;}\n"
_NO_COMPACTIONS: Final = "  disable_auto_compactions=true\n"
# Delimiters that this text can express; Spark's are a comma and nothing.
_DELIMITERS: Final = (b"", b",", b"|")
_RAW_MODE: Final = '{"raw_mode":true,"prefix_extractors":{}}'

_COMPRESSIONS: Final = {
    "none": rocksdict.DBCompressionType.none,
    "lz4": rocksdict.DBCompressionType.lz4,
    "snappy": rocksdict.DBCompressionType.snappy,
    "zstd": rocksdict.DBCompressionType.zstd,
}


class RocksDbSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a store is written. None of it is part of the data: every open may choose other values."""

    # Memory that a store fills before it writes one SST file; there are at most two such buffers.
    write_buffer_bytes: int = 16 * MIB
    # Size at which a compaction begins the next SST file.
    file_bytes: int = 16 * MIB
    # How much the first sorted level holds before files move on to the next.
    level_base_bytes: int = 64 * MIB
    # How many flushed files are merged into the first sorted level together.
    level_zero_files: int = 4
    block_cache_bytes: int = 8 * MIB
    compression: Literal["none", "lz4", "snappy", "zstd"] = "lz4"
    background_jobs_max: int = 2
    open_files_max: int = 256
    # Size of a block inside an SST file before compression. Larger ones make smaller files and slower reads.
    block_bytes: int = 4 * KIB
    # Whether files are merged in the background, which a store that is read once does not need.
    compacts: bool = True
    # Between the operands of one key when they are joined, by RocksDB's StringAppendOperator. None: no
    # merge operator, and a store that holds operands is refused.
    merge_delimiter: bytes | None = None


def spark_settings(merge_delimiter: bytes | None = None) -> RocksDbSettings:
    """Return what Spark opens its stores with by default: files that it can read, and goes on with.

    It is Spark's `RocksDBConf`, with RocksDB 9.8's own defaults where that sets none. Blocks of 4 KiB, ten bits of
    bloom filter per key and format 5 are what every open here writes anyway.
    """
    return RocksDbSettings(
        write_buffer_bytes=64 * MIB,
        file_bytes=64 * MIB,
        level_base_bytes=256 * MIB,
        compression="lz4",
        open_files_max=-1,
        merge_delimiter=merge_delimiter,
    )


def make_options(settings: RocksDbSettings, *, compactions: bool = True) -> rocksdict.Options:
    """Make options in raw mode, of which none comes from the directory of the store.

    Raises:
        UsageError: The delimiter cannot be written in the text of options.
    """
    options = _read_options(settings.merge_delimiter, compactions=compactions)
    options.create_if_missing(create_if_missing=False)
    options.set_write_buffer_size(settings.write_buffer_bytes)
    options.set_max_write_buffer_number(2)
    options.set_target_file_size_base(settings.file_bytes)
    options.set_max_bytes_for_level_base(settings.level_base_bytes)
    options.set_level_zero_file_num_compaction_trigger(settings.level_zero_files)
    options.set_max_background_jobs(settings.background_jobs_max)
    options.set_max_open_files(settings.open_files_max)
    options.set_compression_type(_COMPRESSIONS[settings.compression]())
    # One file of RocksDB's own log is enough; none of them is backed up.
    options.set_keep_log_file_num(1)
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(rocksdict.Cache(settings.block_cache_bytes))
    blocks.set_bloom_filter(10, block_based=False)
    blocks.set_format_version(5)
    blocks.set_block_size(settings.block_bytes)
    options.set_block_based_table_factory(blocks)
    return options


def _read_options(delimiter: bytes | None, *, compactions: bool) -> rocksdict.Options:
    """RocksDB's defaults, in raw mode, with those two things that rocksdict has no call for."""
    if delimiter is not None and delimiter not in _DELIMITERS:
        hint = "Spark's stores have a comma (merge operator version 1) or nothing (version 2)"
        raise UsageError(f"no store has {delimiter!r} between operands", operation="choose options", hint=hint)
    text = "" if delimiter is None else _MERGE_OPERATOR % delimiter.decode()
    text += "" if compactions else _NO_COMPACTIONS
    with tempfile.TemporaryDirectory(prefix="tidemark-options-") as private:
        Path(private, "OPTIONS-000001").write_text(_TEXT % text, encoding="ascii")
        Path(private, "rocksdict-config.json").write_text(_RAW_MODE, encoding="ascii")
        _, families = rocksdict.Options.load_latest(private)
    return families["default"]
