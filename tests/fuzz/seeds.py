"""Where the fuzzer begins: golden files, and what our encoders make of small values."""

import itertools
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from blobstore.s3.settings import StoreProfile, encode_profile
from engine.backup.backup import BackupResult, BackupStats
from engine.cli.cmd.commit import ResultFile
from engine.drill.drill import FailedDrill
from engine.local.checksums import crc32c
from engine.metrics.exposition import expose
from engine.metrics.names import Samples
from engine.spark.collection.tasks import encode_inventory
from engine.state.compression import CODECS, Compressor, compress_block
from index.plan import plan_format
from index.plan.collect import DeleteReason, PlannedUpload, Upload
from index.plan.commits import Retention, as_policy
from index.plan.plan_format import SHARDS, AuditRecord, RunHeader, encode_indented, encode_run_header
from index.rocksdb.manifest import BYTEWISE, VersionEdit, decode_log, encode_edit, encode_log
from index.snapshot.contents import files_of
from index.snapshot.dir_diff import strip_removed
from index.snapshot.keys import BLOBS, RunId, upload_key
from index.snapshot.keys import INDEXES as INDEX_SPACE
from index.snapshot.model import DirDelta, IndexDelta, IndexReference, LineageItem, Scope, StoreReference, UniqueId
from index.spark import changelog
from index.spark.checkpoint import CheckpointBackup
from index.spark.lineage import encode_lineage
from index.spark.replica import Fence, Replica, encode_fence, encode_replica
from tests.golden.make_golden import DELTA, INDEXES, RECORDS, SNAPSHOT
from tests.unit.engine.arrow.block_writer import encode_block

GOLDEN: Final = Path(__file__).parents[1] / "golden"
V1: Final = GOLDEN / "v1"
SPARK: Final = GOLDEN / "spark"
_RUN: Final = RunId(f"{1:020d}-{1:020x}")
_LINEAGE: Final = (LineageItem(1, UniqueId("a-1")), LineageItem(2, UniqueId("b-2")))


def _indexes() -> Iterator[bytes]:
    for index in INDEXES.values():
        yield msgspec.msgpack.encode(index)


def _delta() -> Iterator[bytes]:
    """The golden delta on what it leads to: a whole index that has everything which the delta drops."""
    base = SNAPSHOT
    new = msgspec.structs.replace(
        base,
        metadata=msgspec.structs.replace(
            base.metadata, version=43, base=LineageItem(42, base.metadata.unique_id), lineage=()
        ),
        dir=msgspec.structs.replace(strip_removed(base.dir), files_present=base.dir.files_present[:-1]),
    )
    used = {blob.key for _, file in files_of(new.dir) for blob in file.blobs}
    new = msgspec.structs.replace(new, packs=tuple(pack for pack in base.packs if pack.key in used))
    reference = DELTA.base
    change = IndexDelta(
        metadata=new.metadata,
        session=new.session,
        base=reference,
        depth=1,
        dir=DirDelta("", files_dropped=(base.dir.files_present[-1].name,)),
        packs_dropped=tuple(pack.key for pack in base.packs if pack.key not in used),
    )
    whole = msgspec.msgpack.encode(base)
    for delta in (change, DELTA):
        yield len(whole).to_bytes(2, "big") + whole + msgspec.msgpack.encode(delta)


def _records(*names: str) -> Callable[[], Iterator[bytes]]:
    return lambda: (msgspec.msgpack.encode(RECORDS[name]) for name in names)


def _keys() -> Iterator[bytes]:
    scope = Scope("page views", "P 7")
    yield upload_key(BLOBS, scope, "0" * 20, 7).encode()
    yield from (b"log/a@b/%020d.commit" % 7, b"log/a/%020d.boundary" % 7, b"names/a/b~20c/" + b"0" * 20)
    yield from (b"pins/" + b"f" * 20, b"runs/" + _RUN.encode() + b"/run", b"audit/" + _RUN.encode())
    yield from (b"..", b"a/b", b"a\\b", b"a\0", b"~2E", b"~2f", b"x" * 256, "e\u0301\u202e".encode(), b"CON", b"\xff")


def _plan() -> Iterator[bytes]:
    key = upload_key(BLOBS, Scope("j"), "0" * 20, 1)
    yield plan_format.encode_line(PlannedUpload(key, DeleteReason.UNREACHABLE_UPLOAD, 3, created_at_ms=1))
    policy = as_policy(Retention(keep_last=3))
    header = plan_format.PlanHeader(
        run=_RUN,
        repository_id="0" * 20,
        release="1",
        ttl_ms=9,
        now_ms=8,
        listed_at_ms=7,
        retention=policy,
        commits=(plan_format.RootCommit(scope=Scope("j"), number=1, version=1, committed_at_ms=1, kept=None),),
        names=(),
        pins=(),
    )
    yield plan_format.encode_indented(header)
    summary = plan_format.PlanSummary(
        run=_RUN,
        lines_count=0,
        size_bytes=0,
        totals=(),
        listed_count=0,
        listed_bytes=0,
        waiting_count=0,
        waiting_bytes=0,
    )
    yield plan_format.encode_indented(summary)


def _audit() -> Iterator[bytes]:
    names = [field.name for field in msgspec.structs.fields(AuditRecord)]
    counts: dict[str, Any] = {name: 0 for name in names if name.endswith(("_count", "_bytes"))}
    yield encode_indented(
        AuditRecord(
            run=_RUN,
            release="1",
            began_at_ms=1,
            listed_at_ms=1,
            seconds=0.5,
            outcome="done",
            error="",
            retention=as_policy(Retention(keep_last=1)),
            delete_share_max=0.2,
            scopes=(),
            boundaries=(),
            planned=(),
            deleted=(),
            failed=(),
            **counts,
        )
    )


def _inventory() -> Iterator[bytes]:
    key = f"{SHARDS[0].prefix}j/{'0' * 20}-000000"
    yield encode_inventory((), ())
    yield encode_inventory((Upload(key, 1, 2), Upload(f"{key}1", 1, 2)), ())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([pa.field("key", pa.string())])) as stream:
        stream.write_batch(pa.record_batch([pa.array(["a"])], names=["key"]))
    yield bytes(sink.getvalue())


def _entry() -> Iterator[bytes]:
    yield b'{"schema":1,"id":"ambry:/0?v=1","size_bytes":7}'


def _profile() -> Iterator[bytes]:
    yield encode_profile(
        StoreProfile(
            atomic_create=True,
            consistent_lists=True,
            tags=True,
            conditional_multipart=True,
            probed_at_ms=1,
            tidemark="1",
        )
    )
    yield b'{"x":' + b"[" * 2000


def _result() -> Iterator[bytes]:
    key = upload_key(INDEX_SPACE, Scope("j"), "0" * 20, 0)
    reference = StoreReference(
        task="0",
        store="s",
        version=1,
        unique_id=UniqueId("u"),
        index=IndexReference(key=key, sha256=bytes(32), size_bytes=1),
        number=0,
        files_count=0,
        size_bytes=0,
    )
    stats = dict.fromkeys((field.name for field in msgspec.structs.fields(BackupStats)), 0)
    result = BackupResult(
        scope=Scope("j"), reference=reference, base=None, oldest_birth_ms=1, new_keys=(key,), stats=BackupStats(**stats)
    )
    yield msgspec.json.encode(ResultFile(repository_id="0" * 20, result=result))


def _history() -> Iterator[bytes]:
    yield b'{"schema":1}\n{"schema":9}\n\xff\n{"a":' + b"[" * 1500
    failed = FailedDrill(began_at_ms=1, release="1", repository_id="0" * 20, job="j", task=None, error="E", message="m")
    yield msgspec.json.encode(failed) + b"\n"


def _spark(pattern: str, *, size_bytes_max: int = 1 << 20) -> Callable[[], Iterator[bytes]]:
    def files() -> Iterator[bytes]:
        for path in sorted(SPARK.glob(pattern)):
            if path.is_file() and path.stat().st_size <= size_bytes_max:
                yield path.read_bytes()

    return files


def _codecs() -> Iterator[bytes]:
    for number, codec in enumerate(CODECS):
        for path in sorted(SPARK.glob(f"changelog-v?-{codec}/state/0/0/1*.changelog")):
            yield bytes([number]) + path.read_bytes()
        compressor = Compressor(codec)
        yield bytes([number]) + compressor.write(bytes(100_000)) + compressor.finish()


def _changelogs() -> Iterator[bytes]:
    for version in (1, 2, 3, 4):
        typed = version in (2, 4)
        records: list[changelog.Record] = [(changelog.PUT, b"k", b"v"), (changelog.DELETE, b"k", b"")]
        records += [(changelog.MERGE, b"k", b"w"), (changelog.DELETE_RANGE, b"a", b"b")] if typed else []
        body = b"".join(changelog.encode_record(version, record) for record in records)
        lineage = _LINEAGE if version in (3, 4) else ()
        yield changelog.encode_header(version, lineage) + body + changelog.encode_end(version)


def _resolve() -> Iterator[bytes]:
    for headers in (
        {"3_c.changelog": [(2, "b"), (1, "a")], "2_b.changelog": [(1, "a")]},
        {"3_c.changelog": [(3, "c")], "2_b.changelog": [(3, "c")]},
        {"3_c.changelog": [(2, "b"), (2, "b")]},
    ):
        names = ["1_a.changelog", "2_b.changelog", "3_c.changelog", "1.zip", "1_a.zip"]
        for unique_id in ("c", None):
            yield msgspec.json.encode({"names": names, "headers": headers, "version": 3, "unique_id": unique_id})


def _zips() -> Iterator[bytes]:
    yield from _spark("*/state/0/0/*.zip")()
    target = BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("CURRENT", b"x")
        out.writestr("metadata", b'v1\n{"sstFiles":[],"numKeys":1}')
    yield target.getvalue()


def _metadata() -> Iterator[bytes]:
    for data in _spark("*/state/0/0/*.zip")():
        with zipfile.ZipFile(BytesIO(data)) as source:
            yield source.read("metadata")


def _types() -> Iterator[bytes]:
    yield b'{"type":"struct","fields":[{"name":"a","type":"decimal(9,2)","nullable":true,"metadata":{}}]}'
    yield b'{"type":"array","elementType":"varchar(3)","containsNull":true}'
    yield b'{"type":"map","keyType":"string","valueType":"long","valueContainsNull":false}'
    yield b'{"type":"array","containsNull":true,"elementType":' * 101 + b'"long"' + b"}" * 101


def _deep_encoder() -> bytes:
    """A column family whose keys' encoder is deeper than JSON is read."""
    row, head = b'{"type":"struct","fields":[]}', b'{"keyStateEncoderType":"NoPrefixKeyStateEncoderSpec","x":'
    sized = [struct.pack(">iH", 1, len(text)) + text for text in (row, head + b"[" * 1500)]
    return b"\0\2v3" + struct.pack(">i", 1) + b"\0\1a" + (b"\0\0" + sized[0]) * 2 + sized[1] + bytes(4)


def _hadoop() -> Iterator[bytes]:
    stored = b"crc\0" + struct.pack(">II", 4, zlib.crc32(b"data"))
    yield bytes([len(stored)]) + stored + b"data"


def _source_logs() -> Iterator[bytes]:
    yield b'v1\n{"path":"file:///data/a.json","timestamp":1,"batchId":0}\n{"path":"s3a://b/x/c","batchId":9}'


def _blocks() -> Iterator[bytes]:
    ends = struct.pack("<II", 0, 1)
    yield bytes((0, 3, 2)) + b"abc" + b"\x05\x06" + bytes((1, 2, 1)) + b"bc" + b"\x07" + ends
    for data in _spark("*/state/0/0/SSTs/*.sst")():
        yield data[-53:]


def _manifests() -> Iterator[bytes]:
    data = (GOLDEN / "rocksdb" / "MANIFEST").read_bytes()
    records, _ = decode_log(data, crc32c=crc32c, subject="MANIFEST")
    yield encode_log(records[:4], crc32c=crc32c)
    beginning = VersionEdit(comparator=BYTEWISE, next_file_number=1000, last_sequence=9)
    for record in sorted(set(records), key=len)[:20]:
        yield encode_edit(beginning) + record


def _lookups() -> Iterator[bytes]:
    for block in itertools.islice(_blocks(), 1):
        yield b"\4abcdefgh" + block
        yield block
    trailer = bytes((1, 9, 0, 0, 0, 0, 0, 0))
    yield bytes((0, 11, 2)) + b"key" + trailer + b"vw" + struct.pack("<II", 0, 1)
    yield b"abcdefgh" + bytes(64) + bytes((0xFF, 0, 6, 0, 0))


def _write_batches() -> Iterator[bytes]:
    yield struct.pack("<QI", 7, 3) + b"\1\1k\1v" + b"\5\2\1k\1v" + b"\17\1a\1b"
    yield b"MANIFEST-000005\n"


def _sst_compression() -> Iterator[bytes]:
    yield bytes((2 | 0x80, 4)) + zlib.compress(b"data")[2:-4]
    for data in _codecs():
        yield bytes((7 | 0x80, 100)) + data[1:]


def _lzf() -> Iterator[bytes]:
    for plain in (b"abc" * 100, bytes(9000)):
        packed = compress_block(plain)
        assert packed is not None
        yield len(plain).to_bytes(2, "big") + packed


def _rows() -> Iterator[bytes]:
    for mask in range(1, 64):
        words = mask.bit_count() + 1
        row = b"\0" + bytes(8 * words)
        yield bytes((mask, words)) + row + row
    texts = b"\0" + bytes(8) + struct.pack("<II", 3, 16) + b"abc".ljust(8, b"\0")
    yield bytes((2, 3)) + texts + texts
    array = b"\0" + bytes(8) + struct.pack("<II", 24, 16) + struct.pack("<QQhh4x", 2, 0, 5, 6)
    yield bytes((8, 5)) + array + array


def _tables() -> Iterator[bytes]:
    row, two = b"\0" + bytes(16), b"\0" + bytes(24)
    time = bytes([0x80]) + bytes(7)
    ranged = b"\0" + bytes(8) + struct.pack("<II", 9, 16) + b"\1" + bytes(15)
    sizes = struct.pack("<i", len(row)), struct.pack("<i", -5), struct.pack("<i", len(ranged))
    keys = (sizes[0] + row + row, sizes[2] + ranged + row, time + row, row + time, two, sizes[1] + row + row)
    for kind in range(4):
        value = struct.pack("<i", len(two)) + two if kind == 1 else two
        for form, key in enumerate(keys):
            yield bytes((kind * 5 + form % 5, len(key))) + key + value
    # A long of Avro is the branch of its union and a number; before a record is its encoding and its schema.
    long, head = b"\2\4", b"\0\0\0"
    signed = b"\0\2\2\1\2\x10" + bytes(8)
    avro = (struct.pack("<i", 3) + b"\0" + long + head + long, struct.pack("<i", 14) + signed + head + long)
    for form, key in enumerate((*avro, time + head + long, head + long + time, head + long + long)):
        yield bytes((130 + form, len(key))) + key + head + b"\2\x80\1\0"


def _words() -> Iterator[bytes]:
    yield from (b"36h", b"1d12h", b"2026-05-01T12:30:00Z", b"yesterday 18:00", b"64MiB", b"10%", b"0.1")
    yield from (b"0x6b00ff", b"k\\x00\\\\\\xff", b"\\x", b"\\")
    yield from (b"default:user-0", b"b\\x3a\\xff:0x00", b":")
    yield from (b"task/store", b"8_uid", b"@2026-05-01", b"v8", b"latest", b"0001-01-01T00:00:00+23:59")


def _headers() -> Iterator[bytes]:
    yield b"bytes 7-106/200\n86400000\nSun, 22 Nov 2026 20:00:00 GMT"
    yield b"bytes 7-106/107\n-1\n2026-11-22T20:00:00.000Z"
    yield b"\n\nMon, 99999999999999999999 Jan 2026 00:00:00 +99999999"


def _xml() -> Iterator[bytes]:
    listed = b"<Contents><Key>prefix/blobs/%s</Key><Size>3</Size><LastModified>2026-11-22T20:00:00.000Z</LastModified>"
    contents = b"".join(listed % name + b"</Contents>" for name in (b"a", b"b"))
    yield b"\0<ListBucketResult><KeyCount>2</KeyCount><IsTruncated>false</IsTruncated>%s</ListBucketResult>" % contents
    begun = b"<Upload><Key>prefix/a</Key><UploadId>u</UploadId><Initiated>2026-11-22T20:00:00.000Z</Initiated></Upload>"
    yield b"\1<ListMultipartUploadsResult>%s</ListMultipartUploadsResult>" % begun
    rule = b"<Rule><ID>x</ID><Status>Enabled</Status><Filter><Prefix>prefix/</Prefix></Filter>"
    rule += b"<Expiration><Days>1</Days></Expiration></Rule>"
    yield b"\2<LifecycleConfiguration>%s</LifecycleConfiguration>" % rule
    yield b"\3<DeleteResult><Deleted><Key>a</Key></Deleted></DeleteResult>"
    yield b'\0<!DOCTYPE a [<!ENTITY a "b"><!ENTITY c "&a;&a;">]><ListBucketResult>&c;</ListBucketResult>'
    yield b"\0<html>no XML at all"


def _prometheus() -> Iterator[bytes]:
    samples = Samples(verb="backup", job_name='a "b"\\c\nd\re')
    samples.add("runs_total", 1, code="0")
    samples.add("run_seconds", 0.25)
    samples.add("backup_files_uploaded", math.nan, task="0", store="default")
    yield expose(samples)
    yield b"{,  =# TYPE ={"
    yield b'tidemark_repository_up 1 1234 # {a="b"} 3\n# EOF\n'


def _settings() -> Iterator[bytes]:
    yield b'store = "s3://b/p"\njson = true\n[backup]\njob = "j"\n[s3]\nregion = "x"\n[transfer]\nin_flight_max = 4\n'
    yield b"store = " + b"[" * 1500
    yield b"store = " + b"9" * 4000


def _data_blocks() -> Iterator[bytes]:
    """The size of a prefix, where the first block ends, and two blocks."""
    for rows, interval in ((1, 1), (40, 16), (9, 4)):
        block = encode_block([(b"key-%03d" % (n // 2), b"v" * (n % 200)) for n in range(rows)], interval)
        yield bytes([rows % 3, min(len(block), 255)]) + block + (block if len(block) < 256 else b"")
        yield bytes([2, 0]) + block


_SEEDS: Final[dict[str, Callable[[], Iterable[bytes]]]] = {
    "envelope": lambda: (path.read_bytes() for path in sorted(V1.iterdir())),
    "index": _indexes,
    "delta": _delta,
    "commit": _records("commit", "rewind", "fork"),
    "boundary": _records("boundary"),
    "pin": _records("pin"),
    "name": _records("name"),
    "repository": _records("repository"),
    "keys": _keys,
    "plan": _plan,
    "run": lambda: [encode_run_header(RunHeader(run=_RUN, repository_id="0" * 20, release="1"))],
    "audit": _audit,
    "json": lambda: [b'{"schema":1}', b'{"x":' + b"[" * 1500],
    "inventory": _inventory,
    "samza": lambda: [(GOLDEN / "samza/samza_snapshot_index.json").read_bytes()],
    "checkpoint_backup": lambda: [
        CheckpointBackup(query_id="q", batch=4, oldest_batch=2, location="/x").encode().encode(),
        b'{"kind":"spark-checkpoint","format":1,"x":' + b"[" * 1500,
        b'{"x":' + b"[" * 1500,
    ],
    "entry": _entry,
    "profile": _profile,
    "digest-cache": lambda: [
        msgspec.msgpack.encode({"directory": "x", "files": []}),
        msgspec.msgpack.encode(["x", []]),
    ],
    "history": _history,
    "result": _result,
    "settings": _settings,
    "policy": lambda: [
        b'[[job]]\nmatch = "x"\nkeep_all = true\n[[job]]\nmatch = "*"\nkeep_last = 30\nkeep_since = "7d"\n'
    ],
    "codec": _codecs,
    "changelog": _changelogs,
    "changelog-header": _changelogs,
    "lineage": lambda: [encode_lineage(_LINEAGE).encode()],
    "resolve": _resolve,
    "java-utf": lambda: [b"\0\x04a\xc3\xa9b", b"\0\x02\xc0\x80"],
    "state-names": lambda: [b"3.zip", b"3_u.changelog.crc", b"000008.sst", b"..", b"_metadata", b"LOCK"],
    "state-metadata": _metadata,
    "state-zip": _zips,
    "state-schema": lambda: [*_spark("**/schema")(), _deep_encoder()],
    "type": _types,
    "file-checksum": _spark("*/state/0/0/*.crc"),
    "hadoop-checksum": _hadoop,
    "hdfs-row": lambda: [
        b"\x28" + struct.pack("<QQQQ8s", 0, 32 << 32 | 7, 0, 5, b"key-007") + struct.pack("<QQ", 0, 42),
        b"\x30" + struct.pack("<QQQQ16s", 2, 32 << 32 | 7, 32 << 32, 5, b"key-007") + b"12345678\0\0\0\0",
    ],
    "row-checksum": lambda: [b"key1" + struct.pack("<Ii", 0, 2) + b"ab", b"key1" + struct.pack("<Ii", 0, -1)],
    "batch-logs": lambda: [
        *(_spark("*/[oc]*s/[0-9]", size_bytes_max=4096)()),
        *_spark("*/metadata")(),
        *_spark("*/state/0/_metadata/v2/*")(),
        b'v1\n{"batchWatermarkMs":0,"batchTimestampMs":0,"conf":{}}\n{"logOffset":999999999999999999999}',
        encode_replica(
            Replica(id="0123456789abcdef0123", replica_of="s3://bucket/query", metadata='{"id":"x"}', partitions=16)
        ),
        encode_fence(Fence("0123456789abcdef0123", "s3://bucket/query")),
    ],
    "source-log": _source_logs,
    "relocation": lambda: [*_spark("*/state/0/_metadata/v2/*")()],
    "sst-tail": _spark("*/state/0/0/SSTs/*.sst"),
    "sst-blocks": _blocks,
    "manifest": _manifests,
    "sst-lookup": _lookups,
    "write-batch": _write_batches,
    "sst": _spark("*/state/0/0/SSTs/*.sst"),
    "sst-compression": _sst_compression,
    "lzf": _lzf,
    "unsafe-rows": _rows,
    "block-keys": _data_blocks,
    "tables": _tables,
    "words": _words,
    "headers": _headers,
    "prometheus": _prometheus,
    "xml": _xml,
}


def seeds_of(name: str) -> list[bytes]:
    """The first inputs of a target."""
    return list(_SEEDS[name]())
