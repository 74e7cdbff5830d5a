"""A store that answers as a script says."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from typing_extensions import override

from blobstore.base import (
    LIST_PAGE_MAX,
    BlobInfo,
    Body,
    Buffer,
    Created,
    CreateOutcome,
    DeleteFailure,
    ListPage,
    Sink,
    Unknown,
)
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import CountedSink

# A step: this one carries the request out. An exception is raised instead, a result returned instead, and a function
# is awaited before.
OK = "ok"


class LostAnswer:
    """The request is carried out, and then this is what the caller sees."""

    def __init__(self, seen: Unknown | Exception) -> None:
        self.seen = seen


class BreakAfter:
    """A read breaks after that many bytes, with this error."""

    def __init__(self, size_bytes: int, error: Exception) -> None:
        self.size_bytes = size_bytes
        self.error = error


class _BreakingSink(CountedSink):
    def __init__(self, sink: Sink, step: BreakAfter) -> None:
        super().__init__(sink)
        self._step = step

    @override
    async def take(self, chunks: Sequence[Buffer]) -> None:
        for chunk in chunks:
            if self.size_bytes >= self._step.size_bytes:
                raise self._step.error
            await super().take([chunk])


Step = str | Exception | Unknown | Callable[[], Awaitable[None]] | tuple[DeleteFailure, ...] | LostAnswer | BreakAfter


class ScriptedStore(MemoryStore):
    """Takes the next step of the script for every request, and is a plain store once the script is at its end."""

    def __init__(self, *script: Step, chunk_bytes: int = 4) -> None:
        super().__init__(chunk_bytes=chunk_bytes)
        self.script = list(script)
        self.requests: list[str] = []

    async def _next(self, request: str) -> Step:
        self.requests.append(request)
        step = self.script.pop(0) if self.script else OK
        if isinstance(step, Exception):
            raise step
        if callable(step):
            await step()
        return step

    @override
    async def put(self, key: str, body: Body, *, ttl_ms: int | None = None, repeatable: bool = False) -> Created:
        await self._next("put")
        return await super().put(key, body, ttl_ms=ttl_ms)

    @override
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        step = await self._next("put_if_absent")
        if isinstance(step, Unknown):
            return step
        outcome = await super().put_if_absent(key, body, ttl_ms=ttl_ms)
        if not isinstance(step, LostAnswer):
            return outcome
        if isinstance(step.seen, Unknown):
            return step.seen
        raise step.seen

    @override
    async def read_into(
        self, key: str, sink: Sink, *, start: int = 0, size_bytes: int | None = None, **how: Any
    ) -> None:
        step = await self._next(f"get {start}+{size_bytes}")
        broken = _BreakingSink(sink, step) if isinstance(step, BreakAfter) else sink
        await super().read_into(key, broken, start=start, size_bytes=size_bytes, deleted=how.get("deleted", False))
        if isinstance(step, BreakAfter):
            raise step.error

    @override
    async def stat(self, key: str) -> BlobInfo | None:
        await self._next("stat")
        return await super().stat(key)

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        await self._next("list_page")
        return await super().list_page(prefix, start_after=start_after, limit=limit)

    @override
    async def delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        step = await self._next("delete")
        return step if isinstance(step, tuple) else await super().delete(keys)

    @override
    async def remove_ttl(self, key: str) -> None:
        await self._next("remove_ttl")
        await super().remove_ttl(key)

    @override
    async def now_ms(self) -> int:
        await self._next("now_ms")
        return await super().now_ms()
