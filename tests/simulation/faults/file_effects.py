"""Count the changes that restores make to the file system: what they create, write, link, rename and remove.

Reads, hashing and looking at what is there do not count as effects of a schedule, nor does what the simulation writes.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

_CHANGING: Final[ContextVar[bool]] = ContextVar("changing", default=False)
_NAMES: Final = ("pwrite", "mkdir", "rename", "replace", "link", "symlink", "unlink", "rmdir")
_CREATES: Final = os.O_CREAT | (os.O_TMPFILE & ~os.O_DIRECTORY)


class FileChanges:
    """How many there were."""

    def __init__(self) -> None:
        self.count = 0


@contextlib.contextmanager
def changing_files() -> Iterator[None]:
    """Within, and in tasks that are begun within, changes are counted."""
    token = _CHANGING.set(True)
    try:
        yield
    finally:
        _CHANGING.reset(token)


@contextlib.contextmanager
def counted_changes() -> Iterator[FileChanges]:
    """Counts, once they are done, the changes of everybody who is in `changing_files`."""
    changes = FileChanges()

    def counting(change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            result = change(*args, **options)
            if _CHANGING.get():
                changes.count += 1
            return result

        return counted

    originals = {name: getattr(os, name) for name in (*_NAMES, "open")}

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        descriptor: int = originals["open"](path, flags, *args, **options)
        if flags & _CREATES and _CHANGING.get():
            changes.count += 1
        return descriptor

    for name in _NAMES:
        setattr(os, name, counting(originals[name]))
    os.open = opened
    try:
        yield changes
    finally:
        for name, original in originals.items():
            setattr(os, name, original)
