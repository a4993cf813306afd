"""What an administrator sets up once: what hetopt must be allowed, and no more, and the bucket that runs use.

Policies are data. Whatever is made must carry hetopt's tags in the call that makes it, and only what carries the
caller's own name can be removed. Machines have a role of their own, which reaches the bucket and
sees what spot costs, and nothing else.
(Condition keys: the EC2, IAM and S3 pages of AWS's Service Authorization Reference, 2026-11.)

All machines of an account share that role: the credentials of an instance profile take neither session policies nor
session tags, and a role for each run would need rights to make roles, which few people have (IAM user guide, "Session
policies" and "Session tags"; EC2 user guide, "IAM roles for Amazon EC2"; read 2026-11). So a run is kept from another
by its name, which ends in 64 random bits and is in no list that a machine may ask for: to list or name what a run
wrote, one must know it. And what steers machines is written by renters alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.bootstrap import WHEELS_FOLDER
from hetopt.backends.ec2.protocol import MODELS_FOLDER
from hetopt.backends.ec2.renter.account import role_arn
from hetopt.backends.ec2.renter.request import Request
from hetopt.backends.ec2.renter.scheduled_ends import END_ROLE, NAMED
from hetopt.backends.ec2.renter.tags import OWNER, RUN_ID
from hetopt.core.outputs import OUTPUT_FOLDER
from hetopt.core.run_folder import MODEL_NAMES

Policy = dict[str, Any]

MAKES = ("ec2:CreateFleet", "ec2:CreateLaunchTemplate", "ec2:CreateSecurityGroup", "ec2:RunInstances")
"""Creating a fleet asks for RunInstances too."""

_TAGGED_THINGS = ("fleet", "instance", "launch-template", "security-group", "volume")
_MADE_FROM = ("image", "launch-template", "network-interface", "security-group", "subnet")

_SCHEDULES = (f"schedule/{NAMED}*/*", f"schedule-group/{NAMED}*")

REMOVES = (
    "ec2:AuthorizeSecurityGroupEgress",
    "ec2:AuthorizeSecurityGroupIngress",
    "ec2:DeleteFleets",
    "ec2:DeleteLaunchTemplate",
    "ec2:DeleteSecurityGroup",
    "ec2:DeleteVolume",
    "ec2:RevokeSecurityGroupEgress",
    "ec2:TerminateInstances",
)


def operator_policy(*, account_id: str, region: str, bucket: str, role: str, types: Sequence[str] = ()) -> Policy:
    """What whoever launches may do, in one region.

    Args:
        account_id: whose account.
        region: the only one.
        bucket: that runs use.
        role: of the machines.
        types: only these instance types; empty: any.
    """
    everything = f"arn:aws:ec2:{region}:{account_id}"
    here = {"aws:RequestedRegion": region}
    only_types = {"StringEquals": {"ec2:InstanceType": list(types), **here}} if types else {"StringEquals": here}
    tagged = {"Null": {f"aws:RequestTag/{RUN_ID}": "false", f"aws:RequestTag/{OWNER}": "false"}}
    # A role's sessions are called 'ID:SESSION', and its profiles have a new one in every process: only the role's id is
    # in the tag. An id and no name, as GetCallerIdentity does not tell a role's path. (Any global key can stand
    # as a variable: IAM user guide, 'IAM policy elements: variables and tags', 2026-11.)
    owner = f"${{aws:ResourceTag/{OWNER}}}"
    mine = {"StringLike": {"aws:userid": [owner, f"{owner}:*"]}}
    schedules, group = (f"arn:aws:scheduler:{region}:{account_id}:{thing}" for thing in _SCHEDULES)
    return _policy(
        _statement("Look", sorted(facts.KNOW_NO_RESOURCE.value), ["*"]),
        _statement(
            "LookAtRoles",
            ["iam:GetInstanceProfile", "iam:GetRole"],
            [
                f"arn:aws:iam::{account_id}:instance-profile/{role}",
                *(role_arn(account_id, name) for name in (END_ROLE, *facts.SERVICE_ROLES.value)),
            ],
        ),
        _statement(
            "LookAtQuotas", ["servicequotas:GetServiceQuota"], [f"arn:aws:servicequotas:{region}:{account_id}:ec2/*"]
        ),
        _statement(
            "LookUpImages", ["ssm:GetParameter"], [f"arn:aws:ssm:{region}::parameter{facts.PUBLIC_PARAMETERS.value}"]
        ),
        _statement(
            "MakeWhatIsTagged",
            MAKES,
            [f"{everything}:{thing}/*" for thing in _TAGGED_THINGS if thing != "instance"],
            {"StringEquals": here, **tagged},
        ),
        _statement(
            "RentWhatIsTagged",
            ["ec2:CreateFleet", "ec2:RunInstances"],
            [f"{everything}:instance/*"],
            {**only_types, **tagged},
        ),
        _statement("GroupInNetwork", ["ec2:CreateSecurityGroup"], [f"{everything}:vpc/*"], {"StringEquals": here}),
        _statement(
            "RentFrom",
            ["ec2:CreateFleet", "ec2:RunInstances"],
            [
                f"arn:aws:ec2:{region}::{thing}/*" if thing == "image" else f"{everything}:{thing}/*"
                for thing in _MADE_FROM
            ],
            {"StringEquals": here},
        ),
        _statement(
            "TagWhatIsMade",
            ["ec2:CreateTags"],
            [f"{everything}:{thing}/*" for thing in (*_TAGGED_THINGS, "network-interface")],
            {"StringEquals": {"ec2:CreateAction": [name.partition(":")[2] for name in MAKES]}},
        ),
        _statement("RemoveWhatIsMine", REMOVES, [f"{everything}:{thing}/*" for thing in _TAGGED_THINGS], mine),
        _statement(
            "GiveMachinesTheirRole",
            ["iam:PassRole"],
            [role_arn(account_id, role)],
            {"StringEquals": {"iam:PassedToService": facts.MACHINES_SERVICE.value}},
        ),
        # A schedule has no tags: it is known by its group's name, which nobody can guess.
        _statement(
            "EndMachinesFromOutside",
            [f"scheduler:{verb}Schedule" for verb in ("Create", "Delete", "Update")],
            [schedules],
        ),
        _statement("GroupEnds", ["scheduler:CreateScheduleGroup", "scheduler:TagResource"], [group], tagged),
        _statement("LookAtEnds", ["scheduler:ListTagsForResource"], [group]),
        _statement("RemoveMyEnds", ["scheduler:DeleteScheduleGroup"], [group], mine),
        _statement(
            "GiveEndsTheirRole",
            ["iam:PassRole"],
            [role_arn(account_id, END_ROLE)],
            {"StringEquals": {"iam:PassedToService": facts.SCHEDULER_SERVICE.value}},
        ),
        _statement(
            "LookAtTheBucket",
            [
                "s3:GetBucketObjectLockConfiguration",
                "s3:GetBucketPolicy",
                "s3:GetBucketVersioning",
                "s3:GetLifecycleConfiguration",
            ],
            [f"arn:aws:s3:::{bucket}"],
        ),
        _statement("ListTheBucket", ["s3:ListBucket"], [f"arn:aws:s3:::{bucket}"]),
        _statement("UseTheBucket", ["s3:GetObject", "s3:PutObject"], [f"arn:aws:s3:::{bucket}/*"]),
    )


MACHINES_WRITE = ("boot/*", "ckpt/*", "events/*", "log/*", "outcome.json", "state/*")
"""Of a run's objects, the ones that its machines write."""
RENTERS_WRITE = ("lease.json", "order.json", "placement.json", "plan.json", "spec.json")
"""Those that steer machines, or whoever looks after them."""


def node_policy(*, bucket: str) -> Policy:
    """What machines may do: read code, data and their run, write what they have to tell, and see what spot costs. They
    end by shutting down.

    A list needs the whole name of a run: a prefix that matches ``runs/*/*`` has its name between the slashes.
    """
    here = f"arn:aws:s3:::{bucket}"
    return _policy(
        _statement("ListOneRun", ["s3:ListBucket"], [here], {"StringLike": {"s3:prefix": ["runs/*/*", "data/*"]}}),
        _statement("Read", ["s3:GetObject"], [f"{here}/{part}/*" for part in ("code", "data", "runs", WHEELS_FOLDER)]),
        _statement(
            "TellOfOneRun",
            ["s3:AbortMultipartUpload", "s3:PutObject"],
            [
                *(f"{here}/runs/*/{part}" for part in MACHINES_WRITE),
                f"{here}/{MODELS_FOLDER}/*/{MODEL_NAMES}",
                f"{here}/{MODELS_FOLDER}/*/{OUTPUT_FOLDER}/*",
                f"{here}/{WHEELS_FOLDER}/*",  # which are believed by their hashes alone
            ],
        ),
        # By what spot costs, machines know how long their budget lasts where nobody follows the run.
        _statement("SeePrices", ["ec2:DescribeSpotPriceHistory"], ["*"]),
        _statement("ForgetOldCheckpoints", ["s3:DeleteObject"], [f"{here}/runs/*/ckpt/*"]),
        # Also where an administrator has given the role more: a denial counts before whatever allows.
        {
            **_statement(
                "SteerNobody",
                ["s3:DeleteObject", "s3:PutObject"],
                [*(f"{here}/runs/*/{name}" for name in RENTERS_WRITE), f"{here}/code/*"],
            ),
            "Effect": "Deny",
        },
    )


def trust_policy() -> Policy:
    """Who may take the machines' role: machines."""
    return _taken_by(facts.MACHINES_SERVICE.value)


def end_policy(*, account_id: str) -> Policy:
    """What the role may do in which the scheduler ends machines: end what carries the tag of a run."""
    tagged = {"Null": {f"aws:ResourceTag/{RUN_ID}": "false"}}
    return _policy(
        _statement("EndMachines", ["ec2:TerminateInstances"], [f"arn:aws:ec2:*:{account_id}:instance/*"], tagged)
    )


def end_trust(*, account_id: str) -> Policy:
    """Who may take that role: the scheduler, for schedules of this account."""
    return _taken_by(facts.SCHEDULER_SERVICE.value, {"StringEquals": {"aws:SourceAccount": account_id}})


def _taken_by(service: str, condition: Policy | None = None) -> Policy:
    taken: Policy = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return {
        "Version": facts.POLICY_VERSION.value,
        "Statement": [taken if condition is None else {**taken, "Condition": condition}],
    }


def bucket_policy(bucket: str) -> Policy:
    """The bucket is spoken to over TLS only."""
    return {
        "Version": facts.POLICY_VERSION.value,
        "Statement": [
            {
                "Sid": "OnlyOverTls",
                "Effect": "Deny",
                "Principal": "*",
                "Action": "s3:*",
                "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
                "Condition": {"Bool": {"aws:SecureTransport": "false"}},
            }
        ],
    }


def give_policy(role: str) -> str:
    """Gives the machines' role its policy, also in the place of an older one."""
    return f"aws iam put-role-policy --role-name {role} --policy-name hetopt --policy-document file://node_policy.json"


def commands(role: str) -> list[str]:
    """What an administrator types once, with the policies in files of these names."""
    return [
        f"aws iam create-role --role-name {role} --assume-role-policy-document file://node_trust.json",
        give_policy(role),
        f"aws iam create-instance-profile --instance-profile-name {role}",
        f"aws iam add-role-to-instance-profile --instance-profile-name {role} --role-name {role}",
        f"aws iam create-role --role-name {END_ROLE} --assume-role-policy-document file://end_trust.json",
        f"aws iam put-role-policy --role-name {END_ROLE} --policy-name hetopt --policy-document file://end_policy.json",
        "aws iam create-policy --policy-name hetopt-operator --policy-document file://operator_policy.json",
        f"aws iam create-service-linked-role --aws-service-name {facts.SPOT_SERVICE.value}",
        f"aws iam create-service-linked-role --aws-service-name {facts.FLEET_SERVICE.value}",
    ]


def _policy(*statements: Policy) -> Policy:
    return {"Version": facts.POLICY_VERSION.value, "Statement": list(statements)}


def _statement(name: str, actions: Sequence[str], resources: Sequence[str], condition: Policy | None = None) -> Policy:
    statement: Policy = {"Sid": name, "Effect": "Allow", "Action": sorted(actions), "Resource": list(resources)}
    return {**statement, "Condition": condition} if condition else statement


KEPT_DAYS = 30
"""Checkpoints and states of runs; code is packed and wheels are left again when they are gone. Models, data stay."""


def bucket_calls(bucket: str, region: str, account_id: str) -> tuple[Request, ...]:
    """Make the bucket as it should be. Done twice, it is the same."""
    own = {"Bucket": bucket, "ExpectedBucketOwner": account_id}
    # Where buckets are when nothing is said must not be said.
    place = {} if region == facts.FIRST_REGION.value else {"CreateBucketConfiguration": {"LocationConstraint": region}}

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
    encrypted = {"Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]}
    return (
        call(
            "create_bucket",
            {"Bucket": bucket, **place},
            "where code, checkpoints and states of runs go",
            tolerates=frozenset({facts.BUCKET_IS_OURS.value}),
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
            f"runs, code and wheels go after {KEPT_DAYS} days; models and data stay",
        ),
    )
