"""boto3's transfer manager, whose parts and threads are its own business."""

import boto3
from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore.config import Config

from benchmarks.peers.clients.job import Job, main, opened


def copy(job: Job) -> None:
    """The step."""
    if job.verb == "start":
        return
    client = boto3.client(
        "s3",
        endpoint_url=job.endpoint_url,
        region_name=job.region,
        aws_access_key_id=job.access_key,
        aws_secret_access_key=job.secret_key,
        config=Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=job.workers,
        ),
    )
    if job.verb == "open":
        client.list_objects_v2(Bucket=job.bucket, Prefix=job.key(""))
        return
    opened()
    config = TransferConfig(max_concurrency=job.workers, preferred_transfer_client="classic")
    with create_transfer_manager(client, config) as manager:
        if job.verb == "upload":
            done = [manager.upload(str(path), job.bucket, key) for key, path, _ in job.files()]
        else:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=job.bucket, Prefix=job.key(""))
            keys = [found["Key"] for page in pages for found in page.get("Contents", ())]
            done = [manager.download(job.bucket, key, str(job.target(key))) for key in keys]
        for future in done:
            future.result()


if __name__ == "__main__":
    main(copy)
