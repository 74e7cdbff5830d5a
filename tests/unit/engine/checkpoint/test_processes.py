"""What runs in another process returns and raises what it would here, and ends with this one."""

import os
import subprocess
import sys
import time
from pathlib import Path

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
    with Processes(2) as started:
        assert await started.run(WORTH_BYTES, os.getpid) != os.getpid()
        assert await started.run(WORTH_BYTES - 1, os.getpid) == os.getpid()
        assert await started.run(WORTH_BYTES, check_sst, path) == whole == SstReport(blocks=whole.blocks)
        flip(path, 20)
        with pytest.raises(DamagedError) as here:
            check_sst(path)
        with pytest.raises(DamagedError) as there:
            await started.run(WORTH_BYTES, check_sst, path)
        assert (str(there.value), vars(there.value)) == (str(here.value), vars(here.value))
        with pytest.raises(TypeError):
            await started.run(WORTH_BYTES, len, 5)  # type: ignore[arg-type]


async def test_one_process_is_this_one() -> None:
    with Processes(1) as started:
        assert await started.run(WORTH_BYTES, os.getpid) == os.getpid()


PROGRAM = f"""
import asyncio, os, sys, time
from {processes.__name__} import Processes, WORTH_BYTES

async def main():
    with Processes(1 + 1) as started:
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
