"""What is known of an S3 store before it is asked: what can be set, and what `doctor` has seen it do.

Settings hold no credentials: the standard chain finds them on the machine that uses them. What `doctor` has seen is
kept in the store itself for all who open it (design 0003, P1 to P3).
"""

import math
from typing import Final, Literal

import msgspec

from blobstore.errors import CapabilityMissingError, InvalidRequestError

# What other programs may use; the profile is for the store and `doctor` alone.
__all__ = ["S3Settings", "may_hold_credentials"]

KIB: Final = 1024
MIB: Final = 1024 * KIB
# What S3 allows: a part other than the last, parts of an upload, one PUT.
PART_BYTES_MIN: Final = 5 * MIB
PARTS_MAX: Final = 10_000
PUT_BYTES_MAX: Final = 5 * 1024 * MIB

PROFILE_KEY: Final = "profile"
PROFILE_BYTES_MAX: Final = 64 * 1024
PROFILE_SCHEMA: Final = 1


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
    # Ask at opening whether the bucket keeps versions, and if it does, serve deleted blobs to who asks for them.
    serve_deleted: bool = False
    connect_timeout_s: float = 10.0
    # Silence on a connection for this long ends it.
    read_timeout_s: float = 30.0

    def __post_init__(self) -> None:
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
    """Return whether a URL of a server has a user, even with a slash in the password, a query or a fragment."""
    return any(character in endpoint_url for character in "@?#")


class StoreProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Which abilities that matter a blob store has. A field added later has a default that takes nothing away."""

    schema: int = PROFILE_SCHEMA
    # Of several concurrent creates of one key exactly one succeeds.
    atomic_create: bool
    # Lists show at once what was put and deleted.
    consistent_lists: bool
    # Tags are kept and replaced, and come with a PUT.
    tags: bool
    # Completing a multipart upload takes `If-None-Match`.
    conditional_multipart: bool
    # By this machine's clock, for people.
    probed_at_ms: int
    # The release that looked.
    tidemark: str


def encode_profile(profile: StoreProfile) -> bytes:
    """Encode a profile as the JSON that is stored."""
    return msgspec.json.format(msgspec.json.encode(profile)) + b"\n"


def decode_profile(data: bytes) -> StoreProfile:
    """Decode what `encode_profile` made; unknown fields are ignored, and a newer release's profile refused."""
    try:
        profile = msgspec.json.decode(data, type=StoreProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = f"is not a valid profile of a blob store: {error}"
        hint = "`tidemark doctor` writes a new one"
        raise InvalidRequestError(message, operation="open", key=PROFILE_KEY, hint=hint) from error
    if profile.schema > PROFILE_SCHEMA:
        message = f"has schema {profile.schema}, this release knows {PROFILE_SCHEMA}"
        hint = "upgrade tidemark, or write a new profile with this release's `tidemark doctor`"
        raise CapabilityMissingError(message, operation="open", key=PROFILE_KEY, hint=hint)
    return profile
