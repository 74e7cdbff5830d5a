"""How many processors there are for us."""

import os


def cores_count() -> int:
    """Processors that this process may use: of a container or a task set, its share."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
