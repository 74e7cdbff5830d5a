"""What a mutation is, and how it is put into the engine."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import msgspec

from tests.simulation.scenarios.interleavings import Interleaving

# What several of them lead to.
NO_INDEX: Final = "IncompleteError: read index"
INDEX_GONE: Final = "cannot be had: get indexes/"
IS_DAMAGED: Final = "is committed and damaged"
NO_BLOB: Final = "its blob is missing"
OTHER_BYTES: Final = "other bytes were restored than backed up"

Patch = Callable[[], AbstractContextManager[None]]


class Mutation(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that does not hold any more."""

    name: str
    rule: str
    # What is different.
    what: str
    patch: Patch
    # Which interleaving ends otherwise then, and what the error that it ends with says.
    interleaving: str
    shows: str


MUTATIONS: Final[dict[str, Mutation]] = {}


def mutation(
    rule: str, what: str, interleaving: Interleaving, *, shows: str
) -> Callable[[Callable[[], Iterator[None]]], Patch]:
    """Put a patch on the list; for the arguments see `Mutation`."""

    def take(make: Callable[[], Iterator[None]]) -> Patch:
        patch = contextmanager(make)
        name = getattr(make, "__name__", "")
        shown = getattr(interleaving, "__name__", "")
        MUTATIONS[name] = Mutation(name=name, rule=rule, what=what, patch=patch, interleaving=shown, shows=shows)
        return patch

    return take


@contextmanager
def everywhere(function: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function in every module of the project that knows it by its name."""
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] not in {"blobstore", "engine", "index"}:
                continue
            for attribute, value in list(vars(module).items()):
                if value is function:
                    patches.enter_context(mock.patch.object(module, attribute, replacement))
        yield
