"""A directory as a value, made of the files that somebody chose."""

from index.snapshot.dir_diff import LocalDir, LocalFile, local_dir_of
from index.snapshot.model import FileMetadata

METADATA = FileMetadata(1, 0o644, 0, 0, "", "")


def file(name: str) -> LocalFile:
    return LocalFile(name=name, metadata=METADATA, device=0, inode=0, changed_at_ns=0)


def test_files_stand_where_their_paths_say_and_everything_is_sorted() -> None:
    paths = [("b",), ("state", "1", "x"), ("a",), ("state", "0", "y"), ("state", "0", "x"), ("SSTs", "1")]
    made = local_dir_of({path: file(path[-1]) for path in paths})
    zero = LocalDir(name="0", files=(file("x"), file("y")))
    one = LocalDir(name="1", files=(file("x"),))
    assert made == LocalDir(
        name="",
        files=(file("a"), file("b")),
        sub_dirs=(LocalDir(name="SSTs", files=(file("1"),)), LocalDir(name="state", sub_dirs=(zero, one))),
    )


def test_no_files_are_an_empty_directory() -> None:
    assert local_dir_of({}) == LocalDir(name="")
