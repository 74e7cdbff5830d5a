"""Bytes by key: one storage contract, its stores and its wrappers. Knows nothing of snapshots."""

import logging
from importlib.metadata import PackageNotFoundError, version

logging.getLogger(__name__).addHandler(logging.NullHandler())


def installed_release() -> str:
    """Return the installed version; "unknown" in a checkout that is not installed."""
    try:
        return version("tidemark")
    except PackageNotFoundError:
        return "unknown"
