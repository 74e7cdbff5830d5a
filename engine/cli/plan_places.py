"""Where the plans of collections stand on this machine (design 0006, P2)."""

import contextlib
import shutil
from pathlib import Path
from typing import Final

from engine.errors import UsageError
from index.errors import UnsafeNameError
from index.snapshot.keys import RunId, check_run_id

# Of those that nobody gave a place to, the newest stay.
PLANS_KEPT_MAX: Final = 10
_PLANS: Final = "plans"


def choose_plan_dir(chosen: Path | None, cache_dir: Path | None, plan_id: RunId, *, dry_run: bool) -> Path | None:
    """Where the plan goes: where somebody said, or for a dry run below the cache, the oldest ones of which go.

    Returns:
        A directory that may not be there yet; None if no plan is to be written.

    Raises:
        UsageError: It is a file.
    """
    if chosen is not None:
        if chosen.exists() and not chosen.is_dir():
            raise UsageError("is no directory", operation="collect", subject="--plan", hint="name one that is absent")
        return chosen.absolute()
    if not dry_run or cache_dir is None:
        return None
    plans = cache_dir / _PLANS
    for old in _plans_in(plans)[: -(PLANS_KEPT_MAX - 1)]:
        # What cannot be removed is in nobody's way.
        shutil.rmtree(old, ignore_errors=True)
    return plans / plan_id


def name_after_run(plan: Path, run: RunId) -> Path:
    """Give a plan that stands below the cache the name of its run, which nobody knew before; returns where it is."""
    named = plan.with_name(run)
    try:
        plan.rename(named)
    except OSError:
        # It is whole where it is.
        return plan
    return named


def _plans_in(directory: Path) -> list[Path]:
    """The plans that tidemark has written, oldest first."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            with contextlib.suppress(UnsafeNameError):
                check_run_id(path.name)
                found.append(path)
    return sorted(found)
