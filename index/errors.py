"""What can be wrong with bytes and values, before anything is done with them."""

from typing import Final

import msgspec

from tidemark.errors import TidemarkError

# What msgspec raises for bytes or texts that are not what they should be.
UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)


class FormatError(TidemarkError):
    """Base of everything that this package refuses; `subject` is what was being read."""

    default_hint = "the stored bytes are not what this version of tidemark writes; run `tidemark verify`"


class CorruptIndexError(FormatError):
    """Stored bytes fail their checksum, are cut short, or exceed a size cap (design 0001, F3 to F5)."""


class UnknownFormatError(FormatError):
    """Stored bytes were written by a newer tidemark; a collector leaves its scope alone (design 0002, D9)."""


class IndexInvariantError(FormatError):
    """A value breaks a numbered invariant of design 0001 or 0002."""


class UnsafeNameError(FormatError):
    """A name from outside is not a single safe path component (design 0001, N1)."""


class PlanFileError(FormatError):
    """A file of a collection's plan is not what a collection writes (design 0006, P1)."""


class SamzaFormatError(FormatError):
    """Samza's JSON cannot express the index, or the JSON is not a Samza index."""


class BatchLogError(FormatError):
    """A file of a streaming checkpoint's logs or metadata is not what Spark writes (design 0004, B2)."""


class ClosedCheckpointError(BatchLogError):
    """No query can go on with a checkpoint: it is a replica, or its query has moved (design 0011, Q5 and Q7)."""


class LineageError(FormatError):
    """A lineage has a gap, makes no progress or does not lead back: Spark's INVALID_CHECKPOINT_LINEAGE (0004, R5)."""


class VersionMissingError(FormatError):
    """A version cannot be put together: the snapshot or changelog that it takes is not there (design 0004, R3)."""


class DamagedChangelogError(FormatError):
    """A changelog is cut short, has bytes after its end, or holds what no writer writes (design 0004, L2)."""


class UnsupportedRecordError(FormatError):
    """A changelog of this version cannot hold this record or header (design 0004, L3)."""


class StateMetadataError(FormatError):
    """The `metadata` entry of a snapshot is not what Spark writes (design 0004, 4)."""


class PartitionKeyError(FormatError):
    """By what columns a key of state was given to its partition is not known, or they cannot be decoded (0010, H8)."""


class FileChecksumError(FormatError):
    """A snapshot or changelog is not the file that its `.crc` was written for, or the `.crc` itself is damaged."""


class RowChecksumError(FormatError):
    """A row of a state store does not fit the checksum that is stored with it."""


class ManifestError(FormatError):
    """A MANIFEST is not what RocksDB writes: it is damaged, or contradicts itself (design 0010, M1 to M3)."""


class StoreMergeError(FormatError):
    """Stores cannot be merged by reference, for a reason that the error names (design 0010, R1)."""
