"""Opening the store itself, for the verbs that are not about what is in it."""

from typing import TYPE_CHECKING

from blobstore.errors import InvalidRequestError
from blobstore.opening import StoreSettings, open_s3
from engine.cli.session import Session
from engine.errors import UsageError

if TYPE_CHECKING:
    from blobstore.s3.store import S3Store


def is_s3(session: Session) -> bool:
    """Whether a verb is about a bucket."""
    return session.common.repository.lower().startswith("s3:")


def open_bucket(session: Session, settings: StoreSettings, *, bound_by_profile: bool = True) -> "S3Store":
    """The bucket that a verb is about.

    Raises:
        UsageError: The URL is not the one of a bucket.
    """
    try:
        return open_s3(session.common.repository, settings, bound_by_profile=bound_by_profile)
    except InvalidRequestError as error:
        raise usage_error(session, error) from None


def usage_error(session: Session, error: InvalidRequestError) -> UsageError:
    """What to say of a URL that cannot be opened."""
    return UsageError(str(error), operation=session.verb, subject="--repository", hint=error.hint)
