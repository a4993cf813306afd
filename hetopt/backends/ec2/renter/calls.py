"""The AWS calls that rent an order's machines, in sequence; `hetopt launch --dry-run` prints just these.

Everything is made by name or by token, so that the same call twice makes one thing.

Where the account has the role that `hetopt setup --print-policy` names, EventBridge Scheduler ends each machine that
neither its own timer, nor the lease, nor whoever follows the run reaches: at a deadline to boot (`order.UNPLACED_S`)
until the machine has its place, then at the lease's end and some slack (`order.outside_end_s`), which whoever follows
the run moves before the lease. Each machine has a schedule of its own, as one id that EC2 does not know would spare all
others of a call. A run's schedules are in one group, which is removed with it, and delete themselves once they ran.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.bootstrap import NodeConfig, user_data
from hetopt.backends.ec2.renter.order import UNPLACED_S, Order, Role, Zone, filters
from hetopt.backends.ec2.renter.request import Edge, Request, if_there, read
from hetopt.backends.host.protocol import Lease
from hetopt.core.budget_law import LEASE_OBJECT, PLACEMENT_OBJECT
from hetopt.core.errors import CloudRefused

END_ROLE = "hetopt-end"
"""Name of the role that EventBridge Scheduler ends machines in; see `hetopt setup`."""

NAMED = "hetopt-"
"""Beginning of the names of all groups of schedules."""

_TAIL = 48
"""Of a run's name, which ends in what makes it its own; what is left of the name's length counts lives."""


def prefix_of(run_id: str) -> str:
    """Return the prefix that all EventBridge schedule groups of a run share in their names: one group a resumption."""
    return f"{NAMED}{run_id[-_TAIL:]}."


def group_name(run_id: str, life: int) -> str:
    """Return the name of the EventBridge schedule group of a run that was resumed ``life`` times."""
    return f"{prefix_of(run_id)}{life}"


def end_role(edge: Edge) -> str | None:
    """Ask AWS for the ARN of the role by which its scheduler ends machines; None: there is none, or AWS refuses."""
    request = read("iam", "get_role", "whether machines have an end outside", RoleName=END_ROLE)
    try:
        answer = if_there(edge, request, (facts.NO_ROLE,))
    except CloudRefused:
        return None
    return None if answer is None else str(answer["Role"]["Arn"])


def group_call(order: Order) -> Request:
    """Return the call that creates the run's group of EventBridge schedules, with its tags: schedules have none."""
    return Request(
        step="schedule-group",
        service="scheduler",
        operation="create_schedule_group",
        parameters={"Name": group_name(order.run_id, order.life), "Tags": order.tags},
        purpose="for an end of each machine that stands on no machine",
        makes="schedule-group",
        tolerates=frozenset({facts.SCHEDULE_THERE}),
    )


def end_call(order: Order, instance_id: str, at_s: float, *, moves: bool = False) -> Request:
    """Return the call that schedules the end of a machine at ``at_s``, or, with ``moves``, moves a scheduled end.

    Args:
        order: order of the run, which has the scheduler's role.
        instance_id: id of the machine.
        at_s: when it ends, in seconds since the epoch.
        moves: whether its schedule is there already, for another time.

    Raises:
        AssertionError: the order has no role of the scheduler.
    """
    assert order.end_role is not None, "without the role nothing is scheduled"
    end = datetime.datetime.fromtimestamp(math.ceil(at_s), datetime.UTC)
    unless = "whatever it does" if moves else "unless it has its place by then"
    return Request(
        step=f"end-{instance_id}{'-later' if moves else ''}",
        service="scheduler",
        operation="update_schedule" if moves else "create_schedule",
        parameters={
            "Name": instance_id,
            "GroupName": group_name(order.run_id, order.life),
            "ScheduleExpression": f"at({end:%Y-%m-%dT%H:%M:%S})",
            "FlexibleTimeWindow": {"Mode": "OFF"},
            "ActionAfterCompletion": "DELETE",
            "Target": {
                "Arn": facts.SCHEDULED_END,
                "RoleArn": order.end_role,
                "Input": json.dumps({"InstanceIds": [instance_id]}),
            },
        },
        purpose=f"ends {instance_id} at {end:%Y-%m-%d %H:%M} UTC, {unless}",
        tolerates=facts.GONE if moves else frozenset({facts.SCHEDULE_THERE}),
    )


GROUP_STEP = "security-group"
"""Name of the step that makes the security group."""

_RUN_NAMESPACE = uuid.UUID("b1c1a5d8-0c1e-5a0b-9a86-6a3c9d1a7e55")
LIVES = 1_000_000
"""Attempts of one life of a run; those of the next must be no repetition of them."""


def client_token(run_id: str, step: str, attempt: int = 0) -> str:
    """Return the idempotency token of a step's call, the same in every process for the same run, step and attempt.

    Args:
        run_id: name of the run.
        step: name of the call within its sequence.
        attempt: number that tells repeated calls of a step apart.
    """
    return str(uuid.uuid5(_RUN_NAMESPACE, f"{run_id}/{step}/{attempt}"))


def launch_calls(order: Order, contents: Mapping[str, bytes], bundle: bytes) -> tuple[Request, ...]:
    """Return every AWS call of a launch in the order's first zone, in sequence, with placeholders for unknown ids.

    Args:
        order: what to rent.
        contents: objects of the run by their names under its prefix, such as plan.json.
        bundle: archive of the code.
    """
    zone, machines = order.zones[0], [f"machine-of-{host}" for role in order.roles for host in role.hosts]
    later = machines if order.end_role is not None else ()
    group, is_named = order.network.security_group or f"<GroupId of {GROUP_STEP}>", bool(order.network.security_group)
    templates = template_calls(order, group)
    template_ids = {kind: f"<LaunchTemplateId of {request.step}>" for kind, request in templates.items()}
    return (
        *object_calls(order, contents, bundle),
        *(() if is_named else (security_group_call(order, zone), *rule_calls(order, group))),
        *templates.values(),
        *(fleet_call(order, role, zone, template_ids[role.image_kind], attempt=0) for role in order.roles),
        *end_calls(order, machines, min(order.created_s + UNPLACED_S, order.outside_end_s())),
        addresses_call(order),
        *(end_call(order, id_, order.outside_end_s(), moves=True) for id_ in later),
        placement_call(order, b""),
    )


def object_calls(order: Order, contents: Mapping[str, bytes], bundle: bytes) -> tuple[Request, ...]:
    """Return the calls that write the bundle, a new lease, and ``contents`` by name, for machines to read at boot.

    The lease is new: that of an earlier life would end them.

    Args:
        order: what to rent.
        contents: objects of the run by their names under its prefix.
        bundle: archive of the code.
    """
    purpose = "what machines and your other terminals read of the run"
    end_s = order.created_s + order.lifetime_s
    return (
        put_object(
            order, "code", f"code/{order.bundle_sha256}.tar.gz", bundle, "the code that machines run, by its content"
        ),
        lease_call(order, end_s, end_s - order.checkpoint_s),
        *(
            put_object(order, f"object {name}", f"{order.prefix}/{name}", body, purpose)
            for name, body in contents.items()
        ),
    )


def put_object(order: Order, step: str, key: str, body: bytes, purpose: str) -> Request:
    """Return the call that writes ``body`` to ``key`` in the run's bucket, if that belongs to the order's account.

    Args:
        order: order of the run.
        step: name of the call in its sequence.
        key: key of the object.
        body: its contents.
        purpose: why, for the person who reads the list.
    """
    return Request(
        step=step,
        service="s3",
        operation="put_object",
        parameters={
            "Bucket": order.bucket,
            "Key": key,
            "Body": body,
            "ExpectedBucketOwner": order.account_id,
        },
        purpose=purpose,
        makes="object",
    )


def get_object(order: Order, key: str) -> Request:
    """Return the call that reads the object ``key`` from the run's bucket."""
    return Request(
        step=f"read {key}",
        service="s3",
        operation="get_object",
        parameters={"Bucket": order.bucket, "Key": key, "ExpectedBucketOwner": order.account_id},
        purpose="what the machines wrote",
    )


def security_group_call(order: Order, zone: Zone) -> Request:
    """Return the call that makes the run's security group, in the network of ``zone`` and of all zones of the order."""
    return Request(
        step=GROUP_STEP,
        service="ec2",
        operation="create_security_group",
        parameters={
            "GroupName": f"hetopt-{order.run_id}",
            "Description": "machines of one hetopt run, which talk to each other only",
            "VpcId": zone.vpc_id,
            "TagSpecifications": order.tagged("security-group"),
        },
        purpose="no way in: neither SSH nor the port that workers meet at is open to anybody else",
        makes="security-group",
    )


def rule_calls(order: Order, group: str) -> tuple[Request, ...]:
    """Return the calls that let machines of a security group reach each other, HTTPS and a proxy, and let nobody in.

    Args:
        order: order of the run, which may name a proxy.
        group: id of the security group.
    """
    itself = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    anywhere = {"CidrIp": "0.0.0.0/0"}
    ports = sorted({facts.HTTPS_PORT, *([int(order.network.proxy.rpartition(":")[2])] if order.network.proxy else [])})
    return (
        Request(
            step="group-ingress",
            service="ec2",
            operation="authorize_security_group_ingress",
            parameters={"GroupId": group, "IpPermissions": [itself]},
            purpose="the run's machines reach each other",
            tolerates=frozenset({facts.RULE_THERE}),
            passing=facts.NOT_KNOWN_YET,
        ),
        Request(
            step="group-egress",
            service="ec2",
            operation="authorize_security_group_egress",
            parameters={
                "GroupId": group,
                "IpPermissions": [
                    itself,
                    *(
                        {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": [anywhere]}
                        for port in ports
                    ),
                ],
            },
            purpose="out: to each other, and HTTPS for packages and S3",
            tolerates=frozenset({facts.RULE_THERE}),
            passing=facts.NOT_KNOWN_YET,
        ),
        Request(
            step="group-no-other-egress",
            service="ec2",
            operation="revoke_security_group_egress",
            parameters={"GroupId": group, "IpPermissions": [{"IpProtocol": "-1", "IpRanges": [anywhere]}]},
            purpose="nothing else goes out",
            tolerates=frozenset({facts.RULE_NOT_THERE}),
            passing=facts.NOT_KNOWN_YET,
        ),
    )


def template_calls(order: Order, group: str, *, generation: int = 0, end_s: float | None = None) -> dict[str, Request]:
    """Return the call that creates the launch template of each kind of boot image, by kind; machines end at ``end_s``.

    Args:
        order: what is rented.
        group: id of the machines' security group.
        generation: how often lost machines were asked for; machines of each time boot by templates of their own.
        end_s: when machines that boot by it end, in seconds since the epoch; None: when the order's lifetime ends.

    Raises:
        AssertionError: the order does not yet name a run (`Order.of_run`).
    """
    kinds = dict.fromkeys(role.image_kind for role in order.roles)
    end = order.created_s + order.lifetime_s if end_s is None else end_s
    return {kind: _template_call(order, kind, group, generation, end) for kind in kinds}


def _interface(order: Order, group: str) -> dict[str, Any]:
    """Return the security group as launch parameters; in a network interface where there is no public address."""
    if order.network.public_address:
        return {"SecurityGroupIds": [group]}
    interface = {"DeviceIndex": 0, "AssociatePublicIpAddress": False, "DeleteOnTermination": True, "Groups": [group]}
    return {"NetworkInterfaces": [interface]}


def machine_settings(order: Order, kind: str) -> dict[str, Any]:
    """Return the EC2 launch parameters of machines with a kind of boot image: image, role, disk, tags and so on.

    Args:
        order: what is rented.
        kind: kind of boot image, such as ``x86_64-gpu``.
    """
    image = order.images[kind]
    return {
        "ImageId": image.ami,
        "IamInstanceProfile": {"Name": order.instance_profile},
        # All that machines need of it: what a launch leaves out, defaults of the account say, and may be off.
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
            "InstanceMetadataTags": "enabled",
        },
        # A machine that starts again has nothing to do (`bootstrap`), and is paid until it has ended.
        "MaintenanceOptions": {"AutoRecovery": "disabled"},
        # The default is to stop, which leaves the volume on the bill.
        "InstanceInitiatedShutdownBehavior": "terminate",
        "BlockDeviceMappings": [
            {
                "DeviceName": image.root_device,
                "Ebs": {
                    "VolumeType": "gp3",
                    "VolumeSize": order.volume_gb,
                    "Encrypted": True,
                    "DeleteOnTermination": True,
                },
            }
        ],
        "TagSpecifications": order.tagged("instance", "network-interface", "volume"),
    }


def _template_call(order: Order, kind: str, group: str, generation: int, end_s: float) -> Request:
    """Return the call that creates the launch template of a kind of boot image; arguments as of `template_calls`."""
    assert order.spec_sha256 is not None, "an order of a run says what its machines are to run (`Order.of_run`)"
    step = f"template-{kind}"
    name = f"hetopt-{order.run_id}-{kind}" + (f"-g{generation}" if generation else "")
    script = user_data(
        NodeConfig(
            run_id=order.run_id,
            region=order.region,
            bucket=order.bucket,
            account_id=order.account_id,
            bundle_sha256=order.bundle_sha256,
            spec_sha256=order.spec_sha256,
            end_s=min(end_s, order.latest_end_s),
            latest_end_s=order.latest_end_s,
            has_gpu=kind.endswith("-gpu"),
            version=order.hetopt_version,
            group_secret=order.group_secret,
            proxy=order.network.proxy or "",
        )
    )
    data: dict[str, Any] = {
        **machine_settings(order, kind),
        **_interface(order, group),
        # botocore encodes user data of run_instances, but not of launch templates.
        "UserData": base64.b64encode(script.encode()).decode(),
    }
    return Request(
        step=step,
        service="ec2",
        operation="create_launch_template",
        parameters={
            "LaunchTemplateName": name,
            "ClientToken": client_token(order.run_id, step, order.life * LIVES + generation),
            "LaunchTemplateData": data,
            "TagSpecifications": order.tagged("launch-template"),
        },
        purpose=f"how {kind} machines boot: with an encrypted disk, which goes when they shut down",
        makes="launch-template",
        passing=facts.NOT_KNOWN_YET,
    )


def fleet_call(order: Order, role: Role, zone: Zone, template: str, *, attempt: int) -> Request:
    """Return the call that rents all machines of a role in a zone, or none.

    `MinTargetCapacity` is what makes it all or none. Whatever comes with a machine is tagged here as well as by the
    launch template: policies look at the tags of the call that makes a thing. Each spot type has a highest price, that
    which the run's budget affords: beyond it the run could not be paid to its end, and EC2 never bills more.

    Args:
        order: order of the run.
        role: types, number and market of the machines.
        zone: zone to rent in.
        template: id of the launch template.
        attempt: number of earlier tries, which makes another token.
    """
    spot = role.market == "spot"
    highest = {name: zone.worst_usd_per_hour(name, role.market) for name in zone.types(role)}
    types = [
        {"InstanceType": name, "SubnetId": zone.subnet_id, "Priority": float(place)}
        | ({"MaxPrice": f"{usd - order.extras_usd_per_hour:.6f}"} if spot else {})
        for place, (name, usd) in enumerate(highest.items())
    ]
    options = {
        "AllocationStrategy": "capacity-optimized-prioritized" if spot else "prioritized",
        "SingleAvailabilityZone": True,
        "MinTargetCapacity": role.machines,
    }
    return Request(
        step=f"fleet-{role.name}" + (f"-{attempt + 1}" if attempt else ""),
        service="ec2",
        operation="create_fleet",
        parameters={
            "Type": "instant",
            "ClientToken": client_token(order.run_id, f"fleet-{role.name}", order.life * LIVES + attempt),
            ("SpotOptions" if spot else "OnDemandOptions"): options,
            "LaunchTemplateConfigs": [
                {
                    "LaunchTemplateSpecification": {"LaunchTemplateId": template, "Version": "1"},
                    "Overrides": types,
                }
            ],
            "TargetCapacitySpecification": {
                "TotalTargetCapacity": role.machines,
                "DefaultTargetCapacityType": role.market,
            },
            "TagSpecifications": order.tagged("fleet", "instance", "network-interface", "volume"),
        },
        purpose=f"{role.machines} × {' or '.join(highest)}, {role.market}, in {zone.name}; all or none",
        makes="fleet",
        passing=frozenset({facts.TEMPLATE_NOT_KNOWN_YET}),
        usd_per_hour=role.machines * zone.usd_per_hour(zone.types(role)[0], role.market),
        worst_usd_per_hour=role.machines * max(highest.values()),
    )


def addresses_call(order: Order) -> Request:
    """Return the call that lists all machines of the run, with their states and addresses."""
    return Request(
        step="addresses",
        service="ec2",
        operation="describe_instances",
        parameters={"Filters": filters(order.run_id)},
        purpose="the machines' addresses, by which they meet",
        passing=frozenset({facts.MACHINES_NOT_KNOWN_YET}),
    )


def end_calls(order: Order, ids: Iterable[str], at_s: float) -> tuple[Request, ...]:
    """Return the calls that make a schedule group and end machines at ``at_s``; empty: the order has no role for it.

    Args:
        order: order of the run.
        ids: identifiers of the machines.
        at_s: when they end, in seconds since the epoch.
    """
    if order.end_role is None:
        return ()
    return (group_call(order), *(end_call(order, id_, at_s) for id_ in ids))


def placement_call(order: Order, body: bytes) -> Request:
    """Return the call that writes ``body``, the placement in JSON that tells each machine which host it is."""
    return put_object(
        order,
        "placement",
        f"{order.prefix}/{PLACEMENT_OBJECT}",
        body,
        "which machine is which host, and where all meet",
    )


def lease_call(order: Order, end_s: float, stop_training_s: float, *, over: str | None = None) -> Request:
    """Return the call that writes until when machines live and train.

    Args:
        order: order of the run.
        end_s: until when machines live, seconds since the epoch.
        stop_training_s: until when they train, seconds since the epoch; 0: they save a checkpoint and end.
        over: ETag of the lease that this one follows. Where another was written meanwhile, such as the wish that the
            run ends, from another terminal, that one stays and this one is refused. None: any lease is replaced.
    """
    lease = Lease(end_s=end_s, stop_training_s=stop_training_s)
    step, purpose = "lease", "until when the machines may live, by the budget"
    if lease.wishes_end:
        step, purpose = "stop", "the wish that the run ends, with a checkpoint"
    body = lease.model_dump_json(exclude_none=True).encode()
    request = put_object(order, step, f"{order.prefix}/{LEASE_OBJECT}", body, purpose)
    return request if over is None else replace(request, parameters={**request.parameters, "IfMatch": over})
