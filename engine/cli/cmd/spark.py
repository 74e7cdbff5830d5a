"""The group `spark`: verbs for the checkpoints of streaming queries (design 0005)."""

import click

from engine.cli.verbs import OrderedGroup, Verbs

VERBS = {
    "backup": "spark_backup:spark_backup",
    "restore": "spark_restore:spark_restore",
    "check": "spark_check:spark_check",
}


@click.group(
    "spark",
    cls=OrderedGroup,
    commands=Verbs(VERBS),
    invoke_without_command=True,
    subcommand_metavar="VERB [ARGS]...",
    short_help="Care for Spark's checkpoints: backup, restore, check.",
)
@click.pass_context
def spark(ctx: click.Context) -> None:
    """Care for the checkpoints of Spark's streaming queries.

    Back one up while its query runs, bring it back at a batch, and find out whether all that is committed is there.
    Run `tidemark spark VERB --help` for the options of a verb.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
