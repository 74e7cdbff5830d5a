"""How a long use case tells how far it is."""

from typing import Final, Protocol


class Progress(Protocol):
    """Hears of files and bytes as they are done. Called from the event loop only, and must return at once."""

    def total(self, *, files: int, bytes_: int) -> None:
        """What there is to do, as soon as it is planned; may be called again when a plan changes."""
        ...

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """So much more is done. Bytes that are sent or fetched a second time are told once."""
        ...


class _NoProgress:
    """Nobody listens."""

    def total(self, *, files: int, bytes_: int) -> None:
        """Ignore it."""

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """Ignore it."""


NO_PROGRESS: Final[Progress] = _NoProgress()


class SummedProgress:
    """Progress of several use cases that run at the same time, told as that of one.

    Args:
        whole: Hears of all of them together.
    """

    def __init__(self, whole: Progress) -> None:
        self._whole = whole
        self._files = self._bytes = 0

    def part(self) -> Progress:
        """What one of them is to tell."""
        return _Part(self)

    def total(self, *, files: int, bytes_: int) -> None:
        """So much more there is to do."""
        self._files += files
        self._bytes += bytes_
        self._whole.total(files=self._files, bytes_=self._bytes)

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """So much more is done."""
        self._whole.add(files=files, bytes_=bytes_)


class _Part:
    """One of several."""

    def __init__(self, sums: SummedProgress) -> None:
        self._sums = sums
        self._files = self._bytes = 0

    def total(self, *, files: int, bytes_: int) -> None:
        """What there is to do, in place of what was said before."""
        self._sums.total(files=files - self._files, bytes_=bytes_ - self._bytes)
        self._files, self._bytes = files, bytes_

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """So much more is done."""
        self._sums.add(files=files, bytes_=bytes_)
