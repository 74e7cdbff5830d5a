"""`collect explain`: what leads to a key, and what a collection would do with it (design 0006, P7)."""

import click

from engine.cli.choices import resolve_rules, retention_options
from engine.cli.exit_codes import ExitCode
from engine.cli.session import Session, verb
from engine.collect.policy import PolicyFile
from engine.inspect.explain import Explanation, Fate, KeyPath, RootKind
from index.plan.retention import RetentionPolicy
from index.text import count, human_bytes, human_duration, iso_time, printable


@verb(
    "explain",
    group="collect",
    short_help="Say what leads to a key, and what collect would do with it.",
    prints=(Explanation,),
    example="tidemark collect explain -r file:///backups --keep-last 30 KEY",
)
@click.argument("key")
@retention_options
def explain(session: Session, *, key: str, rules: PolicyFile | None) -> ExitCode:
    """Say of one KEY of the repository whether it is there, what leads to it, and what collect would do with it.

    What collect would keep is said as there; if nothing is said, everything is kept that nobody has closed. Ends with 4
    if the key is missing and needed, or if an index cannot be read that may lead to it.
    """
    with session.open() as repository:
        retention = resolve_rules(repository, rules) if rules is not None else RetentionPolicy(rules=())
        found = repository.explain(key, retention)
    session.show(found, _lines(found))
    is_missing = found.fate is Fate.ABSENT and any(path.keeps for path in found.paths)
    return ExitCode.DAMAGED if is_missing or found.unreadable else ExitCode.OK


def _lines(found: Explanation) -> list[str]:
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
