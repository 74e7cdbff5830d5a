"""Requests and bytes to a real S3 server per use case: the formulas of designs 0002 and 0003, counted on the wire."""

import math
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from blobstore.opening import StoreSettings, open_store
from blobstore.s3.settings import S3Settings
from engine.backup.backup import BackupOptions
from engine.repository.repository import Repository
from engine.settings import KIB, TransferSettings
from index.plan.commits import Retention
from index.snapshot.model import Scope
from tests.fault_proxy import FaultProxy
from tests.servers.s3_server import S3Server

pytestmark = pytest.mark.s3

JOB = Scope("job")
# As in the unit test of the budget: packed up to 2 KiB, alone up to 8 KiB, cut above that.
TRANSFER = TransferSettings(
    inline_file_bytes_max=16,
    pack_file_bytes_max=2 * KIB,
    pack_bytes_max=8 * KIB,
    chunk_bytes=4 * KIB,
    blob_bytes_max=8 * KIB,
    in_flight_max=4,
)
SMALL, SINGLE, CUT = 40, 5, 2
PACKS = math.ceil(SMALL * KIB / (8 * KIB))
BLOBS = SINGLE + CUT * 3


class Wire:
    """A repository on a server, behind a proxy that counts."""

    def __init__(self, proxy: FaultProxy, bucket: str, directory: Path) -> None:
        self.proxy = proxy
        self.url = f"s3://{bucket}/below"
        # On a busy machine an answer may be late, which is not what is counted here.
        s3 = S3Settings(endpoint_url=proxy.endpoint_url, path_style=True, hedged_reads=False)
        self.store_settings = StoreSettings(s3=s3)
        self.directory = directory
        self._seen = 0
        self._targets = 0

    async def process(self) -> Repository:
        """The repository as another process sees it."""
        return await Repository.open(open_store(self.url, self.store_settings), settings=TRANSFER)

    def tree(self, *, changed: int = 0) -> Path:
        """40 files of 1 KiB, 5 of 4 KiB, 2 of 20,000 bytes; the first few of each are changed."""
        root = self.directory / "tree"
        root.mkdir(exist_ok=True)
        for letter, count, size_bytes in (("s", SMALL, KIB), ("m", SINGLE, 4 * KIB), ("l", CUT, 20_000)):
            for number in range(count):
                data = (b"%d" % number).ljust(size_bytes, b"!" if number < changed else b".")
                path = root / f"{letter}{number:05d}"
                if not path.exists() or path.read_bytes() != data:
                    path.write_bytes(data)
        return root

    def target(self) -> Path:
        self._targets += 1
        return self.directory / f"target-{self._targets}"

    def counted(self) -> Counter[str]:
        """Requests since the last look, by S3's names; the clock's HEADs of the profile are `Clock`."""
        new = self.proxy.exchanges[self._seen :]
        self._seen += len(new)
        names = ["Clock" if e.operation == "HeadObject" and e.target.endswith("/profile") else e.operation for e in new]
        return Counter(names)

    def sent_bytes(self, since: int) -> int:
        """Bytes of the bodies of PUTs from an exchange on."""
        new = self.proxy.exchanges[since:]
        return sum(int(e.header("Content-Length") or 0) for e in new if e.operation == "PutObject")


@pytest.fixture
async def wire(s3_server: S3Server, s3_bucket: str, tmp_path: Path) -> AsyncIterator[Wire]:
    async with FaultProxy(s3_server.endpoint_url) as proxy:
        made = Wire(proxy, s3_bucket, tmp_path)
        repository = await Repository.init(open_store(made.url, made.store_settings), settings=TRANSFER)
        await repository.close()
        made.counted()
        yield made


async def test_opening_reads_the_profile_and_the_record(wire: Wire) -> None:
    repository = await wire.process()
    assert wire.counted() == {"GetObject": 2}
    await repository.close()


async def test_a_backup_is_one_put_for_each_pack_blob_and_index(wire: Wire) -> None:
    repository = await wire.process()
    wire.counted()
    await repository.backup(JOB, wire.tree(), options=BackupOptions(base=None))
    assert wire.counted() == {"PutObject": PACKS + BLOBS + 1}
    await repository.close()


async def test_a_backup_of_what_changed_sends_that_and_the_index_and_nothing_else(wire: Wire) -> None:
    repository = await wire.process()
    first = await repository.commit(JOB, [await repository.backup(JOB, wire.tree(), options=BackupOptions(base=None))])
    await repository.close()
    repository = await wire.process()
    wire.counted()
    begun = len(wire.proxy.exchanges)
    result = await repository.backup(JOB, wire.tree(changed=1), options=BackupOptions(base=first.store("0", "default")))
    # One small file is a pack, one a blob, one is three blobs; one index is read and one is written.
    assert wire.counted() == {"GetObject": 1, "PutObject": 1 + 1 + 3 + 1}
    changed_bytes = KIB + 4 * KIB + 20_000
    assert result.stats.bytes_added == changed_bytes
    assert changed_bytes < wire.sent_bytes(begun) < changed_bytes + 4 * KIB
    await repository.close()


async def test_a_commit_is_one_put_one_list_and_one_tag_for_each_new_upload(wire: Wire) -> None:
    repository = await wire.process()
    await repository.commit(JOB, [await repository.backup(JOB, wire.tree(), options=BackupOptions(base=None))])
    result = await repository.backup(JOB, wire.tree(changed=1))
    wire.counted()
    await repository.commit(JOB, [result])
    # The second commit of a scope lists the other kind of log, too (K3).
    assert wire.counted() == {"PutObject": 1, "ListObjectsV2": 1 + 1, "PutObjectTagging": len(result.new_keys)}
    assert len(result.new_keys) == 1 + 1 + 3 + 1
    await repository.close()


async def test_a_restore_is_a_pin_a_list_and_one_get_for_each_blob_and_run(wire: Wire) -> None:
    repository = await wire.process()
    commit = await repository.commit(JOB, [await repository.backup(JOB, wire.tree(), options=BackupOptions(base=None))])
    wire.counted()
    target = wire.target()
    await repository.restore(commit, target)
    counted = wire.counted()
    clocks = counted.pop("Clock", 0)
    # The packs were written one after the other and each is one run; the index is read once.
    assert counted == {"PutObject": 2, "ListObjectsV2": 1, "GetObject": 1 + PACKS + BLOBS}
    assert clocks <= 1
    assert {p.name: p.read_bytes() for p in target.iterdir()} == {p.name: p.read_bytes() for p in wire.tree().iterdir()}
    await repository.close()


async def test_a_collection_asks_for_lists_and_roots_and_looks_at_no_garbage(wire: Wire) -> None:
    repository = await wire.process()
    for changed in range(4):
        await repository.commit(JOB, [await repository.backup(JOB, wire.tree(changed=changed))])
    wire.counted()
    report = await repository.collect(Retention(keep_last=2), delete_share_max=1)
    counted = wire.counted()
    assert report.waiting_count > 0
    assert counted == {
        # At the beginning, and when the roots have been read again (0002, D4).
        "Clock": 2,
        # Blobs and indexes; what older runs and their audits have left; pins, names and logs twice.
        "ListObjectsV2": 2 + 2 + 2 * 3,
        "ListMultipartUploads": 2,
        # 4 records once, 2 kept indexes once; the boundary in the second reading.
        "GetObject": 4 + 2 + 1,
        # The boundary, and the audit record.
        "PutObject": 2,
        # The index of the newest commit, which vouches for its blobs.
        "HeadObject": 1,
        "GetObjectTagging": 1,
        # Records; what only they needed is younger than the TTL.
        "DeleteObjects": 1,
    }
    await repository.close()
