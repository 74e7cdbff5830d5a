"""How a long use case reports its progress."""

from typing import Final, Protocol


class Progress(Protocol):
    """Hears of files and bytes as they are done. Called from the event loop only, and must return at once."""

    def total(self, *, files: int, bytes_: int) -> None:
        """Set what there is to do, as soon as it is planned; called again when a plan changes."""
        ...

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """Add what is done. Bytes that are sent or fetched a second time count once."""
        ...


class _NoProgress:
    def total(self, *, files: int, bytes_: int) -> None:
        """Ignore it."""

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """Ignore it."""


NO_PROGRESS: Final[Progress] = _NoProgress()


class CountedProgress:
    """Progress that is counted."""

    def __init__(self) -> None:
        self.files = self.bytes = self.files_total = self.bytes_total = 0

    def total(self, *, files: int, bytes_: int) -> None:
        """See `Progress`."""
        self.files_total, self.bytes_total = files, bytes_

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """See `Progress`."""
        self.files += files
        self.bytes += bytes_


class SummedProgress:
    """Progress of several use cases that run at the same time, reported as that of one.

    Args:
        whole: Hears of all of them together.
    """

    def __init__(self, whole: Progress) -> None:
        self._whole = whole
        self._files = self._bytes = 0

    def part(self) -> Progress:
        """Return the progress of one more use case."""
        return _Part(self)

    def total(self, *, files: int, bytes_: int) -> None:
        """Add to what there is to do."""
        self._files += files
        self._bytes += bytes_
        self._whole.total(files=self._files, bytes_=self._bytes)

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """See `Progress`."""
        self._whole.add(files=files, bytes_=bytes_)


class _Part:
    def __init__(self, sums: SummedProgress) -> None:
        self._sums = sums
        self._files = self._bytes = 0

    def total(self, *, files: int, bytes_: int) -> None:
        """See `Progress`."""
        self._sums.total(files=files - self._files, bytes_=bytes_ - self._bytes)
        self._files, self._bytes = files, bytes_

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """See `Progress`."""
        self._sums.add(files=files, bytes_=bytes_)
