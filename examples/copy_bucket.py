"""Copy a tidemark repository from one place in S3 to another, or onto itself, as to re-encrypt it.

    python examples/copy_bucket.py s3://bucket/prefix s3://other/prefix

Stop every writer first. `repository` comes last: while it is missing nobody opens the copy, and its age says that
what is older was copied. Objects larger than 5 GiB, which tidemark never writes in one piece, need another tool.
"""

import sys
from urllib.parse import urlsplit

import botocore.session


def place(url: str) -> tuple[str, str]:
    """Split s3://bucket/prefix into the bucket and the prefix of its keys."""
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    return parts.netloc, f"{prefix}/" if prefix else ""


def main(source: str, target: str) -> None:
    """Copy every key, tags included."""
    client = botocore.session.get_session().create_client("s3")
    (bucket, prefix), (to_bucket, to_prefix) = place(source), place(target)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    keys = [entry["Key"].removeprefix(prefix) for page in pages for entry in page.get("Contents", ())]
    for key in sorted(keys, key=lambda key: (key == "repository", key)):
        copied = {"Bucket": bucket, "Key": prefix + key}
        # A copy onto itself has to change something: the metadata is written again.
        how = {"MetadataDirective": "REPLACE", "Metadata": client.head_object(**copied)["Metadata"]}
        client.copy_object(
            Bucket=to_bucket, Key=to_prefix + key, CopySource=copied, **(how if source == target else {})
        )
    print(f"copied {len(keys):,} keys")


if __name__ == "__main__":
    main(*sys.argv[1:])
