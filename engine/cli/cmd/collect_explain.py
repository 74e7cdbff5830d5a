"""`collect explain`: what leads to a key, and what a collection would do with it (design 0006, P7)."""

from pathlib import Path

import click

from engine.cli.exit_codes import ExitCode
from engine.cli.options import Verb, common_options
from engine.cli.retention_options import choose_rules, resolve_rules, retention_options
from engine.cli.session import Session, with_session
from engine.inspect.explain import Explanation, Fate, KeyPath, RootKind
from engine.text import Moment
from index.plan.retention import RetentionPolicy
from index.text import count, human_bytes, human_duration, iso_time, printable


@click.command(
    "explain",
    cls=Verb,
    group="collect",
    short_help="Say what leads to a key, and what collect would do with it.",
    prints=(Explanation,),
    example="tidemark collect explain -r file:///backups --keep-last 30 KEY",
)
@click.argument("key")
@retention_options
@common_options
@with_session
def explain(
    session: Session,
    *,
    key: str,
    keep_last: int | None,
    keep_since: Moment | None,
    keep_named: bool,
    policy: Path | None,
) -> ExitCode:
    """Say of one KEY of the repository whether it is there, what leads to it, and what collect would do with it.

    What collect would keep is said as there; if nothing is said, everything is kept that nobody has closed. Ends with 4
    if the key is missing and needed, or if an index cannot be read that may lead to it.
    """
    rules = choose_rules(keep_last, keep_since, policy, keep_named=keep_named)
    with session.open() as repository:
        retention = resolve_rules(repository, rules) if rules is not None else RetentionPolicy(rules=())
        told = repository.explain(key, retention)
    session.show(told, _lines(told))
    is_missing = told.fate is Fate.ABSENT and any(path.keeps for path in told.paths)
    return ExitCode.DAMAGED if is_missing or told.unreadable else ExitCode.OK


def _lines(told: Explanation) -> list[str]:
    lines = [f"{printable(told.key)}: {told.kind.value}"]
    if told.created_at_ms is not None and told.size_bytes is not None:
        lines.append(f"{human_bytes(told.size_bytes)}, created {iso_time(told.created_at_ms)}, {_ttl(told)}")
    for path in told.paths:
        lines += _path_lines(path)
    if told.paths_count > len(told.paths):
        lines.append(f"and {count(told.paths_count - len(told.paths), 'path')} more")
    if told.unreadable:
        some = f"{count(len(told.unreadable), 'index', 'indexes')}, such as {printable(told.unreadable[0])}"
        lines.append(f"NOT looked into, because missing or altered: {some}")
    because = f"{told.rule}: {told.reason.value}" if told.reason is not None else told.rule
    until = f", {iso_time(told.collectable_at_ms)}" if told.fate is Fate.WAITING and told.collectable_at_ms else ""
    return [*lines, f"collect: it {told.fate.value}{until}; {because}"]


def _ttl(told: Explanation) -> str:
    if told.expires_at_ms is None:
        return "no TTL"
    left_ms = told.expires_at_ms - told.now_ms
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
