"""`collect verify-plan`: the plan of a dry run, derived again by another way (design 0006, P6)."""

from pathlib import Path

import click

from blobstore.opening import open_store
from engine.cli.choices import retention_options
from engine.cli.exit_codes import ExitCode
from engine.cli.options import DIRECTORY_THERE
from engine.cli.session import Session, verb
from engine.collect.check import PlanCheck
from engine.collect.policy import PolicyFile
from engine.text import table
from index.text import count, human_bytes, printable

# Keys of one kind that people are shown; the JSON has more.
SHOWN_MAX = 20


@verb(
    "verify-plan",
    group="collect",
    short_help="Check the plan of a dry run by deriving it another way.",
    prints=(PlanCheck,),
    example="tidemark collect verify-plan -r file:///backups plan/",
)
@click.argument("plan", type=DIRECTORY_THERE)
@retention_options
def verify_plan(session: Session, *, plan: Path, rules: PolicyFile | None) -> ExitCode:
    """Check the PLAN that `tidemark collect -n --plan PLAN` wrote, by code that shares nothing with it but the format.

    Say what is to be kept, as for collect, to have it compared with what the plan says of it. Ends with 9 if a key is
    planned that something needs or that was younger than the TTL, or if the plan contradicts itself, the store's
    clock or what is to be kept; with 3 if the plan lacks keys that could go, or if all that it has is gone. What came
    later, and what is gone, makes no plan wrong.
    """
    with session.open() as repository:
        place = open_store(str(plan.absolute()))
        try:
            check = repository.verify_plan(place, meant=rules.resolve if rules is not None else None)
        finally:
            repository.loop.run(place.close())
    session.show(check, _lines(check))
    if not check.is_right:
        return ExitCode.UNSAFE
    return ExitCode.OK if check.is_complete and not check.is_over else ExitCode.PARTIAL


def _lines(check: PlanCheck) -> list[str]:
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
