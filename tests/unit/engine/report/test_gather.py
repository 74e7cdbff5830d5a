"""What a report is made of: bounded, and past what is damaged."""

from typing import Any

from blobstore.base import BytesBody
from engine.inspect.verify import ProblemKind
from engine.report.report import AUDITS_MAX, JOBS_MAX, ReportFacts, ReportRequest, gather_report, make_page
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.keys import audit_key, commit_key, make_run_id
from index.snapshot.model import Scope
from tests.unit.engine.conftest import JOB, World


async def _gather(repository: Repository, **request: Any) -> ReportFacts:
    return await gather_report(repository, ReportRequest(location="memory", **request))


async def test_the_jobs_that_committed_last_are_reported(world: World) -> None:
    repository = await world.process()
    scopes = [Scope(f"job-{n:02}") for n in range(JOBS_MAX + 2)]
    for scope in scopes:
        await world.history(repository, "one", scope=scope)
    facts = await _gather(repository)
    assert [job.scope for job in facts.jobs] == scopes[2:]
    assert facts.jobs_left_out == 2
    one = await _gather(repository, scopes=scopes[:1])
    assert ([job.scope for job in one.jobs], one.jobs_left_out) == (scopes[:1], 0)
    assert sum(one.requests.values()) < sum(facts.requests.values())


async def test_requests_are_bounded_and_counted(world: World) -> None:
    repository = await world.process()
    await world.history(repository, *map(str, range(8)))
    few = await _gather(repository, entries_max=2)
    many = await _gather(repository, entries_max=8)
    # For each commit listed its record, and its index twice: for what is new in it, and for what it needs.
    assert many.requests["get"] - few.requests["get"] == 6 * 3
    assert not {name for name in many.requests if name.startswith(("put", "delete", "remove"))}


async def test_what_still_has_a_ttl_is_at_risk(world: World) -> None:
    repository = await world.process()
    result = await world.backup(repository, "one")
    for key in result.new_keys:
        world.store.fail("remove_ttl", key)
    await repository.commit(JOB, [result])
    facts = await _gather(repository)
    assert facts.verified is not None
    assert {p.kind for p in facts.verified.problems} == {ProblemKind.AT_RISK}
    assert facts.risks_count == len(facts.verified.problems) > 1


async def test_a_damaged_record_is_a_risk_and_what_its_name_holds_is_verified(world: World) -> None:
    repository = await world.process()
    commits = await world.history(repository, "one", "two", "three")
    await repository.name(commits[0], "golden")
    for number in (1, 2):
        await world.store.put(commit_key(JOB, number), BytesBody(b"no record"))
    facts = await _gather(repository)
    assert [key for key, _ in facts.jobs[0].damaged] == [commit_key(JOB, 2), commit_key(JOB, 1)]
    assert facts.verified is not None
    assert (facts.verified.commits_count, facts.verified.problems) == (2, ())
    assert facts.risks_count == 2
    assert "DAMAGED, held by golden" in make_page(facts)


async def test_audit_records_are_read_newest_first_and_past_broken_ones(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    await repository.collect(Retention(keep_last=1), delete_share_max=1)
    broken = audit_key(make_run_id(1, "0" * 20))
    await world.store.put(broken, BytesBody(b"{}"))
    facts = await _gather(repository)
    assert (len(facts.audits), facts.audits_count) == (1, 2)
    assert broken in facts.audits_broken[0]
    for n in range(2, AUDITS_MAX + 5):
        await world.store.put(audit_key(make_run_id(n, "0" * 20)), BytesBody(b"{}"))
    assert len((await _gather(repository)).audits_broken) == AUDITS_MAX - 1
