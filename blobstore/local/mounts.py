"""What kind of file system a directory is on, as far as it matters to a store."""

import os
import re
from pathlib import Path
from typing import Final

# File systems whose clients answer from a cache for seconds: a list may lack what another client has just put.
# Coherent ones (Ceph, Lustre, GPFS) are not among them.
_CACHING_TYPES: Final = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "beegfs"),
        *("fuse.sshfs", "fuse.juicefs", "fuse.glusterfs"),
    }
)
# Mount options of NFS and CIFS that switch this cache off.
_UNCACHED_OPTIONS: Final = frozenset({"noac", "actimeo=0", "acdirmax=0"})

_MOUNT: Final = re.compile(
    r"^\d+ \d+ (?P<device>\d+:\d+) \S+ \S+ (?P<options>\S+).* - (?P<type>\S+) \S+ (?P<super_options>\S+)$", re.MULTILINE
)
_MOUNTINFO: Final = Path("/proc/self/mountinfo")


def lists_are_consistent(directory: Path) -> bool:
    """Whether a list of the directory shows at once what other machines have put there.

    A file system that the kernel does not describe, as on macOS, is taken for a local one.
    """
    nearest = next(level for level in (directory, *directory.parents) if level.exists())
    device = nearest.stat().st_dev
    try:
        mountinfo = _MOUNTINFO.read_text()
    except OSError:
        return True
    return not is_caching_mount(mountinfo, f"{os.major(device)}:{os.minor(device)}")


def is_caching_mount(mountinfo: str, device: str) -> bool:
    """Whether this device is mounted over a network with a cache that may be stale.

    Args:
        mountinfo: The text of `/proc/self/mountinfo`, see proc_pid_mountinfo(5).
        device: `major:minor`.
    """
    return any(
        mount["device"] == device
        and mount["type"] in _CACHING_TYPES
        and not _UNCACHED_OPTIONS & {*mount["options"].split(","), *mount["super_options"].split(",")}
        for mount in _MOUNT.finditer(mountinfo)
    )
