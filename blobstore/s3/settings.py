"""What can be set about an S3 store. No credentials: the standard chain finds them on the machine that uses them."""

import math
from typing import Final, Literal

import msgspec

KIB: Final = 1024
MIB: Final = 1024 * KIB
# What S3 allows: a part other than the last, parts of an upload, one PUT.
PART_BYTES_MIN: Final = 5 * MIB
PARTS_MAX: Final = 10_000
PUT_BYTES_MAX: Final = 5 * 1024 * MIB


class S3Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a bucket is reached and asked. It may travel to other machines: nothing in it is secret."""

    # Empty: what the standard chain says (AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_CA_BUNDLE, ~/.aws/config), else AWS.
    endpoint_url: str = ""
    region: str = ""
    ca_bundle: str = ""
    # None: as the SDK chooses; a bucket in the path is what most servers other than AWS want.
    path_style: bool | None = None
    # Plain HTTP is refused except to this machine.
    allow_http: bool = False
    # Server-side encryption: with the store's keys (SSE-S3), or with a key of KMS, the account's default if not named.
    encryption: Literal["", "AES256", "aws:kms"] = ""
    kms_key_id: str = ""
    # Whether completing a multipart upload takes `If-None-Match` (design 0003, W5). None: as the profile says.
    conditional_multipart: bool | None = None
    # A larger body goes in parts where that is safe.
    single_put_bytes_max: int = 64 * MIB
    part_bytes: int = 8 * MIB
    # Parts in memory at once, of all uploads together.
    parts_in_memory_max: int = 4
    connections_max: int = 64
    # Large ranges are read by threads (design 0008, B2); otherwise everything goes through the event loop.
    threaded_reads: bool = True
    # Reads, and the puts of pins, that are late are sent a second time (design 0008, H1 and H6).
    hedged_reads: bool = True
    connect_timeout_s: float = 10.0
    # Silence on a connection for this long ends it.
    read_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: A number is out of range, or a key is named without its kind of encryption.
        """
        if may_hold_credentials(self.endpoint_url):
            raise ValueError("endpoint_url holds credentials: take them out, URLs get logged")
        if not PART_BYTES_MIN <= self.part_bytes <= PUT_BYTES_MAX:
            raise ValueError("part_bytes is not within 5 MiB and 5 GiB")
        if not 0 <= self.single_put_bytes_max <= PUT_BYTES_MAX:
            raise ValueError("single_put_bytes_max is not within 0 and 5 GiB")
        if min(self.parts_in_memory_max, self.connections_max) < 1:
            raise ValueError("parts_in_memory_max and connections_max are at least 1")
        if not all(0 < timeout_s < math.inf for timeout_s in (self.connect_timeout_s, self.read_timeout_s)):
            raise ValueError("connect_timeout_s and read_timeout_s are positive, and end")
        if self.kms_key_id and self.encryption != "aws:kms":
            raise ValueError("kms_key_id needs encryption = aws:kms")


def may_hold_credentials(endpoint_url: str) -> bool:
    """Whether a URL of a server has what none needs: a user, even with a slash in the password, a query, a fragment."""
    return any(character in endpoint_url for character in "@?#")
