"""Requests to one bucket."""

from blobstore.s3.client import S3Client
from blobstore.s3.errors import Answer, BrokenError, RefusedError, store_error
from blobstore.s3.settings import S3Settings
from blobstore.wrappers.throttle import Bandwidth


class S3Bucket:
    """A bucket and the client that asks it.

    Attributes:
        name: The bucket's.
        client: Opened by the first request.
    """

    def __init__(self, name: str, settings: S3Settings, bandwidth: Bandwidth | None = None) -> None:
        self.name = name
        self.client = S3Client(settings, bandwidth)

    async def call(self, method: str, **arguments: object) -> Answer:
        """One request whose refusal means something to the caller; errors as `S3Client.call`."""
        return await self.client.call(method, Bucket=self.name, **arguments)

    async def fetch(self, **arguments: object) -> Answer:
        """As `call`, of an object whose content is to be poured; see `S3Client.fetch`."""
        return await self.client.fetch(Bucket=self.name, **arguments)

    async def ask(self, method: str, operation: str, key: str, **arguments: object) -> Answer:
        """One request whose refusal is the caller's error.

        Raises:
            StoreError: As the store says.
        """
        try:
            return await self.call(method, **arguments)
        except (RefusedError, BrokenError) as error:
            raise store_error(error, operation, key) from None
