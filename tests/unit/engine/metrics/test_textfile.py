"""Files for the textfile collector: whole or not at all, and what runs add to them."""

import fcntl
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.metrics import exposition
from engine.metrics.exposition import add_run, expose, parse, write_textfile
from engine.metrics.names import Sample, Samples


def run(verb: str, job: str, *, code: int = 0, retries: int = 0, at_s: float = 100) -> Samples:
    samples = Samples(verb=verb, job_name=job)
    samples.add("runs_total", 1, code=str(code))
    samples.add("run_exit_code", code)
    samples.add("store_retries_total", retries)
    if code == 0:
        samples.add("run_last_success_timestamp_seconds", at_s)
        samples.add("restore_seconds", at_s, task="0", store="default")
    return samples


def values(path: Path) -> dict[tuple[str, ...], float]:
    """By name and the values of the labels in their order."""
    return {(sample.name, *sample.labels): sample.value for sample in parse(path.read_bytes().decode())}


def test_what_is_exposed_is_what_prometheus_reads() -> None:
    samples = Samples(verb="backup", job_name='a "b"\\c\nd')
    samples.add("runs_total", 3, code="0")
    samples.add("run_seconds", 0.25)
    text = expose(samples).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert (families["tidemark_runs"].type, families["tidemark_run_seconds"].type) == ("counter", "gauge")
    assert "[Samza: init-ns]" not in text
    assert families["tidemark_runs"].samples[0].labels == {"verb": "backup", "job_name": 'a "b"\\c\nd', "code": "0"}
    assert parse(text) == tuple(samples)


def test_what_others_wrote_into_a_file_is_no_sample_of_ours() -> None:
    assert parse('node_load1 3\ntidemark_runs_total{verb="x"} 5\ntidemark_run_seconds{verb="x",job_name="y"} 2\n') == (
        Sample("tidemark_run_seconds", ("x", "y"), 2.0),
    )


def test_counters_go_on_and_gauges_are_those_of_the_last_run(tmp_path: Path) -> None:
    path = tmp_path / "t.prom"
    assert add_run(path, run("backup", "flights", retries=2)) == ""
    add_run(path, run("restore", "flights", retries=7, at_s=150))
    add_run(path, run("backup", "flights", retries=3, at_s=200))
    add_run(path, run("backup", "flights", code=5, retries=4, at_s=300))
    shown = values(path)
    assert shown["tidemark_runs_total", "backup", "flights", "0"] == 2
    assert shown["tidemark_runs_total", "backup", "flights", "5"] == 1
    assert shown["tidemark_store_retries_total", "backup", "flights"] == 9
    assert shown["tidemark_run_exit_code", "backup", "flights"] == 5
    # The last success stays, and what only it could show does not.
    assert shown["tidemark_run_last_success_timestamp_seconds", "backup", "flights"] == 200
    assert ("tidemark_restore_seconds", "backup", "flights", "0", "default") not in shown
    assert shown["tidemark_restore_seconds", "restore", "flights", "0", "default"] == 150
    assert shown["tidemark_store_retries_total", "restore", "flights"] == 7


def test_runs_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.prom"
    threads = [threading.Thread(target=add_run, args=(path, run("backup", f"j{n % 2}"))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shown = values(path)
    assert (shown["tidemark_runs_total", "backup", "j0", "0"], shown["tidemark_runs_total", "backup", "j1", "0"]) == (
        4,
        4,
    )


@pytest.mark.parametrize(
    "text", ["not a metric\n", "tidemark_runs_total{verb=\n", "{,  =# TYPE ={", "\x00\xff", "x" * 100]
)
def test_a_file_that_is_not_text_of_ours_is_given_up_and_that_is_reported(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.prom"
    path.write_text(text)
    assert add_run(path, run("backup", "flights"))
    assert values(path)["tidemark_run_exit_code", "backup", "flights"] == 0


@pytest.mark.parametrize("job", ["a\rb", "a\r\nb", "\udcff", "\u2028", 'a "b"\\c'])
def test_a_job_with_any_name_keeps_its_counters(tmp_path: Path, job: str) -> None:
    path = tmp_path / "t.prom"
    assert [add_run(path, run("backup", job)) for _ in range(2)] == ["", ""]
    (runs,) = (value for key, value in values(path).items() if key[0] == "tidemark_runs_total")
    assert runs == 2


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.prom"
    write_textfile(path, run("backup", "flights"))
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("blobstore.local.files.flush", full)
    with pytest.raises(OSError, match="No space"):
        write_textfile(path, run("backup", "other"))
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".t.prom.lock", "t.prom"]


@pytest.mark.parametrize("write", [add_run, write_textfile])
def test_who_holds_the_lock_for_ever_stops_nobody_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, Samples], object]
) -> None:
    monkeypatch.setattr(exposition, "LOCK_ATTEMPTS_MAX", 2)
    path = tmp_path / "t.prom"
    write(path, run("backup", "flights"))
    before = path.read_bytes()
    with (tmp_path / ".t.prom.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="another process keeps this lock"):
            write(path, run("backup", "flights"))
    assert path.read_bytes() == before
    # Other files, and who locks the directory, do not concern it.
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        write(path, run("backup", "other"))
    finally:
        os.close(directory)


@pytest.mark.parametrize("write", [add_run, write_textfile])
def test_a_pipe_is_neither_waited_for_nor_replaced(tmp_path: Path, write: Callable[[Path, Samples], object]) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        write(path, run("backup", "flights"))
    assert path.is_fifo()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_another_user_can_read_it_and_a_link_is_replaced_not_followed(tmp_path: Path, umask: int) -> None:
    path, elsewhere = tmp_path / "t.prom", tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    path.symlink_to(elsewhere)
    before = os.umask(umask)
    try:
        write_textfile(path, run("backup", "flights"))
    finally:
        os.umask(before)
    assert elsewhere.read_text() == "precious"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
