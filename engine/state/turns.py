"""Who may use a state store now: methods that wait take turns, and rows stand still while one of them is at work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.errors import UsageError
from engine.state.working_dir import no_room


class Turns:
    """The turns of one state store.

    Args:
        location: What errors call it.

    Attributes:
        lock: Held by whoever's turn it is.
        is_closed: Whether nobody gets a turn any more.
    """

    def __init__(self, location: str) -> None:
        self.lock = asyncio.Lock()
        self.is_closed = False
        self._location = location
        # The method under way, during which rows stand still.
        self._busy_with = ""

    @asynccontextmanager
    async def take(self, operation: str) -> AsyncIterator[None]:
        """A turn during which rows stand still.

        Raises:
            UsageError: The store is closed.
            TargetError: The block could not write where it works.
        """
        self.check_open(operation)
        async with self.lock:
            self.check_open(operation)
            self._busy_with = operation
            try:
                yield
            except OSError as error:
                raise no_room(operation, error) from error
            finally:
                self._busy_with = ""

    @property
    def are_rows_still(self) -> bool:
        """Whether nobody but the one whose turn it is may look at rows."""
        return self.is_closed or bool(self._busy_with)

    def check_usable(self, operation: str) -> None:
        """Refuse a look at rows.

        Raises:
            UsageError: The store is closed, or a method is under way.
        """
        self.check_open(operation)
        if self._busy_with:
            hint = "wait for it: rows stand still meanwhile"
            reason = f"a {self._busy_with} is under way"
            raise UsageError(reason, operation=operation, subject=self._location, hint=hint)

    def check_open(self, operation: str) -> None:
        """Refuse everything once the store is closed.

        Raises:
            UsageError: It is.
        """
        if self.is_closed:
            raise UsageError("the state store is closed", operation=operation, subject=self._location)
