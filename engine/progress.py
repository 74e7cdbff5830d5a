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
