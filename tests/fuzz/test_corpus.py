"""Everything that fuzzing has found is tried again with each run of the tests, in seconds (architecture, H9)."""

import tracemalloc
from pathlib import Path
from typing import Final

import pytest

from tests.fuzz import target
from tests.fuzz.seeds import seeds_of
from tests.fuzz.table import TARGETS
from tests.fuzz.target import CORPUS, Target, archive_of, corpus_of, try_one, write_corpus

# What decoding a few kilobytes may take: a block of lz4 or snappy may announce 32 MiB (architecture, H3).
PEAK_BYTES_MAX: Final = 80 * 1024 * 1024
CORPUS_BYTES_MAX: Final = 1_000_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", TARGETS)
def test_every_input_is_taken_or_refused_by_a_typed_error(name: str) -> None:
    fuzzed = TARGETS[name]
    inputs = {f"seed {number}": data for number, data in enumerate(seeds_of(name))}
    inputs |= corpus_of(name)
    taken = 0
    tracemalloc.start()
    try:
        for what, data in inputs.items():
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                taken += try_one(fuzzed, data) is None
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
    assert sum(len(data) for name in TARGETS for data in corpus_of(name).values()) < CORPUS_BYTES_MAX
    assert {path.name for path in CORPUS.iterdir()} == {archive_of(name).name for name in TARGETS}


def test_the_same_inputs_give_the_same_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "CORPUS", tmp_path)
    inputs = {"b": b"2", "a": b"1", "found-c": b""}
    write_corpus("keys", inputs)
    first = archive_of("keys").read_bytes()
    write_corpus("keys", dict(reversed(inputs.items())))
    assert archive_of("keys").read_bytes() == first
    assert corpus_of("keys") == inputs


def test_an_error_of_another_kind_is_a_finding(tmp_path: Path) -> None:
    broken = Target(name="broken", run=lambda data: {b"": 0}[data], covers=())
    with pytest.raises(KeyError):
        try_one(broken, b"x")
