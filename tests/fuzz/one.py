"""Fuzzes one target, as a process of its own: `python -m tests.fuzz.one TARGET [options of libFuzzer]`.

The packages are instrumented while they are imported, so that the fuzzer sees which branches an input takes.
"""

import sys

import atheris

with atheris.instrument_imports(include=["index", "blobstore", "engine"], enable_loader_override=False):
    from tests.fuzz.table import TARGETS
    from tests.fuzz.target import try_one


def main() -> None:
    """Hand over to libFuzzer, which ends the process."""
    name, *options = sys.argv[1:]
    target = TARGETS[name]
    atheris.Setup([sys.argv[0], f"-max_len={target.bytes_max}", *options], lambda data: try_one(target, data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
