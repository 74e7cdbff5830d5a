"""What is fuzzed: a parser of bytes that anybody may have written, and what it may answer."""

import atexit
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from blobstore.errors import StoreError
from engine.errors import EngineError
from index.errors import FormatError

# Every parser may refuse what it is given; nothing else than these may come out of one (architecture, H2).
REFUSALS: Final = (FormatError, EngineError, StoreError)

CORPUS: Final = Path(__file__).with_name("corpus")


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One function that takes any bytes, and a name for its corpus."""

    name: str
    # Raises AssertionError where a law is broken: what was decoded does not come back as it was.
    run: Callable[[bytes], object]
    # The parsers that it reaches, of which the table has to have all.
    covers: tuple[Callable[..., Any], ...]
    # What says that no law is broken, beside `REFUSALS`: a function of Python's own kind says ValueError.
    refuses: tuple[type[Exception], ...] = ()
    # The longest input that the fuzzer makes.
    bytes_max: int = 4096


def try_one(target: Target, data: bytes) -> Exception | None:
    """Give a target one input.

    Returns:
        The error by which it was refused; None if it was taken.

    Raises:
        BaseException: It was refused by another error than those that may be, or a law does not hold.
    """
    refusals: tuple[type[Exception], ...] = (*REFUSALS, *target.refuses)
    try:
        target.run(data)
    except refusals as error:
        check_refusal(error)
        return error
    return None


def check_refusal(error: Exception) -> None:
    """A refusal says what is wrong, and one of ours what to do about it."""
    assert str(error), "an error that says nothing"
    if isinstance(error, REFUSALS):
        assert error.hint, "an error without a hint"


def archive_of(name: str) -> Path:
    """Return where the corpus of a target is kept."""
    return CORPUS / f"{name}.zip"


def corpus_of(name: str) -> dict[str, bytes]:
    """Read the inputs that are kept for a target, by name and sorted."""
    archive = archive_of(name)
    if not archive.exists():
        return {}
    with zipfile.ZipFile(archive) as inputs:
        return {path: inputs.read(path) for path in sorted(inputs.namelist())}


def write_corpus(name: str, inputs: Mapping[str, bytes]) -> None:
    """Replace the corpus of a target: the same inputs give the same archive, byte for byte."""
    with zipfile.ZipFile(archive_of(name), "w") as archive:
        for path, data in sorted(inputs.items()):
            # Stored, not deflated: what zlib writes depends on its version. The date is the oldest that a zip has.
            archive.writestr(zipfile.ZipInfo(path), data)


class Scratch:
    """A file that is written again for each input, for parsers that take a path."""

    def __init__(self) -> None:
        self._directory: Path | None = None

    @property
    def directory(self) -> Path:
        """A private directory, gone with the process."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="tidemark-fuzz-"))
            atexit.register(shutil.rmtree, self._directory, ignore_errors=True)
        return self._directory

    def file(self, data: bytes, name: str = "input") -> Path:
        """The file, with these bytes."""
        path = self.directory / name
        path.write_bytes(data)
        return path
