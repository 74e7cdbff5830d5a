"""The verbs below `collect`: `explain` and `verify-plan` (design 0006, P6 and P7)."""

from pathlib import Path
from typing import Final

import click

from blobstore.opening import open_store
from engine.cli.choices import resolve_rules, retention_options
from engine.cli.exit_codes import ExitCode
from engine.cli.options import DIRECTORY_THERE
from engine.cli.session import Session, verb
from engine.collect.check import PlanCheck
from engine.collect.policy import PolicyFile
from engine.inspect.explain import Explanation, Fate, KeyPath, RootKind
from engine.text import table
from index.display import count, human_bytes, human_duration, iso_time, printable
from index.plan.commits import RetentionPolicy

# Keys of one kind that people are shown; the JSON has more.
SHOWN_MAX: Final = 20


@verb("explain", "Say what leads to a key, and what collect would do with it.", group="collect", prints=(Explanation,))
@click.argument("key")
@retention_options
def explain(session: Session, *, key: str, rules: PolicyFile | None) -> ExitCode:
    """Say of one KEY of the repository whether it is there, what leads to it, and what collect would do with it.

    What collect would keep is said as there; if nothing is said, everything is kept that nobody has closed. Ends with 4
    if the key is missing and needed, or if an index cannot be read that may lead to it.

    Example: tidemark collect explain -r file:///backups --keep-last 30 KEY
    """
    with session.open() as repository:
        retention = resolve_rules(repository, rules) if rules is not None else RetentionPolicy(rules=())
        found = repository.explain(key, retention)
    session.show(found, _explanation_lines(found))
    is_missing = found.fate is Fate.ABSENT and any(path.keeps for path in found.paths)
    return ExitCode.DAMAGED if is_missing or found.unreadable else ExitCode.OK


def _explanation_lines(found: Explanation) -> list[str]:
    lines = [f"{printable(found.key)}: {found.kind.value}"]
    if found.created_at_ms is not None and found.size_bytes is not None:
        lines.append(f"{human_bytes(found.size_bytes)}, created {iso_time(found.created_at_ms)}, {_ttl(found)}")
    for path in found.paths:
        lines += _path_lines(path)
    if found.paths_count > len(found.paths):
        lines.append(f"and {count(found.paths_count - len(found.paths), 'path')} more")
    if found.unreadable:
        some = f"{count(len(found.unreadable), 'index', 'indexes')}, such as {printable(found.unreadable[0])}"
        lines.append(f"NOT looked into, because missing or altered: {some}")
    because = f"{found.rule}: {found.reason.value}" if found.reason is not None else found.rule
    until = f", {iso_time(found.collectable_at_ms)}" if found.fate is Fate.WAITING and found.collectable_at_ms else ""
    return [*lines, f"collect: it {found.fate.value}{until}; {because}"]


def _ttl(found: Explanation) -> str:
    if found.expires_at_ms is None:
        return "no TTL"
    left_ms = found.expires_at_ms - found.now_ms
    return f"its TTL ends in {human_duration(left_ms)}" if left_ms > 0 else "its TTL is over"


def _path_lines(path: KeyPath) -> list[str]:
    scope = printable(str(path.scope))
    if path.root is RootKind.COMMIT:
        fate = f"stays: {path.kept.value}" if path.kept is not None else "is to be closed"
        root = f"commit {path.number} of {scope} ({fate})"
    else:
        root = f"{path.root.value} {printable(path.name)} on commit {path.number} of {scope}"
    lines = [f"  {root}", f"    store {printable(f'{path.task}/{path.store}')}"]
    lines += [f"    {'index' if n == 0 else 'a delta on'} {key}" for n, key in enumerate(path.indexes)]
    return [*lines, *([f"    {', '.join(printable(file) for file in path.files)}"] if path.files else [])]


@verb("verify-plan", "Check the plan of a dry run by deriving it another way.", group="collect", prints=(PlanCheck,))
@click.argument("plan", type=DIRECTORY_THERE)
@retention_options
def verify_plan(session: Session, *, plan: Path, rules: PolicyFile | None) -> ExitCode:
    """Check the PLAN that `tidemark collect -n --plan PLAN` wrote, by code that shares nothing with it but the format.

    Say what is to be kept, as for collect, to have it compared with what the plan says of it. Ends with 9 if a key is
    planned that something needs or that was younger than the TTL, or if the plan contradicts itself, the store's
    clock or what is to be kept; with 3 if the plan lacks keys that could go, or if all that it has is gone. What came
    later, and what is gone, makes no plan wrong.

    Example: tidemark collect verify-plan -r file:///backups plan/
    """
    with session.open() as repository:
        place = open_store(str(plan.absolute()))
        try:
            check = repository.verify_plan(place, meant=rules.resolve if rules is not None else None)
        finally:
            repository.loop.run(place.close())
    session.show(check, _check_lines(check))
    if not check.is_right:
        return ExitCode.UNSAFE
    return ExitCode.OK if check.is_complete and not check.is_over else ExitCode.PARTIAL


def _check_lines(check: PlanCheck) -> list[str]:
    lines: list[str] = []
    if check.wrong:
        rows = [(printable(w.key), w.kind.value) for w in check.wrong[:SHOWN_MAX]]
        lines += [*table(("planned, and WRONG", "because"), rows), *_more(check.wrong_count), ""]
    if check.missed:
        lines += [*(f"missed: {printable(key)}" for key in check.missed[:SHOWN_MAX]), *_more(check.missed_count), ""]
    lines += [f"WRONG: {printable(text)}" for text in check.contradictions[:SHOWN_MAX]]
    lines += _more(len(check.contradictions))
    if check.changed and check.missed_count:
        gone = f"{count(len(check.changed), 'root')}, such as {printable(check.changed[0])}"
        lines.append(f"gone since the plan was made: {gone}; what only they kept looks missed: plan again")
    notes = [
        (check.later_count, "came later"),
        (check.gone_count, "planned and gone"),
        (check.rescued_count, "planned, and kept by what came later"),
        (check.waiting_count, "younger than the TTL"),
    ]
    if others := ", ".join(f"{number:,} {what}" for number, what in notes if number):
        lines.append(f"beside that: {others}")
    if not check.retention_compared:
        lines.append("kept is what the plan says; give --policy or --keep-... to have that compared too")
    planned = f"{count(check.planned_count, 'upload')} planned ({human_bytes(check.planned_bytes)})"
    against = f"{check.listed_count:,} listed and {count(check.indexes_count, 'index', 'indexes')}"
    return [*lines, f"{planned}, compared with {against}: {_verdict(check)}"]


def _verdict(check: PlanCheck) -> str:
    faults = [
        (check.wrong_count, f"{check.wrong_count:,} WRONG"),
        (len(check.contradictions), count(len(check.contradictions), "contradiction")),
        (check.missed_count, f"{check.missed_count:,} missed ({human_bytes(check.missed_bytes)})"),
    ]
    if faults_found := ", ".join(text for number, text in faults if number):
        return faults_found
    if check.is_over:
        return "nothing left to compare, all that was planned is gone"
    return "right and complete" if not check.gone_count else "right and complete as far as it is still there"


def _more(total: int) -> list[str]:
    return [f"and {total - SHOWN_MAX:,} more"] if total > SHOWN_MAX else []
