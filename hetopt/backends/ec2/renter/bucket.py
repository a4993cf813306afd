"""The bucket that runs use: private, encrypted, over TLS only, and emptied of what is old."""

from __future__ import annotations

import json

from hetopt.backends.ec2.renter.permissions import bucket_policy
from hetopt.backends.ec2.renter.request import Request

KEPT_DAYS = 30
"""Checkpoints and states of runs; code is packed again when it is gone. Models and data stay."""


def bucket_calls(bucket: str, region: str, account_id: str) -> tuple[Request, ...]:
    """Make the bucket as it should be. Done twice, it is the same."""
    own = {"Bucket": bucket, "ExpectedBucketOwner": account_id}
    # us-east-1 is where buckets are when nothing is said, and must not be said.
    place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}

    def call(
        operation: str, parameters: dict[str, object], purpose: str, *, tolerates: frozenset[str] = frozenset()
    ) -> Request:
        return Request(
            step=operation.replace("_", "-"),
            service="s3",
            operation=operation,
            parameters=parameters,
            purpose=purpose,
            tolerates=tolerates,
        )

    public = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    rule = {
        "ID": "hetopt",
        "Status": "Enabled",
        "Filter": {"Prefix": ""},
        "Expiration": {"Days": KEPT_DAYS},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    }
    runs = [{**rule, "ID": f"hetopt-{part}", "Filter": {"Prefix": f"{part}/"}} for part in ("runs", "code")]
    encrypted = {"Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]}
    return (
        call(
            "create_bucket",
            {"Bucket": bucket, **place},
            "where code, checkpoints and states of runs go",
            tolerates=frozenset({"BucketAlreadyOwnedByYou"}),
        ),
        call(
            "put_public_access_block",
            {**own, "PublicAccessBlockConfiguration": dict.fromkeys(public, True)},
            "nobody outside the account reads it",
        ),
        call("put_bucket_encryption", {**own, "ServerSideEncryptionConfiguration": encrypted}, "encrypted at rest"),
        call("put_bucket_policy", {**own, "Policy": json.dumps(bucket_policy(bucket))}, "over TLS only"),
        call(
            "put_bucket_lifecycle_configuration",
            {**own, "LifecycleConfiguration": {"Rules": runs}},
            f"runs and code go after {KEPT_DAYS} days; models and data stay",
        ),
    )
