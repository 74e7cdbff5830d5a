"""Runs one program and writes down what the system charged for it: `launcher.py REPORT PROGRAM [ARGUMENT...]`.

A process of its own, and a small one: a child's peak of memory begins with that of the process it was forked from, so
the harness itself must not be that. Nothing but the standard library, and as little of that as possible.
"""

import os
import sys
import time


def main() -> None:
    """Run it, and write into the report: wall, user and system seconds, peak bytes, exit code."""
    report, program, *arguments = sys.argv[1:]
    began_s = time.clock_gettime(time.CLOCK_MONOTONIC)
    pid = os.fork()
    if not pid:
        try:
            os.execvp(program, [program, *arguments])
        except OSError as error:
            sys.stderr.write(f"{program}: {error}\n")
            os._exit(127)
    _, status, usage = os.wait4(pid, 0)
    wall_s = time.clock_gettime(time.CLOCK_MONOTONIC) - began_s
    code = os.waitstatus_to_exitcode(status)
    # Of the process and of all children that it has waited for. Linux counts the peak in KiB.
    fields = (wall_s, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024, code)
    with open(report, "w", encoding="ascii") as file:  # noqa: PTH123 - pathlib costs memory that would be measured
        file.write(" ".join(map(str, fields)))
    sys.exit(0)


if __name__ == "__main__":
    main()
