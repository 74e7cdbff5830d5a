from pathlib import Path

import pytest

from blobstore.local.store import is_caching_mount, lists_are_consistent

MOUNTINFO = """\
22 28 0:21 / /proc rw,nosuid - proc proc rw
28 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,errors=remount-ro
31 28 0:40 / /mnt/a\\040b rw,relatime shared:7 master:2 - nfs4 server:/export rw,vers=4.2,acdirmax=60,hard
32 28 0:41 / /mnt/noac rw,relatime - nfs server:/export rw,sync,noac,hard
33 28 0:42 / /mnt/zero rw,relatime - nfs4 server:/export rw,acregmin=0,acregmax=0,acdirmin=0,acdirmax=0,hard
34 28 0:43 / /mnt/cifs rw - cifs //server/share rw,actimeo=1
35 28 0:44 / /mnt/strict rw - smb3 //server/share rw,actimeo=0
36 28 0:45 / /mnt/ssh rw - fuse.sshfs me@host:/ rw
37 28 0:46 / /mnt/ceph rw - ceph mon:/ rw
38 28 0:47 / /mnt/juice rw - fuse.juicefs JuiceFS:x rw
39 28 0:48 / /mnt/gluster rw - fuse.glusterfs server:/volume rw
40 28 0:49 / /mnt/beegfs rw - beegfs beegfs_nodev rw
41 28 0:50 / /mnt/9p rw - 9p share rw,trans=virtio
42 28 0:51 / /mnt/virtiofs rw - virtiofs share rw
"""


@pytest.mark.parametrize(
    "device,is_caching",
    [
        pytest.param("254:0", False, id="local disk"),
        pytest.param("0:40", True, id="nfs with its cache"),
        pytest.param("0:41", False, id="nfs with noac"),
        pytest.param("0:42", False, id="nfs with a cache of no time"),
        pytest.param("0:43", True, id="cifs with its cache"),
        pytest.param("0:44", False, id="smb without it"),
        pytest.param("0:45", True, id="sshfs"),
        pytest.param("0:46", False, id="a coherent network file system"),
        *(pytest.param(f"0:{minor}", True, id=f"0:{minor}") for minor in range(47, 52)),
        pytest.param("9:9", False, id="not listed"),
    ],
)
def test_a_network_mount_with_a_cache_is_distinguished_from_others(device: str, is_caching: bool) -> None:
    assert is_caching_mount(MOUNTINFO, device) == is_caching


def test_the_disk_of_this_machine_is_consistent_also_for_a_directory_to_be_made(tmp_path: Path) -> None:
    assert lists_are_consistent(tmp_path / "not" / "yet" / "there")
