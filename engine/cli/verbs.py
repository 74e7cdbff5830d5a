"""The verbs of a group, each imported when it is asked for: a run of one verb does not load the others."""

import importlib
from collections.abc import Iterator, Mapping, MutableMapping

import click
from typing_extensions import override


class Verbs(MutableMapping[str, click.Command]):
    """The commands of a `click.Group`.

    Args:
        places: `module:attribute` of each verb, of a module in `engine.cli.cmd`, in the order of their use.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._verbs: dict[str, str | click.Command] = dict(places)

    @override
    def __getitem__(self, name: str) -> click.Command:
        verb = self._verbs[name]
        if isinstance(verb, str):
            module, _, attribute = verb.partition(":")
            loaded: click.Command = getattr(importlib.import_module(f"engine.cli.cmd.{module}"), attribute)
            self._verbs[name] = verb = loaded
        return verb

    @override
    def __setitem__(self, name: str, verb: click.Command) -> None:
        self._verbs[name] = verb

    @override
    def __delitem__(self, name: str) -> None:
        del self._verbs[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._verbs)

    @override
    def __len__(self) -> int:
        return len(self._verbs)


class OrderedGroup(click.Group):
    """A group that lists its verbs in the order of their use."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)
