"""What `doctor` has seen a store do, kept in the store itself for everybody who opens it (design 0003, P1 to P3)."""

from typing import Final

import msgspec

from blobstore.errors import CapabilityMissingError, InvalidRequestError

PROFILE_KEY: Final = "profile"
PROFILE_BYTES_MAX: Final = 64 * 1024
PROFILE_SCHEMA: Final = 1


class StoreProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the abilities that matter a store has. A field added later has a default that takes nothing away."""

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
    """A profile as the JSON that is stored."""
    return msgspec.json.format(msgspec.json.encode(profile)) + b"\n"


def decode_profile(data: bytes) -> StoreProfile:
    """The inverse of `encode_profile`; unknown fields are ignored.

    Raises:
        CapabilityMissingError: A newer release wrote it, which may have seen something that this one would use.
        InvalidRequestError: It is no profile.
    """
    try:
        profile = msgspec.json.decode(data, type=StoreProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"is no profile of a store: {error}",
            operation="open",
            key=PROFILE_KEY,
            hint="`tidemark doctor` writes a new one",
        ) from error
    if profile.schema > PROFILE_SCHEMA:
        raise CapabilityMissingError(
            f"has schema {profile.schema}, this release knows {PROFILE_SCHEMA}",
            operation="open",
            key=PROFILE_KEY,
            hint="upgrade tidemark, or write the profile anew with this release's `tidemark doctor`",
        )
    return profile
