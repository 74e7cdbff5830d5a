"""Back up a RocksDB that another process holds: the copy that each backup takes, and where it is (design 0012).

```
<scratch>/.<name>.tidemark-live-<random>     held (flock) by the process at work
<scratch>/.<name>.tidemark-live-<random>/db  a copy: SSTs by hard link, so that what RocksDB deletes meanwhile stays
```

What a killed process left is removed by the next one (L10).
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from typing_extensions import override

from blobstore.concurrency import run_blocking
from engine.backup.backup import WholeDirectory
from engine.errors import TargetError, UsageError
from engine.local.scan import hold_dir
from engine.rocksdb.live import LiveCopy, LiveReader
from index.snapshot.dir_diff import LocalDir
from index.snapshot.model import SnapshotIndex


class LiveRocksDb(WholeDirectory):
    """A RocksDB directory that any process may hold and write to: each backup takes a copy of it.

    Use it as a context manager, for one backup or for several, one after the other. `scratch` is where copies are, by
    default beside the directory. On another file system SSTs are copied instead of linked.

    Example:
        ```python
        with LiveRocksDb("/var/state/db") as source:
            result = repository.backup("flights", source, task="0", store="facts")
        ```
    """

    is_lasting = False

    def __init__(self, directory: str | Path, *, scratch: str | Path | None = None) -> None:
        self._reader = LiveReader(Path(directory))
        self._scratch = Path(scratch or self._reader.directory.parent).absolute()
        super().__init__(self._scratch)
        self._prefix = f".{self._reader.directory.name}.tidemark-live-"
        # Of the directory that is held; -1: none is.
        self._held = -1
        # What the last copy took; None before the first one.
        self.taken: LiveCopy | None = None

    def __enter__(self) -> Self:
        with _writing_to(self._scratch):
            for left in self._scratch.iterdir():
                if left.name.startswith(self._prefix) and (descriptor := hold_dir(left)) >= 0:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(descriptor)
            while self._held < 0:
                made = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._scratch))
                # Another process may take it for a leftover until it is held.
                self._held, self.directory = hold_dir(made), made / "db"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()
        shutil.rmtree(self.directory.parent, ignore_errors=True)
        os.close(self._held)
        self._held = -1

    def clear(self) -> None:
        """Remove the copy: until then its links hold the space of files that RocksDB has deleted."""
        shutil.rmtree(self.directory, ignore_errors=True)

    @override
    async def release(self) -> None:
        await run_blocking(self.clear)

    @override
    async def look(self, previous: SnapshotIndex | None, believed: LocalDir) -> LocalDir:
        if self._held < 0:
            hint = "use it in a `with` block"
            raise UsageError("has no place for its copy", operation="backup", subject=str(self._scratch), hint=hint)
        await run_blocking(self._take)
        return await super().look(previous, believed)

    def _take(self) -> None:
        self.clear()
        with _writing_to(self._scratch):
            self.directory.mkdir()
        self.taken = self._reader.copy(self.directory)


@contextlib.contextmanager
def _writing_to(scratch: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
        hint = "choose a scratch directory that can be written, best on the same file system"
        raise TargetError(reason, operation="backup", subject=str(scratch), hint=hint) from error
