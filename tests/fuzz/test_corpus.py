"""Everything that fuzzing has found is tried again with each run of the tests, in seconds (architecture, H9)."""

import tracemalloc
from pathlib import Path
from typing import Final

import pytest

from tests.fuzz.seeds import seeds_of
from tests.fuzz.table import TARGETS
from tests.fuzz.target import CORPUS, corpus_of, try_one

# What decoding a few kilobytes may take: a block of lz4 or snappy may announce 32 MiB (architecture, H3).
PEAK_BYTES_MAX: Final = 80 * 1024 * 1024
CORPUS_BYTES_MAX: Final = 1_000_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", TARGETS)
def test_every_input_is_taken_or_refused_by_a_typed_error(name: str) -> None:
    target = TARGETS[name]
    inputs = {f"seed {number}": data for number, data in enumerate(seeds_of(name))}
    inputs |= {path.name: path.read_bytes() for path in corpus_of(name)}
    taken = 0
    tracemalloc.start()
    try:
        for what, data in inputs.items():
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                taken += try_one(target, data) is None
            except BaseException as error:
                error.add_note(f"input {what} of {name}: {data[:200]!r}")
                raise
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < PEAK_BYTES_MAX, what
    finally:
        tracemalloc.stop()
    # A target that refuses everything would try nothing but its first check.
    assert taken, "no input is taken"


def test_the_corpus_is_small_and_has_no_stranger() -> None:
    kept = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) < CORPUS_BYTES_MAX
    assert {path.parent.name for path in kept} == set(TARGETS)


def test_an_error_of_another_kind_is_a_finding(tmp_path: Path) -> None:
    target = TARGETS["keys"]
    broken = type(target)(name="broken", run=lambda data: {b"": 0}[data], covers=())
    with pytest.raises(KeyError):
        try_one(broken, b"x")
