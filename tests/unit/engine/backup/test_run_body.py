"""A run of a file on its way into a store: what was scanned, hashed each time that it is read."""

import os
from contextlib import aclosing
from pathlib import Path

import pytest

from engine.backup import upload
from engine.backup.upload import FileRunBody
from engine.errors import UnsafeSourceError
from engine.local.digests import ContentHasher, hash_bytes, hash_content
from engine.local.scan import SourceDir, opened_dir, scan_dir
from index.plan.backup import PlannedFile
from tests.unit.engine.workbench import open_descriptors


class TestFileRunBody:
    async def read(self, body: FileRunBody) -> bytes:
        async with aclosing(body.read_chunks()) as chunks:
            return b"".join([chunk async for chunk in chunks])

    def body(self, source: SourceDir, start: int = 0, size_bytes: int = 10_000) -> FileRunBody:
        (file,) = scan_dir(source.path).files
        return FileRunBody(
            source=source, item=PlannedFile((file.name,), file), start=start, size_bytes=size_bytes, chunk_bytes=4096
        )

    @pytest.mark.parametrize("start, size", [(0, 10_000), (0, 4096), (4096, 4096), (8192, 1808), (9999, 1)])
    async def test_run_is_read_and_hashed_as_often_as_asked(self, tmp_path: Path, start: int, size: int) -> None:
        data = os.urandom(10_000)
        (tmp_path / "f").write_bytes(data)
        with opened_dir(tmp_path) as source:
            body = self.body(source, start, size)
            assert body.digest is None
            run = data[start : start + size]
            for _ in range(2):
                assert await self.read(body) == run
                assert body.digest == (hash_bytes(run) if run == data else (hash_content(run), 0))
            assert await body.read_digest() == body.digest

    async def test_digest_is_known_before_a_store_that_has_enough_lets_go(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"x" * 10_000)
        before = open_descriptors()
        with opened_dir(tmp_path) as source:
            body = self.body(source)
            seen = 0
            async with aclosing(body.read_chunks()) as chunks:
                async for chunk in chunks:
                    seen += len(chunk)
                    if seen == 10_000:
                        break
            assert body.digest == hash_bytes(b"x" * 10_000)
        assert open_descriptors() == before

    async def test_digest_is_read_if_no_store_did(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"x" * 10_000)
        with opened_dir(tmp_path) as source:
            assert await self.body(source).read_digest() == hash_bytes(b"x" * 10_000)

    @pytest.mark.parametrize("after_chunks", [0, 1, 2])
    @pytest.mark.parametrize("change", ["cut", "grown", "rewritten", "gone", "touched"])
    async def test_file_that_does_not_hold_still_is_refused(
        self, tmp_path: Path, change: str, after_chunks: int
    ) -> None:
        path = tmp_path / "f"
        path.write_bytes(b"x" * 10_000)
        with opened_dir(tmp_path) as source:
            body = self.body(source)
            if after_chunks == 0:
                self.change(path, change)

            async def read() -> None:
                seen = 0
                async with aclosing(body.read_chunks()) as chunks:
                    async for _ in chunks:
                        seen += 1
                        if seen == after_chunks:
                            self.change(path, change)

            with pytest.raises(UnsafeSourceError) as raised:
                await read()
            assert raised.value.subject == str(path)
            assert body.digest is None

    def change(self, path: Path, change: str) -> None:
        match change:
            case "cut":
                os.truncate(path, 100)
            case "grown":
                with path.open("ab") as file:
                    file.write(b"more")
            case "rewritten":
                with path.open("r+b") as file:
                    file.write(b"y")
            case "gone":
                path.unlink()
            case "touched":
                os.utime(path)

    async def test_reading_that_has_other_bytes_than_the_first_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "f").write_bytes(b"x" * 10_000)
        with opened_dir(tmp_path) as source:
            body = self.body(source)
            await self.read(body)

            def misread(source: int, at: int, size_bytes: int, hasher: ContentHasher) -> bytes:
                hasher.update(b"y" * size_bytes)
                return b"y" * size_bytes

            monkeypatch.setattr(upload, "_read_hashed", misread)
            with pytest.raises(UnsafeSourceError, match="read twice"):
                await self.read(body)
