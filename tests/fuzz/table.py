"""Every target, by name; and the parsers that have none, each with its reason (architecture, H9)."""

from typing import Final

from tests.fuzz import answers, stored, streams, tables
from tests.fuzz.target import Target

_MODULES: Final = (stored, streams, tables, answers)
TARGETS: Final[dict[str, Target]] = {target.name: target for module in _MODULES for target in module.TARGETS}
# The module that each is in.
MODULES: Final = {target.name: module.__name__.rpartition(".")[2] for module in _MODULES for target in module.TARGETS}

_MOVES: Final = "moves bytes and looks at none of them"
_FETCHES: Final = "fetches an object and gives its bytes to a decoder that is fuzzed"
_TASKS: Final = "reads what the driver, or a task of the same job, has sent a moment ago over Spark, never a store"

# Functions whose names say that they read something, and modules that take bytes apart, with why they have no target.
UNFUZZED: Final[dict[str, str]] = {
    **dict.fromkeys(
        (
            "blobstore.base.Body.read_chunks",
            "blobstore.base.read_blob",
            "blobstore.checkpoint_files.CheckpointWriter.read_chunks",
            "blobstore.local.files.read_chunks",
            "blobstore.base.ReadBody.read_chunks",
            "engine.checkpoint.live.read_small",
            "engine.checkpoint.replica.read_entry",
            "engine.checkpoint.store.read_row_schema",
            "engine.state.checkpoint_dir.CheckpointDir.read_range",
            "engine.state.checkpoint_dir.StateFiles.read_range",
            "engine.state.restore.IndexStateFiles.read_range",
            "engine.local.digests.read_own_file",
            "engine.backup.upload.FileRunBody.read_chunks",
            "engine.backup.upload.FileRunBody.read_digest",
            "engine.backup.upload.PartsBody.read_chunks",
            "engine.backup.upload.PartsBody.read_digest",
            "engine.records.journal.HashedBody.read_digest",
        ),
        _MOVES,
    ),
    **dict.fromkeys(
        (
            "blobstore.s3.store.S3Store.read_lifecycle",
            "engine.checkpoint.replica.read_status",
            "engine.doctor.checks.S3Capabilities.read_lifecycle",
            "engine.inspect.history.read_history",
            "engine.local.digests.parse_sst",
            "engine.local.digests.read_sst",
            "engine.records.indexes.read_index",
            "engine.rocksdb.merge.read_current",
            "engine.rocksdb.merge.read_parent",
            "engine.records.indexes.read_stored_snapshot",
            "engine.records.log.load_scope",
            "engine.state.load.StateLoader.load_in_place",
            "engine.records.find.read_commits",
            "engine.records.log.read_scope",
            "engine.records.log.read_vouched",
            "engine.records.log.load_log",
            "engine.records.log.read_boundaries",
            "engine.records.log.read_boundary",
            "engine.records.log.read_commit",
            "engine.records.log.read_record",
            "engine.records.leases.read_name",
            "engine.records.leases.read_namings",
            "engine.collect.check.read_now_roots",
            "engine.repository.repository.Repository.read_index",
            "engine.records.repository.read_repository_record",
            "engine.restore.restore.read_index_of",
            "engine.records.roots.read_pins",
            "engine.records.roots.read_roots",
            "engine.spark.collection.tasks.read_inventory",
            "engine.spark.collection.tasks.read_plan",
            "engine.spark.sources.plan.load_store",
            "engine.state.changelogs.read_checked",
            "engine.state.key_rules.read_families",
            "engine.state.key_rules.read_forms",
            "engine.state.key_rules.read_key_rules",
            "engine.state.files.StateFileManager.load_snapshot",
            "engine.state.files.StateFileManager.read_header",
            "engine.state.files.StateFileManager.read_snapshot",
        ),
        _FETCHES,
    ),
    **dict.fromkeys(
        (
            "engine.spark.checkpoint",
            "engine.spark.collection.backend",
            "engine.spark.collection.tasks",
            "engine.spark.errors",
            "engine.spark.errors.decode_error",
            "engine.spark.spread",
            "engine.spark.stateful_job",
        ),
        _TASKS,
    ),
    "engine.cli.cmd.keys": "decodes what it has encoded itself",
    "engine.cli.cmd.show": "has an option of the name `unpack`",
    "engine.cli.options.Verb.parse_args": "has click read a command line",
    "engine.cli.cmd.doctor": "decodes what it has encoded itself",
    "engine.checkpoint.beside": "has msgspec read the offsets of a commit, and takes any error for none",
    "engine.checkpoint.beside.decode_batch_offsets": "has msgspec read offsets, and takes any error for none",
    **dict.fromkeys(
        ("engine.checkpoint.collect", "engine.checkpoint.collect.read_look"),
        "has msgspec read a file of this user, and what commits and snapshots hold by decoders that are fuzzed",
    ),
    "engine.records.journal": "has msgspec read lines of a file of this user, and passes over any that is none",
    "engine.follow.follow": "has msgspec read a file of this user, and takes any error for a refusal",
    "index.spark.task_keys": "packs a number of its caller's, and unpacks it again",
    "engine.repository.samza": "has its index read by a decoder that is fuzzed",
    "engine.collect.collect.read_until_not_overtaken": "repeats a reading, whatever it reads",
    "blobstore.local.dirs.read_regular": "asks the file system",
    "blobstore.local.dirs.split_key": "splits a checked key at its last slash",
    "engine.runtime.read_now_ms": "asks for the time",
    "blobstore.local.dirs.TempFiles.read_creation_ms": "matches one name with a pattern of digits",
    "blobstore.local.dirs.TtlLinks.read_ms": "matches one text with a pattern of digits",
    "blobstore.s3.errors.read_date_ms": "has the standard library read one header, and takes any error for no date",
    "blobstore.s3.errors.read_refusal": "picks and shortens words of an answer that the SDK has parsed",
    "blobstore.s3.errors.read_created": "reads a time with `read_time`, which is fuzzed",
}
