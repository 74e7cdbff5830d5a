"""One process of a race for keys: waits for a line on its input, then reports the outcome of each attempt."""

import asyncio
import sys

from blobstore.base import BytesBody, Created
from blobstore.opening import open_store


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def race(url: str, name: str, keys_count: int) -> None:
    store = open_store(url)
    await store.now_ms()
    say("ready")
    await asyncio.to_thread(sys.stdin.readline)
    for number in range(keys_count):
        # All racers of a key send another body, so that its content shows who won.
        outcome = await store.put_if_absent(f"race/{number}", BytesBody(name.encode() * 1000), ttl_ms=3_600_000)
        say("won" if isinstance(outcome, Created) else "lost")
    await store.close()


if __name__ == "__main__":
    asyncio.run(race(sys.argv[1], sys.argv[2], int(sys.argv[3])))
