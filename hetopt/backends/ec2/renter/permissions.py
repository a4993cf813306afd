"""What an administrator sets up once: what hetopt must be allowed, and no more, and the bucket that runs use.

Policies are data: ``policies.json``. Whatever is made must carry hetopt's tags in the call that makes it, and only what
carries the caller's own name can be removed: the id of a role alone, as its sessions are called 'ID:SESSION' and have a
new name in every process. Machines have a role of their own, which reaches the bucket and sees what spot costs, and
nothing else.

All machines of an account share that role: the credentials of an instance profile take neither session policies nor
session tags, and a role for each run would need rights to make roles, which few people have (IAM user guide, "Session
policies" and "Session tags"; EC2 user guide, "IAM roles for Amazon EC2"; read 2026-11). So a run is kept from another
by its name, which ends in 64 random bits and is in no list that a machine may ask for: to list or name what a run
wrote, one must know it. And what steers machines is written by renters alone: that is denied to machines, which counts
before whatever an administrator allows their role beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.bootstrap import WHEELS_FOLDER
from hetopt.backends.ec2.renter.calls import END_ROLE
from hetopt.backends.ec2.renter.request import Request

Policy = dict[str, Any]

POLICIES = ("operator_policy", "node_trust", "node_policy", "end_trust", "end_policy")
"""Of whoever launches; of machines and who may take their role; of the scheduler's role that ends machines."""


def policy(name: str, *, types: Sequence[str] = (), **names: str) -> Policy:
    """Return a policy of ``policies.json`` for an account.

    Args:
        name: one of `POLICIES`, or ``bucket_policy``.
        types: the only instance types that may be rented; empty: any.
        names: ``account``, ``region``, ``bucket`` and ``role``, as far as the policy names them.
    """
    text = json.dumps(json.loads(Path(__file__).with_name("policies.json").read_text(encoding="utf-8"))[name])
    filled: Policy = json.loads(re.sub(r"@(account|region|bucket|role)@", lambda found: names[found[1]], text))
    for statement in filled["Statement"] if types else ():
        if statement.get("Sid") == "RentWhatIsTagged":
            statement["Condition"]["StringEquals"]["ec2:InstanceType"] = list(types)
    return filled


def commands(role: str) -> list[str]:
    """What an administrator types once, with the policies in files of these names."""
    return [
        f"aws iam create-role --role-name {role} --assume-role-policy-document file://node_trust.json",
        f"aws iam put-role-policy --role-name {role} --policy-name hetopt --policy-document file://node_policy.json",
        f"aws iam create-instance-profile --instance-profile-name {role}",
        f"aws iam add-role-to-instance-profile --instance-profile-name {role} --role-name {role}",
        f"aws iam create-role --role-name {END_ROLE} --assume-role-policy-document file://end_trust.json",
        f"aws iam put-role-policy --role-name {END_ROLE} --policy-name hetopt --policy-document file://end_policy.json",
        "aws iam create-policy --policy-name hetopt-operator --policy-document file://operator_policy.json",
        f"aws iam create-service-linked-role --aws-service-name {facts.SPOT_SERVICE}",
        f"aws iam create-service-linked-role --aws-service-name {facts.FLEET_SERVICE}",
    ]


KEPT_DAYS = 30
"""Checkpoints and states of runs; code is packed and wheels are left again when they are gone. Models, data stay."""


def bucket_calls(bucket: str, region: str, account_id: str) -> tuple[Request, ...]:
    """Make the bucket as it should be. Done twice, it is the same."""
    own = {"Bucket": bucket, "ExpectedBucketOwner": account_id}
    # Where buckets are when nothing is said must not be said.
    place = {} if region == facts.FIRST_REGION else {"CreateBucketConfiguration": {"LocationConstraint": region}}

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
        # For buckets that keep versions: theirs would stay for ever.
        "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    }
    runs = [
        {**rule, "ID": f"hetopt-{part}", "Filter": {"Prefix": f"{part}/"}} for part in ("runs", "code", WHEELS_FOLDER)
    ]
    over_tls = json.dumps(policy("bucket_policy", bucket=bucket))
    encrypted = {"Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]}
    return (
        call(
            "create_bucket",
            {"Bucket": bucket, **place},
            "where code, checkpoints and states of runs go",
            tolerates=frozenset({facts.BUCKET_IS_OURS}),
        ),
        call(
            "put_public_access_block",
            {**own, "PublicAccessBlockConfiguration": dict.fromkeys(public, True)},
            "nobody outside the account reads it",
        ),
        call("put_bucket_encryption", {**own, "ServerSideEncryptionConfiguration": encrypted}, "encrypted at rest"),
        call("put_bucket_policy", {**own, "Policy": over_tls}, "over TLS only"),
        call(
            "put_bucket_lifecycle_configuration",
            {**own, "LifecycleConfiguration": {"Rules": runs}},
            f"runs, code and wheels go after {KEPT_DAYS} days; models and data stay",
        ),
    )
