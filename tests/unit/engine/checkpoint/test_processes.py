"""What runs in another process returns and raises what it would here, and ends with this one."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint import processes
from engine.checkpoint.file_check import SstReport, check_sst
from engine.checkpoint.processes import WORTH_BYTES, Processes
from engine.errors import DamagedError
from tests.unit.engine.checkpoint.checked import flip
from tests.unit.engine.checkpoint.test_sst_check import write_sst


async def test_results_and_errors_come_back_as_they_were(tmp_path: Path) -> None:
    path = write_sst(tmp_path / "db")
    whole = check_sst(path)
    assert whole == SstReport(blocks=whole.blocks)
    with Processes(2) as started:

        async def twice(function: Callable[..., Any], *args: object) -> list[Any]:
            """Here, which takes a moment, and meanwhile there."""
            here = asyncio.create_task(started.run(WORTH_BYTES, _slowly, function, *args))
            await asyncio.sleep(0)
            there = started.run(WORTH_BYTES, function, *args)
            return [*await asyncio.gather(here, there, return_exceptions=True)]

        assert len({os.getpid(), *await twice(os.getpid)}) == 2
        assert await twice(check_sst, path) == [whole, whole]
        flip(path, 20)
        errors = await twice(check_sst, path)
        assert all(isinstance(error, DamagedError) for error in errors)
        assert str(errors[0]) == str(errors[1])
        assert vars(errors[0]) == vars(errors[1])
        assert [type(error) for error in await twice(len, 5)] == [TypeError, TypeError]


def _slowly(function: Callable[..., Any], *args: object) -> object:
    time.sleep(0.2)
    return function(*args)


@pytest.mark.parametrize("at_once, size_bytes", [(1, WORTH_BYTES), (4, WORTH_BYTES // 4)])
async def test_little_work_is_done_here(at_once: int, size_bytes: int) -> None:
    with Processes(at_once) as started:
        calls = [started.run(size_bytes, os.getpid) for _ in range(3)]
        assert await asyncio.gather(*calls) == [os.getpid()] * 3


PROGRAM = f"""
import asyncio, os, sys, time
from {processes.__name__} import Processes, WORTH_BYTES

async def main():
    with Processes(1 + 1) as started:
        here = asyncio.create_task(started.run(0, time.sleep, 600))
        await asyncio.sleep(0)
        print(await started.run(WORTH_BYTES, os.getpid), flush=True)
        await started.run(WORTH_BYTES, time.sleep, 600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_process_ends_with_the_one_that_began_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, program], cwd=Path(__file__).parents[4], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}/stat").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{child}/stat").exists()
