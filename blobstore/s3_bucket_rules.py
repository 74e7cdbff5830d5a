"""Reading and replacing the lifecycle rules of a bucket; what they mean stands in `blobstore.s3_lifecycle`."""

from collections.abc import Sequence
from typing import Final

from blobstore.s3_answers import store_error
from blobstore.s3_bucket import S3Bucket
from blobstore.s3_client import Answer
from blobstore.s3_errors import BrokenError, RefusedError
from blobstore.s3_lifecycle import Rule

_NO_LIFECYCLE: Final = "NoSuchLifecycleConfiguration"


async def read_lifecycle(bucket: S3Bucket) -> tuple[Rule, ...]:
    """The rules of a bucket, everybody's, as the SDK gives them.

    Raises:
        StoreError: As the store says.
    """
    return tuple((await _read_configuration(bucket)).get("Rules", ()))


async def _read_configuration(bucket: S3Bucket) -> Answer:
    try:
        return await bucket.call("get_bucket_lifecycle_configuration")
    except (RefusedError, BrokenError) as error:
        if isinstance(error, RefusedError) and error.refusal.code == _NO_LIFECYCLE:
            return {}
        raise store_error(error, "read_lifecycle", bucket.name) from None


async def write_lifecycle(bucket: S3Bucket, rules: Sequence[Rule]) -> None:
    """Replace the rules of a bucket, everybody's; none at all removes the configuration.

    Raises:
        StoreError: As the store says.
    """
    if not rules:
        await bucket.ask("delete_bucket_lifecycle", "write_lifecycle", bucket.name)
        return
    # It belongs to the configuration and not to a rule, and is lost unless it is said again.
    least_bytes = (await _read_configuration(bucket)).get("TransitionDefaultMinimumObjectSize")
    await bucket.ask(
        "put_bucket_lifecycle_configuration",
        "write_lifecycle",
        bucket.name,
        LifecycleConfiguration={"Rules": list(rules)},
        TransitionDefaultMinimumObjectSize=least_bytes,
    )
