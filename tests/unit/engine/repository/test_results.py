"""What the results of the public calls say of themselves."""

import pytest

from engine.inspect.verify import Level
from index.display import DisplayMixin
from index.plan.commits import Retention
from tests.unit.engine.conftest import JOB, World


async def test_results_report_what_a_user_asks_first(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")
    assert repr(result).startswith("<BackupResult of job, store 0/default, version 1, files 4 (")
    commit = await repository.commit(JOB, [result], offsets="one")
    assert repr(commit).startswith("<Commit number 1, of job, version 1, at ")
    restored = await repository.restore(commit, world.target())
    assert repr(restored).startswith("<RestoreResult files 4 (")
    assert "requests" in restored.figures()
    report = await repository.verify(level=Level.CONTENT)
    assert repr(report).startswith("<VerifyReport verdict no damage, level content, commits 1")
    difference = await repository.diff(commit.record.stores[0], commit.record.stores[0])
    assert "unchanged 4 (" in repr(difference)
    history = await repository.history(JOB)
    assert repr(history).startswith("<History of job, records 1, newest 1, ")
    collected = await repository.collect(Retention(keep_last=1), dry_run=True)
    assert "would delete 1 key (0 B), kept 1 commit" in repr(collected)
    for shown in (result, commit, restored, report, difference, history, collected):
        assert isinstance(shown, DisplayMixin)
        assert shown._repr_html_().startswith(f"<table><caption>{type(shown).__name__}</caption>")


async def test_damage_comes_first(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    lost = next(key for key in sorted(await world.keys("blobs/")))
    await world.store.inner.delete([lost])
    report = await repository.verify()
    assert list(report.figures().items())[:2] == [("verdict", "damaged"), ("blob missing", "1")]
    assert lost in report.figures()["keys"]


@pytest.mark.parametrize("name", ["Commit", "BackupResult", "RestoreResult", "VerifyReport", "CollectReport"])
def test_results_are_exported(name: str) -> None:
    import tidemark  # noqa: PLC0415  (what a user writes)

    assert issubclass(getattr(tidemark, name), DisplayMixin)
