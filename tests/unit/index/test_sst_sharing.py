"""Which files a snapshot shares with older ones, as tables: what is local, what is known of it, what comes out."""

import pytest

from index.model import SstIdentity
from index.sst_sharing import (
    FileIdentity,
    LocalStateFile,
    SharedFile,
    choose_kept,
    choose_reused,
    forget_newer,
    is_stale,
)
from index.state_metadata import StoredFile

ONE, OTHER = SstIdentity("SESSION0000000000001", 7), SstIdentity("SESSION0000000000002", 7)


def local(name: str = "000007.sst", size: int = 10, identity: FileIdentity = ONE) -> LocalStateFile:
    return LocalStateFile(name, size, identity)


def shared(
    stored: str = "000007-x.sst", size: int = 10, identity: FileIdentity = ONE, version: int = 5, upload: str = "x"
) -> dict[str, SharedFile]:
    file = SharedFile(
        stored=StoredFile("000007.sst", stored, size), identity=identity, version=version, upload_id=upload
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


@pytest.mark.parametrize("version,known", [(4, False), (5, False), (6, True)])
def test_a_load_forgets_what_its_version_and_newer_ones_put_there(version: int, known: bool) -> None:
    assert forget_newer(shared(version=5), version) == (shared(version=5) if known else {})


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
