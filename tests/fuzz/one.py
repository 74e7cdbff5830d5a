"""Fuzzes one target, as a process of its own: `python -m tests.fuzz.one MODULE TARGET [options of libFuzzer]`.

What parses is instrumented while it is imported, so that the fuzzer sees which branches an input takes. To instrument
everything else too would take longer than a merge, and none of it is ever reached.
"""

import importlib
import sys
from typing import Final

import atheris

_PARSERS: Final = [
    "index",
    "blobstore.s3.store",
    "blobstore.s3.errors",
    "blobstore.s3.client",
    "blobstore.s3.bucket_rules",
    "blobstore.s3.settings",
    "engine.inspect.browse",
    "engine.checkpoint.check",
    "engine.checkpoint.file_check",
    "engine.cli.cmd.commit",
    "engine.collect.policy",
    "engine.cli.config",
    "engine.local.digests",
    "engine.drill.drill",
    "engine.spark.collection.tasks",
    "engine.spark.sources.tables",
    "engine.arrow.block_keys",
    "engine.arrow.unsafe_rows",
    "engine.state.compression",
    "engine.state.settings",
    "engine.state.zips",
    "engine.text",
]

with atheris.instrument_imports(include=_PARSERS, enable_loader_override=False):
    _module = importlib.import_module(f"tests.fuzz.{sys.argv[1]}")
    from tests.fuzz.target import Target, try_one


def main() -> None:
    """Hand over to libFuzzer, which ends the process."""
    module, name, *options = sys.argv[1:]
    target: Target = next(target for target in _module.TARGETS if target.name == name)

    def run(data: bytes) -> None:
        try_one(target, data)

    # A merge begins processes of its own, through a shell, by the first word of this command line.
    itself = f"{sys.executable} -m tests.fuzz.one {module} {name}"
    atheris.Setup([itself, f"-max_len={target.bytes_max}", *options], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
