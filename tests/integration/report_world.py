"""A repository with all that a report shows: two jobs, a rewind, a fork, a name, a collection, a blob that is gone."""

import msgspec

from engine.drill.drill import HISTORY_NAME, append
from tests.integration.conftest import FIRST, SECOND, Shell
from tests.unit.engine.drill.builders import drill, failed

# Names and offsets are anybody's.
HOSTILE = "<script>alert(1)</script>"
FORKED = "replay</td><img src=x>"
THIRD = {**SECOND, "000003.sst": b"3" * 200_000}
REPORT = ("report", "--drills", "drills")


def make_world(shell: Shell) -> None:
    """Make the repository, and a history of restore drills in `drills/`; then remove the blob of 000003.sst."""
    repository_id = shell.result("init", "--margin", "30m")["repository_id"]
    for version, tree in ((8, FIRST), (9, SECOND), (10, THIRD)):
        source = str(shell.tree("source", tree))
        shell.run("backup", source, "--version", str(version), "--offsets", HOSTILE)
    shell.run("name", "v9", "before-upgrade")
    shell.run("rewind", "v9")
    shell.run("fork", "3", FORKED)
    # The first commit goes; 000001.sst stays, because later ones have it.
    shell.run("collect", "--keep-last", "2")
    slow = drill(slo_ms=60_000)
    for entry in (slow, failed(message=HOSTILE)):
        append(shell.directory / "drills" / HISTORY_NAME, msgspec.structs.replace(entry, repository_id=repository_id))
    (lost,) = (
        p for p in (shell.directory / "repository" / "blobs").rglob("*") if p.is_file() and _is_third(p.stat().st_size)
    )
    lost.unlink()


def _is_third(size_bytes: int) -> bool:
    return size_bytes == len(THIRD["000003.sst"])
