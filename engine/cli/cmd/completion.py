"""`completion`: what a shell reads to complete command lines."""

from typing import Final

import click
import msgspec
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from engine.cli.session import Session, verb

SHELLS: Final[dict[str, type[ShellComplete]]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


class CompletionView(msgspec.Struct, frozen=True, kw_only=True):
    """`completion`."""

    shell: str
    # To be read by the shell.
    script: str


@verb(
    "completion",
    "Print what makes a shell complete verbs and options.",
    needs_repository=False,
    prints=(CompletionView,),
)
@click.argument("shell", type=click.Choice(list(SHELLS)))
def completion(session: Session, shell: str) -> None:
    """Print a script for SHELL that completes verbs, options, their choices, and paths.

    For zsh write it to a file `_tidemark` in a directory of $fpath, for fish to
    ~/.config/fish/completions/tidemark.fish; or try it once with `source <(tidemark completion bash)`.

    Example: tidemark completion bash > ~/.local/share/bash-completion/completions/tidemark
    """
    root = click.get_current_context().find_root().command
    script = SHELLS[shell](root, {}, "tidemark", "_TIDEMARK_COMPLETE").source()
    if session.common.json:
        session.show(CompletionView(shell=shell, script=script))
    else:
        # Also if somebody has set `quiet` for all runs: else the file that a shell is to read would be empty.
        click.echo(script)
