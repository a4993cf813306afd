"""What AWS asks its policies about a call: which actions, on which resources, with which keys to condition upon.

One call may ask for several: to create a fleet is to run instances, to tag what is made, and to hand the machines their
role. Written by the EC2, EventBridge Scheduler, IAM and S3 pages of AWS's Service Authorization Reference (read
2026-11-26 and 27); that a fleet asks for RunInstances and CreateTags by the policy that Karpenter's documentation gives
its controller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.box.iam import Asked
from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.ordering import Identity
from hetopt.backends.ec2.renter.request import Request, instance_types_of

_OF_OBJECTS = {
    "put_object": "s3:PutObject",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "delete_object": "s3:DeleteObject",
    "abort_object": "s3:AbortMultipartUpload",
}
_OF_BUCKETS = {
    "head_bucket": "s3:ListBucket",
    "list_objects_v2": "s3:ListBucket",
    "get_bucket_versioning": "s3:GetBucketVersioning",
    "get_bucket_lifecycle_configuration": "s3:GetLifecycleConfiguration",
    "get_object_lock_configuration": "s3:GetBucketObjectLockConfiguration",
}

_MADE = {
    "create_security_group": ("security-group",),
    "create_launch_template": ("launch-template",),
    "create_fleet": ("fleet",),
}
_COME_WITH_MACHINES = ("instance", "network-interface", "volume")
_MACHINES_NEED = ("security-group", "subnet")

_CHANGED = {
    "terminate_instances": ("instance", "InstanceIds"),
    "delete_launch_template": ("launch-template", "LaunchTemplateId"),
    "delete_security_group": ("security-group", "GroupId"),
    "delete_volume": ("volume", "VolumeId"),
    "authorize_security_group_ingress": ("security-group", "GroupId"),
    "authorize_security_group_egress": ("security-group", "GroupId"),
    "revoke_security_group_egress": ("security-group", "GroupId"),
}
"""What a call changes, and which of its parameters names it."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The caller and region of a call, and the tags of what it changes.

    Attributes:
        tags: tags, by key, of the resource that the call changes.
        role: name of the machines' role.
    """

    who: Identity
    region: str
    tags: Mapping[str, str]
    role: str

    def ec2(self, thing: str, name: str = "*") -> str:
        """Return the ARN of an EC2 resource; images belong to no account."""
        account = "" if thing == "image" else self.who.account_id
        return f"arn:aws:ec2:{self.region}:{account}:{thing}/{name}"

    @property
    def caller(self) -> dict[str, str]:
        """The condition keys of every call."""
        return {
            "aws:RequestedRegion": self.region,
            "aws:userid": self.who.user_id,
            "aws:PrincipalArn": self.who.arn,
        }


def authorizations(request: Request, place: Place) -> Iterator[Asked]:
    """Yield everything that a call asks policies for.

    Args:
        request: the call.
        place: who makes the call, and where.
    """
    operation, parameters, caller = request.operation, request.parameters, place.caller
    if operation in _OF_OBJECTS or operation in _OF_BUCKETS:
        stored = of_storage(request)
        yield replace(stored, context={**caller, **stored.context})
    elif request.service == "ssm":
        resource = f"arn:aws:ssm:{place.region}::parameter{parameters['Name']}"
        yield Asked(action=request.api_name, resource=resource, context=caller)
    elif request.service == "scheduler" and not request.reads_only:
        yield from _scheduling(request, place)
    elif operation in _CHANGED:
        thing, key = _CHANGED[operation]
        named = parameters[key]
        for name in [named] if isinstance(named, str) else named:
            owned = {f"aws:ResourceTag/{key}": value for key, value in place.tags.items()}
            yield Asked(action=request.api_name, resource=place.ec2(thing, str(name)), context={**caller, **owned})
    elif operation in _MADE or operation == "run_instances":
        yield from _making(request, place)
    else:
        service, _, name = request.api_name.partition(":")
        resource = _looked_at(request, place)
        yield Asked(action=f"{service.replace('-', '')}:{name}", resource=resource, context=caller)


def of_storage(request: Request) -> Asked:
    """Return the action and resource that a call on a bucket or object asks for, with the keys of its headers."""
    operation, parameters = request.operation, request.parameters
    bucket = f"arn:aws:s3:::{parameters['Bucket']}"
    context = {**facts.EVERY_CALL_OF_S3, **keys_of_headers(headers_of_s3(operation, parameters))}
    if operation in _OF_OBJECTS:
        return Asked(action=_OF_OBJECTS[operation], resource=f"{bucket}/{parameters['Key']}", context=context)
    prefix = {"s3:prefix": str(parameters["Prefix"])} if "Prefix" in parameters else {}
    return Asked(action=_OF_BUCKETS[operation], resource=bucket, context={**context, **prefix})


def keys_of_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the condition keys that policies may use of an S3 call's headers, with their values."""
    keys = {f"s3:{name.lower()}": value for name, value in headers.items()}
    return {key: value for key, value in keys.items() if key.startswith(facts.OF_HEADERS)}


def _looked_at(request: Request, place: Place) -> str:
    """Return the ARN that policies are asked about for a read-only call; ``*`` where its action takes none."""
    parameters, account_id = request.parameters, place.who.account_id
    match request.operation:
        case "get_role":
            return role_arn(account_id, str(parameters["RoleName"]))
        case "get_instance_profile":
            return f"arn:aws:iam::{account_id}:instance-profile/{parameters['InstanceProfileName']}"
        case "get_service_quota":
            return (
                f"arn:aws:servicequotas:{place.region}:{account_id}:"
                f"{parameters['ServiceCode']}/{parameters['QuotaCode']}"
            )
        case "list_tags_for_resource":
            return str(parameters["ResourceArn"])
    return "*"


def _scheduling(request: Request, place: Place) -> Iterator[Asked]:
    """Yield what a call on schedules asks for; schedules have no tags, their groups have."""
    name, here = str(request.parameters["Name"]), f"arn:aws:scheduler:{place.region}:{place.who.account_id}"
    if request.operation in ("create_schedule", "update_schedule"):
        schedule = f"{here}:schedule/{request.parameters['GroupName']}/{name}"
        yield Asked(action=request.api_name, resource=schedule, context=place.caller)
        target = request.parameters["Target"]
        passed = {**place.caller, "iam:PassedToService": facts.SCHEDULER_SERVICE}
        yield Asked(action="iam:PassRole", resource=str(target["RoleArn"]), context=passed)
    elif request.operation == "create_schedule_group":
        tags = {str(tag["Key"]): str(tag["Value"]) for tag in request.parameters.get("Tags", ())}
        tagged = {**place.caller, **_requested(tags)}
        for action in (request.api_name, "scheduler:TagResource"):
            yield Asked(action=action, resource=f"{here}:schedule-group/{name}", context=tagged)
    else:
        owned = {f"aws:ResourceTag/{key}": value for key, value in place.tags.items()}
        group = f"{here}:schedule-group/{name}"
        yield Asked(action=request.api_name, resource=group, context={**place.caller, **owned})
        yield Asked(action="scheduler:DeleteSchedule", resource=f"{here}:schedule/{name}/*", context=place.caller)


def _making(request: Request, place: Place) -> Iterator[Asked]:
    """Yield the authorizations of a call that makes resources: resources, their tags, and parts of rented machines."""
    tags = _tags_in(request)
    for thing in _MADE.get(request.operation, ()):
        context = {**place.caller, **_requested(tags.get(thing, {}))}
        yield Asked(action=request.api_name, resource=place.ec2(thing), context=context)
        if thing in tags:
            yield _tagging(request.api_name, thing, place, tags[thing])
    if request.operation == "create_security_group":
        resource = place.ec2("vpc", str(request.parameters.get("VpcId", "*")))
        yield Asked(action=request.api_name, resource=resource, context=place.caller)
    if request.operation in ("create_fleet", "run_instances"):
        yield from _renting(request, place, tags)


def _tags_in(request: Request) -> dict[str, dict[str, str]]:
    """Return the tags that a call asks for, by resource type."""
    return {
        str(specification["ResourceType"]): {str(tag["Key"]): str(tag["Value"]) for tag in specification["Tags"]}
        for specification in request.parameters.get("TagSpecifications", ())
    }


def _requested(tags: Mapping[str, str]) -> dict[str, str]:
    return {f"aws:RequestTag/{key}": value for key, value in tags.items()}


def _renting(request: Request, place: Place, tags: Mapping[str, Mapping[str, str]]) -> Iterator[Asked]:
    """Yield what a call that rents machines asks for: machines, what comes with them, their tags, their role."""
    types = instance_types_of(request) or [str(request.parameters["InstanceType"])]
    needed = [*_MACHINES_NEED, "image"]
    if request.operation == "create_fleet":
        needed.append("launch-template")
    for action in dict.fromkeys((request.api_name, "ec2:RunInstances")):
        for thing in _COME_WITH_MACHINES:
            tagged = {**place.caller, **_requested(tags.get(thing, {}))}
            for name in types if thing == "instance" else types[:1]:
                context = {**tagged, "ec2:InstanceType": name} if thing == "instance" else tagged
                yield Asked(action=action, resource=place.ec2(thing), context=context)
        for thing in needed:
            yield Asked(action=action, resource=place.ec2(thing), context=place.caller)
    for thing in _COME_WITH_MACHINES:
        if thing in tags:
            yield _tagging("ec2:RunInstances", thing, place, tags[thing])
    yield Asked(
        action="iam:PassRole",
        resource=role_arn(place.who.account_id, place.role),
        context={**place.caller, "iam:PassedToService": facts.MACHINES_SERVICE},
    )


def _tagging(by: str, thing: str, place: Place, tags: Mapping[str, str]) -> Asked:
    context = {**place.caller, **_requested(tags), "ec2:CreateAction": by.partition(":")[2]}
    return Asked(action="ec2:CreateTags", resource=place.ec2(thing), context=context)


def headers_of_s3(operation: str, parameters: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the headers that botocore writes for an S3 call; none for one that clients make in several calls."""
    model = _storage()
    name = "".join(word.capitalize() for word in operation.split("_"))
    if name not in model.operation_names:
        return {}
    from botocore.serialize import create_serializer

    serialized = create_serializer("rest-xml", include_validation=False).serialize_to_request(
        dict(parameters), model.operation_model(name)
    )
    headers: Mapping[str, str] = serialized["headers"]
    return headers


@cache
def _storage() -> Any:
    import botocore.session

    return botocore.session.get_session().get_service_model("s3")


def role_arn(account_id: str, name: str) -> str:
    """Return the ARN of a role without a path."""
    return f"arn:aws:iam::{account_id}:role/{name}"
