"""No line of the log of a whole life on S3 has a secret in it."""

import logging
from pathlib import Path

import pytest

from blobstore.errors import InvalidRequestError
from blobstore.opening import StoreSettings, open_store
from blobstore.s3.settings import S3Settings
from blobstore.wrappers.retry import RetrySettings
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.model import Scope
from tests.fault_proxy import FaultProxy
from tests.fault_rules import Rule, on, s3_error, slow_down
from tests.servers.moto_server import MotoServer

pytestmark = pytest.mark.s3

ACCESS_KEY, SECRET_KEY, TOKEN = "AKIAVERYSECRETNAME00", "secret+Key/that/nobody+may/see", "session-token-of-nobody"
JOB = Scope("job")


async def test_no_line_shows_a_credential(
    moto_server: MotoServer,
    new_bucket: object,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    bucket = new_bucket(moto_server)  # type: ignore[operator]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    for name in ("engine", "blobstore"):
        caplog.set_level(logging.DEBUG, name)
    for url in (f"s3://{bucket}/p?secret={SECRET_KEY}", f"s3://{ACCESS_KEY}:{SECRET_KEY}@{bucket}/p"):
        with pytest.raises(InvalidRequestError):
            open_store(url)
    (tree := tmp_path / "tree").mkdir()
    (tree / "000001.sst").write_bytes(b"1" * 100_000)
    async with FaultProxy(moto_server.endpoint_url) as proxy:
        # The second fault quotes what was signed, as some servers do.
        proxy.add(Rule(fault=slow_down(), when=on("PutObject", key="blobs/"), times=1))
        quoting = f"the request's x-amz-security-token: {TOKEN} of {ACCESS_KEY}"
        proxy.add(Rule(fault=s3_error(500, "InternalError", quoting), when=on("GetObject", key="indexes/"), times=1))
        settings = StoreSettings(
            s3=S3Settings(endpoint_url=proxy.endpoint_url, path_style=True), retry=RetrySettings(first_wait_s=0.01)
        )
        async with await Repository.init(open_store(f"s3://{bucket}/p", settings)) as repository:
            for _ in range(2):
                await repository.commit(JOB, [await repository.backup(JOB, tree)])
        async with await Repository.open(open_store(f"s3://{bucket}/p", settings)) as repository:
            await repository.find_and_restore(JOB, tmp_path / "there")
            await repository.collect(Retention(keep_last=1), delete_share_max=1)
    text = caplog.text
    wanted = ("backed up version 1", "commit 1 of version 1", "restored version", "deleted 1 keys", "now ", "attempt 2")
    assert [part for part in wanted if part not in text] == []
    assert f"s3:{bucket}/p job" in text
    assert "InternalError" in text
    assert [secret for secret in (ACCESS_KEY, SECRET_KEY, TOKEN, "Signature") if secret in text] == []
