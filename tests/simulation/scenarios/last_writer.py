"""The writer that comes after all others: whatever has happened, it can commit."""

from engine.errors import EngineError
from engine.repository.repository import Repository
from tests.simulation.checks.judge import CallLog
from tests.simulation.model.participants import Member
from tests.simulation.model.processes import plain_store
from tests.simulation.model.world import WatchedServer
from tests.simulation.scenarios.actions import TASK, make_tree


async def push_everywhere(server: WatchedServer, call_log: CallLog, member: Member) -> list[str]:
    """Commit to each scope; what is acknowledged is the newest (C1 to C4).

    Args:
        server: Where nothing goes wrong any more.
        call_log: What was asked for before.
        member: Lends its directory.

    Returns:
        Violations.
    """
    violations: list[str] = []
    root = member.write(make_tree(len(call_log.trees) + len(call_log.requests)))
    repository = await Repository.open(plain_store(server))
    for scope in sorted(server.record_history.records, key=str):
        try:
            result = await repository.backup(scope, root, task=TASK, store="last")
            commit = await repository.commit(scope, [result], offsets="last")
        except EngineError as error:
            violations.append(f"7: nobody can commit to {scope} any more: {error!r}")
            continue
        newest = server.record_history.open_records(scope)[-1:]
        if [written.record.pointer for written in newest] != [commit.pointer]:
            violations.append(f"6: {commit.pointer} of {scope} was acknowledged, and is not the newest")
    return violations
