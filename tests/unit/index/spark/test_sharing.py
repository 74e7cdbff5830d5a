"""Which files a snapshot shares with older ones, as tables: what is local, what is known of it, what comes out."""

import msgspec
import pytest

from index.snapshot.model import SstIdentity
from index.spark.metadata import StoredFile
from index.spark.retention import (
    FileIdentity,
    FileStamp,
    LocalStateFile,
    SharedFile,
    as_fetched,
    choose_kept,
    choose_reused,
    find_altered,
    is_stale,
)

ONE, OTHER = SstIdentity("SESSION0000000000001", 7), SstIdentity("SESSION0000000000002", 7)


STAMP, TOUCHED, COPIED = FileStamp(1, 100), FileStamp(1, 101), FileStamp(2, 100)


def local(
    name: str = "000007.sst",
    size: int = 10,
    identity: FileIdentity = ONE,
    stamp: FileStamp | None = STAMP,
    *,
    linked: bool = True,
) -> LocalStateFile:
    return LocalStateFile(name, size, identity, stamp, is_linked=linked)


def shared(
    stored: str = "000007-x.sst", size: int = 10, identity: FileIdentity = ONE, version: int = 5, upload: str = "x"
) -> dict[str, SharedFile]:
    file = SharedFile(
        stored=StoredFile("000007.sst", stored, size), identity=identity, stamp=STAMP, version=version, upload_id=upload
    )
    return {"000007.sst": file}


@pytest.mark.spark_case(18)
@pytest.mark.parametrize(
    "file,known,version,pending,reused",
    [
        pytest.param(local(), shared(), 6, (), True, id="an older version of this history put it there"),
        pytest.param(local(), {}, 6, (), False, id="nothing is known of it"),
        pytest.param(local("000008.sst"), shared(), 6, (), False, id="another name"),
        pytest.param(local(), shared(), 5, (), False, id="the same version put it there and is overwritten"),
        pytest.param(local(), shared(), 4, (), False, id="a newer version put it there: another history"),
        pytest.param(local(size=11), shared(), 6, (), False, id="another size"),
        pytest.param(local(), shared(), 6, ("x",), False, id="its upload is not complete"),
        pytest.param(local(), shared(), 6, ("y",), True, id="another upload is not complete"),
        pytest.param(local(), shared(upload=""), 6, ("y",), True, id="it was fetched"),
        pytest.param(local(identity=OTHER), shared(), 6, (), False, id="another session made a file of equal size"),
        pytest.param(local(identity=b"h"), shared(identity=b"h"), 6, (), True, id="no identity, and the same hash"),
        pytest.param(local(identity=b"h"), shared(identity=b"i"), 6, (), False, id="no identity, and another hash"),
        pytest.param(local(identity=b"h"), shared(), 6, (), False, id="it has lost its identity"),
        pytest.param(local(stamp=TOUCHED), shared(), 6, (), False, id="somebody has written to it"),
        pytest.param(local(stamp=COPIED), shared(), 6, (), False, id="it is a copy, and nobody knows of what"),
        pytest.param(local(stamp=None), shared(), 6, (), False, id="nobody has looked"),
        pytest.param(
            local(identity=b"h", stamp=COPIED), shared(identity=b"h"), 6, (), True, id="a hash is of what is there now"
        ),
    ],
)
def test_what_is_shared(
    file: LocalStateFile, known: dict[str, SharedFile], version: int, pending: tuple[str, ...], reused: bool
) -> None:
    found = choose_reused([file], known, version=version, pending=pending)
    assert found == (frozenset({file.name}) if reused else frozenset())


@pytest.mark.parametrize(
    "file,known,wanted,kept",
    [
        pytest.param(local(), shared(), "000007-x.sst", True, id="it is what the snapshot wants"),
        pytest.param(local(), shared(), "000007-y.sst", False, id="the snapshot wants another one of its name"),
        pytest.param(local(), {}, "000007-x.sst", False, id="nobody knows what it is"),
        pytest.param(local(size=11), shared(), "000007-x.sst", False, id="it has another size than it had"),
        pytest.param(local(identity=OTHER), shared(), "000007-x.sst", False, id="it was replaced by another session"),
        pytest.param(local("000008.sst"), shared(), "000007-x.sst", False, id="the snapshot does not want it"),
        pytest.param(local(stamp=TOUCHED), shared(), "000007-x.sst", False, id="somebody has written to it"),
    ],
)
def test_what_stays_for_a_load(file: LocalStateFile, known: dict[str, SharedFile], wanted: str, kept: bool) -> None:
    found = choose_kept([file], [StoredFile("000007.sst", wanted, 10)], known, ())
    assert found == (frozenset({file.name}) if kept else frozenset())


def test_a_file_that_a_snapshot_wants_in_another_size_does_not_stay() -> None:
    assert choose_kept([local()], [StoredFile("000007.sst", "000007-x.sst", 11)], shared(), ()) == frozenset()


def test_a_file_whose_upload_is_not_complete_does_not_stay() -> None:
    wanted = [StoredFile("000007.sst", "000007-x.sst", 10)]
    assert choose_kept([local()], wanted, shared(), ("x",)) == frozenset()


@pytest.mark.parametrize(
    "file,known,altered",
    [
        pytest.param(local(), shared(), False, id="nobody has written to it"),
        pytest.param(local(stamp=TOUCHED), shared(), True, id="somebody has"),
        pytest.param(local(stamp=COPIED), shared(), False, id="another inode: it was replaced, perhaps by itself"),
        pytest.param(local(stamp=TOUCHED, linked=False), shared(), False, id="a copy, and inodes are used again"),
        pytest.param(local(stamp=TOUCHED, identity=OTHER), shared(), False, id="another file, made again"),
        pytest.param(local(stamp=TOUCHED), {}, False, id="nothing is known of it"),
        pytest.param(local(stamp=TOUCHED, identity=b"h"), shared(identity=b"h"), False, id="its bytes are the same"),
    ],
)
def test_what_was_altered(file: LocalStateFile, known: dict[str, SharedFile], altered: bool) -> None:
    assert find_altered([file], known) == ((file.name,) if altered else ())


@pytest.mark.parametrize("version,of", [(4, 4), (5, 5), (6, 5)])
def test_a_file_that_stays_is_as_good_as_one_that_was_fetched(version: int, of: int) -> None:
    before = shared(version=5)
    (name,) = before
    assert as_fetched(before, {name}, version) == {
        name: msgspec.structs.replace(before[name], version=of, upload_id="")
    }
    assert as_fetched(before, (), version) == {}


@pytest.mark.parametrize(
    "newest_use,newest,retained,stale",
    [
        pytest.param(5, 7, 3, False, id="version 5 is the oldest of three: nobody deletes its snapshot"),
        pytest.param(5, 8, 3, True, id="version 5 is one too old"),
        pytest.param(5, 4, 3, False, id="nothing newer is there"),
        pytest.param(0, 0, 3, False, id="nothing is there"),
        pytest.param(0, 3, 3, True, id="nobody is known to use it"),
    ],
)
def test_what_somebody_else_may_have_deleted(newest_use: int, newest: int, retained: int, stale: bool) -> None:
    assert is_stale(newest_use, newest, retained) is stale
