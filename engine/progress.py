"""How a long use case reports its progress."""

from typing import Final, Protocol

from typing_extensions import override


class Progress(Protocol):
    """Hears of files and bytes as they are done. Called from the event loop only, and must return at once."""

    def total(self, *, files: int, bytes_: int) -> None:
        """Set what there is to do, as soon as it is planned; called again when a plan changes."""

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """Add what is done. Bytes that are sent or fetched a second time count once."""


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
        self.files_total, self.bytes_total = files, bytes_

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        self.files += files
        self.bytes += bytes_


class AddedProgress:
    """Progress of one of several use cases whose total was reported to `whole` before them."""

    def __init__(self, whole: Progress) -> None:
        self.add = whole.add

    def total(self, *, files: int, bytes_: int) -> None:
        """Ignore it."""


class SummedProgress:
    """Progress of several use cases that run at the same time, each a `part`, reported to `whole` as that of one."""

    def __init__(self, whole: Progress) -> None:
        self.whole = whole
        self.files = self.bytes = 0

    def part(self) -> Progress:
        return _Part(self)


class _Part(AddedProgress):
    def __init__(self, sums: SummedProgress) -> None:
        super().__init__(sums.whole)
        self._sums = sums
        self._files = self._bytes = 0

    @override
    def total(self, *, files: int, bytes_: int) -> None:
        sums = self._sums
        sums.files += files - self._files
        sums.bytes += bytes_ - self._bytes
        self._files, self._bytes = files, bytes_
        sums.whole.total(files=sums.files, bytes_=sums.bytes)
