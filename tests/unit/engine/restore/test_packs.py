"""Files of a range of a pack, as its bytes come in pieces of any size (design 0008, B7)."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from blobstore.errors import BlobCorruptError
from engine.local.digests import hash_content
from engine.restore.write import OwnerPolicy, PackReader, PackWriter, cores_count
from index.plan.restore import FetchedRun, RestoredFile
from index.snapshot.keys import BLOBS, upload_key
from index.snapshot.model import FileBlob, FileIndex, FileMetadata, Scope
from tests.unit.engine.workbench import open_descriptors

KEY = upload_key(BLOBS, Scope("job"), "0" * 20, 0)
START = 100
# Gap before each file, and its size.
LAYOUT = ((0, 10), (3, 1), (0, 700), (5, 64))


def make_run(layout: Sequence[tuple[int, int]]) -> tuple[FetchedRun, bytes]:
    files, data, at = [], b"", START
    for number, (gap_bytes, size_bytes) in enumerate(layout):
        content = os.urandom(size_bytes)
        data += b"\xee" * gap_bytes + content
        at += gap_bytes
        entry = FileIndex(
            name=f"f{number}",
            metadata=FileMetadata(size_bytes=size_bytes, mode=0o640, modified_at_ns=1_000_000_000),
            blake3=hash_content(content),
            crc32=0,
            blobs=(FileBlob(KEY, 0, at, size_bytes),),
        )
        files.append(RestoredFile((entry.name,), entry))
        at += size_bytes
    return FetchedRun(key=KEY, start=START, size_bytes=len(data), files=tuple(files)), data


def content(run: FetchedRun, data: bytes, file: RestoredFile) -> bytes:
    begin = file.entry.blobs[0].blob_offset_bytes - run.start
    return data[begin : begin + file.size_bytes]


def pieces(data: bytes, size_bytes: int) -> Iterator[bytes]:
    for at in range(0, len(data), size_bytes):
        yield data[at : at + size_bytes]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 10_000])
def test_every_file_stands_there_with_its_bytes_and_metadata(root: int, tmp_path: Path, piece_bytes: int) -> None:
    run, data = make_run(LAYOUT * 40)  # more than are synced together
    writer = PackWriter(root, run, run.files, OwnerPolicy.IGNORE)
    for piece in pieces(data, piece_bytes):
        writer.write(piece)
    writer.end()
    writer.close()
    assert writer.wrong == ()
    assert [written.file for written in writer.written] == list(run.files)
    for file in run.files:
        path = tmp_path / file.path[0]
        assert path.read_bytes() == content(run, data, file)
        assert path.stat().st_mode & 0o777 == 0o640
        assert path.stat().st_mtime_ns == 1_000_000_000


def test_a_file_that_is_wrong_is_not_there_and_can_come_again(root: int, tmp_path: Path) -> None:
    run, data = make_run(LAYOUT)
    altered = bytearray(data)
    altered[20] ^= 1
    writer = PackWriter(root, run, run.files, OwnerPolicy.IGNORE)
    for piece in pieces(bytes(altered), 50):
        writer.write(piece)
    writer.end()
    writer.close()
    assert writer.wrong == (run.files[2],)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f0", "f1", "f3"]
    again = PackWriter(root, run, writer.wrong, OwnerPolicy.IGNORE)
    again.write(data)
    again.end()
    again.close()
    assert again.wrong == ()
    assert (tmp_path / "f2").read_bytes() == content(run, data, run.files[2])


def test_what_breaks_off_leaves_whole_files_and_no_parts(root: int, tmp_path: Path) -> None:
    run, data = make_run(LAYOUT)
    before = open_descriptors()
    writer = PackWriter(root, run, run.files, OwnerPolicy.IGNORE)
    writer.write(data[:300])
    writer.end()
    writer.close()
    assert writer.wrong == run.files[2:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f0", "f1"]
    assert open_descriptors() == before


def test_closing_is_enough_to_leave_nothing_open(root: int) -> None:
    run, data = make_run(LAYOUT)
    before = open_descriptors()
    writer = PackWriter(root, run, run.files, OwnerPolicy.IGNORE)
    writer.write(data[:300])
    writer.close()
    assert open_descriptors() == before


def test_more_than_was_asked_for_is_refused() -> None:
    run, data = make_run(LAYOUT)
    reader = PackReader(run, run.files)
    reader.write(data)
    assert reader.wrong == ()
    with pytest.raises(BlobCorruptError):
        reader.write(b"x")


def test_files_that_overlap_are_fetched_once_more() -> None:
    run, data = make_run(((0, 10), (0, 10)))
    first, second = run.files
    overlapping = (first, msgspec.structs.replace(first, path=("again",)), second)
    reader = PackReader(run, overlapping)
    reader.write(data)
    assert reader.wrong == (overlapping[1],)


def test_a_child_that_is_forked_while_packs_are_taken_apart_restores(root: int, tmp_path: Path) -> None:
    run, data = make_run(LAYOUT)
    reached, go_on = threading.Semaphore(0), threading.Event()

    class Held(PackWriter):
        @override
        def on_piece(self, file: RestoredFile, at: int, piece: memoryview) -> None:
            reached.release()
            go_on.wait()

    writers = [Held(root, run, run.files, OwnerPolicy.IGNORE) for _ in range(cores_count())]
    threads = [threading.Thread(target=writer.write, args=(data,)) for writer in writers]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            assert reached.acquire(timeout=10)
        child = os.fork()
        if not child:
            signal.alarm(10)  # which ends a child that waits for ever
            write_and_exit(root, run, data)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        go_on.set()
        for thread in threads:
            thread.join()
    assert (tmp_path / "f2").read_bytes() == content(run, data, run.files[2])


def write_and_exit(root: int, run: FetchedRun, data: bytes) -> NoReturn:
    """What a forked child does: the test's own end is none of its business."""
    try:
        writer = PackWriter(root, run, run.files, OwnerPolicy.IGNORE)
        writer.write(data)
        writer.end()
        os._exit(len(writer.wrong))
    finally:
        os._exit(1)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 90)), min_size=1, max_size=8),
    st.integers(1, 100),
    st.sets(st.integers(0, 7)),
    st.data(),
)
def test_a_reader_reports_the_wrong_ones(
    layout: list[tuple[int, int]], piece_bytes: int, wanted: set[int], drawn: st.DataObject
) -> None:
    run, data = make_run(layout)
    files = [file for number, file in enumerate(run.files) if number in wanted]
    hurt = drawn.draw(st.integers(0, len(data) - 1))
    altered = data[:hurt] + bytes([data[hurt] ^ 1]) + data[hurt + 1 :]
    reader = PackReader(run, files)
    for piece in pieces(altered, piece_bytes):
        reader.write(piece)
    assert reader.wrong == tuple(f for f in files if content(run, data, f) != content(run, altered, f))


def test_the_cores_that_count_are_the_share_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    assert cores_count() == 3


def test_without_a_share_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for count, expected in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert cores_count() == expected
