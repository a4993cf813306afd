"""What must be asked before an order can be written: whose account it is, zones with the types, images, prices.

Machines boot Amazon Linux 2023 everywhere, with NVIDIA's driver where there is a GPU. The ids of images are looked up
by public parameters that Amazon keeps: the newest image, in any region. A region without the parameter is asked for the
newest image of that name. Both have Python 3.12 and the AWS command line, which booting relies on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.errors import ApiRefused, if_there
from hetopt.backends.ec2.renter.order import BootImage, Rate, Role, Zone, usd_per_hour
from hetopt.backends.ec2.renter.request import Answer, Edge, read
from hetopt.backends.ec2.renter.spot_pools import newest_prices, price_request
from hetopt.core.errors import BadInput, CloudRefused, setting
from hetopt.core.paths import BUCKET_PATTERN, is_name, shown
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.instance_type import InstanceType
from hetopt.optimizer.market.software import pinned

MAKE_SUBNETS = "make the default network, `aws ec2 create-default-vpc`, or name `subnets`"

ImageKind = str
"""Architecture and accelerator, such as 'x86_64-cpu' or 'arm64-gpu'."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """Where images of a kind are found.

    Attributes:
        parameter: of the Systems Manager, which holds the id of the newest.
        name: what their names look like, where there is no such parameter.
    """

    parameter: str
    name: str


def _image_of(architecture: str, *, gpu: bool) -> Image:
    if gpu:
        return Image(
            parameter=facts.GPU_PARAMETER.value.format(architecture=architecture),
            name=facts.GPU_NAMES.value[architecture],
        )
    return Image(
        parameter=facts.CPU_PARAMETER.value.format(architecture=architecture),
        name=facts.CPU_NAME.value.format(architecture=architecture),
    )


IMAGES: dict[ImageKind, Image] = {
    f"{architecture}-{'gpu' if gpu else 'cpu'}": _image_of(architecture, gpu=gpu)
    for gpu in (False, True)
    for architecture in facts.GPU_NAMES.value
}


def architecture_of(kind: ImageKind) -> str:
    """The processor architecture of an image, as EC2 spells it."""
    return kind.rpartition("-")[0]


def image_kind(found: InstanceType) -> ImageKind:
    """The kind of image that a type boots.

    Raises:
        BadInput: its accelerator is not one that torch or the image drives, or its architecture is not known.
    """
    if found.architecture is None:
        raise BadInput(f"the architecture of {found.name} is not known.", hint="plan with other types")
    if found.accelerator is not None and not found.accelerator.is_cuda:
        raise BadInput(
            f"{found.name} has a {found.accelerator.name}, which hetopt cannot train on.",
            hint=f"plan without it: `hetopt recommend PROFILE --exclude {found.name}`",
        )
    objection = pinned().objection(found)
    if objection is not None:
        raise BadInput(
            f"{found.name} cannot be trained on: its {objection}.",
            hint=f"plan without it: `hetopt recommend PROFILE --exclude {found.name}`",
        )
    return f"{found.architecture}-{'gpu' if found.cuda_devices else 'cpu'}"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The AWS identity that calls are made with, as STS tells it."""

    account_id: str
    arn: str
    user_id: str

    @property
    def owner(self) -> str:
        """What stands in the tags of what they rent, and is the same in every process.

        A role's session is called by the role's id and a name of its own, which profiles make anew in each process.
        """
        return self.user_id.partition(":")[0] if ":assumed-role/" in self.arn else self.user_id


def identity(edge: Edge) -> Identity:
    """Who these credentials belong to. Needs no permission, so whatever is refused here is about the credentials."""
    answer = edge(read("sts", "get_caller_identity", "whose credentials these are"))
    return Identity(account_id=answer["Account"], arn=answer["Arn"], user_id=answer["UserId"])


def role_arn(account_id: str, name: str) -> str:
    """The ARN of a role by its name: a service's own has a path, others are taken to have none."""
    service = facts.SERVICE_ROLES.value.get(name)
    return f"arn:aws:iam::{account_id}:role/{name if service is None else f'aws-service-role/{service}/{name}'}"


def regions(edge: Edge) -> list[str]:
    """Every region that the account can use."""
    answer = edge(read("ec2", "describe_regions", "which regions the account can use"))
    return sorted(str(one["RegionName"]) for one in answer["Regions"])


def check_bucket_name(bucket: str) -> None:
    """Refuse what no bucket can be called.

    Raises:
        BadInput: it is such a name.
    """
    if not is_name(BUCKET_PATTERN, bucket):
        raise BadInput(
            f"`bucket` must be 3 to 63 small letters, digits, dots and dashes, got {shown(bucket)}.",
            hint="no bucket can have another name: correct it, or leave it out to use the account's usual one",
        )


def check_bucket(edge: Edge, bucket: str, account_id: str, region: str) -> None:
    """Make sure that the bucket exists, belongs to this account and is where its machines are.

    botocore goes wherever a bucket is; machines would, too, and pay for each gigabyte between regions.

    Raises:
        CloudRefused: it does not.
        BadInput: none can be called so.
    """
    check_bucket_name(bucket)
    told = edge(
        read(
            "s3",
            "head_bucket",
            "the bucket is there, and is this account's own",
            Bucket=bucket,
            ExpectedBucketOwner=account_id,
        )
    )
    where = told.get("BucketRegion") or region
    if where != region:
        raise CloudRefused(
            f"the bucket {bucket} is in {where}, and the machines are in {region}.",
            hint=f"make one there: `hetopt setup --create-bucket --region {region}`, or name another `bucket`",
        )


def default_bucket(account_id: str, region: str) -> str:
    """The name of the bucket where none is named: one for each account and region."""
    return f"hetopt-{account_id}-{region}"


def boot_images(
    edge: Edge, kinds: Iterable[str], chosen: Mapping[str, str] | None = None, *, volume_gb: int
) -> dict[str, BootImage]:
    """The newest image for each kind of machine, or the one that was chosen for it.

    Args:
        edge: carries out calls.
        kinds: of machines.
        chosen: images by kind, instead of the newest.
        volume_gb: of the disk that machines boot from.

    Raises:
        CloudRefused: there is no such image.
        BadInput: the one that was chosen does not fit.
    """
    return {kind: boot_image(edge, kind, (chosen or {}).get(kind), volume_gb) for kind in dict.fromkeys(kinds)}


def boot_image(edge: Edge, kind: str, chosen: str | None, volume_gb: int) -> BootImage:
    """The image of one kind of machine, with the name of its root device, which its disk must be mapped by.

    Args:
        edge: carries out calls.
        kind: of machine.
        chosen: an image's id; absent: the newest.
        volume_gb: of the disk that machines boot from.

    Raises:
        CloudRefused: there is no such image.
        BadInput: it does not fit the machines or their disk.
    """
    image = _described(edge, kind, chosen) if chosen is not None else _newest(edge, kind)
    id_, architecture = str(image["ImageId"]), image.get("Architecture", architecture_of(kind))
    if architecture != architecture_of(kind):
        raise BadInput(
            f"the image {id_} is for {architecture}, and {kind} machines need one for {architecture_of(kind)}.",
            hint=f"name another: {setting('images', {kind: 'AMI'})}, or leave `images` out to take Amazon's newest",
        )
    root = str(image.get("RootDeviceName") or facts.ROOT_DEVICE.value)
    disks = image.get("BlockDeviceMappings", ())
    stay = [one["DeviceName"] for one in disks if one.get("Ebs", {}).get("DeleteOnTermination") is False]
    if others := [name for name in stay if name != root]:
        raise BadInput(
            f"the image {id_} brings {', '.join(others)}, which stays, and is paid for, when its machine has ended.",
            hint="make an image whose disks go with their machine (DeleteOnTermination), or leave "
            f"{setting('images', {kind: id_})} out to take Amazon's newest",
        )
    sizes = [disk.get("Ebs", {}).get("VolumeSize", 0) for disk in disks]
    if max(sizes, default=0) > volume_gb:
        raise BadInput(
            f"the image {id_} needs a disk of {max(sizes)} GB, and machines get one of {volume_gb} GB.",
            hint=f"plan with a larger one: `hetopt recommend PROFILE --disk {max(sizes)}`, or name a smaller image: "
            f"{setting('images', {kind: 'AMI'})}",
        )
    return BootImage(ami=id_, root_device=root)


def _newest(edge: Edge, kind: str) -> Answer:
    """What the public parameter names; where the region has no such parameter, the newest image of that name."""
    image = IMAGES[kind]
    parameter = read("ssm", "get_parameter", f"the newest image for {kind} machines", Name=image.parameter)
    try:
        return _described(edge, kind, str(edge(parameter)["Parameter"]["Value"]))
    except ApiRefused as refused:
        if refused.code != facts.NO_PARAMETER.value:
            raise
    filters = {"name": image.name, "state": "available", "architecture": architecture_of(kind)}
    named = read(
        "ec2",
        "describe_images",
        f"the newest image for {kind} machines, by its name",
        Owners=[facts.IMAGE_OWNER.value],
        Filters=[{"Name": name, "Values": [value]} for name, value in filters.items()],
    )
    found = sorted(edge(named)["Images"], key=lambda one: str(one.get("CreationDate", "")))
    if not found:
        raise CloudRefused(
            f"this region has no image for {kind} machines: neither the parameter {image.parameter} nor an image of "
            f"Amazon's called '{image.name}'.",
            hint=f"name one: {setting('images', {kind: 'AMI'})}, or plan for another region",
        )
    newest: Answer = found[-1]
    return newest


def _described(edge: Edge, kind: str, ami: str) -> Answer:
    request = read(
        "ec2",
        "describe_images",
        f"the architecture and the root device of the image for {kind} machines",
        ImageIds=[ami],
    )
    found: Sequence[Answer] = edge(request)["Images"]
    if not found:
        raise CloudRefused(
            f"this account sees no image {ami} for {kind} machines in this region.",
            hint=f"name another, {setting('images', {kind: 'AMI'})}, or none to take Amazon's newest; where the "
            "account allows some alone, `aws ec2 get-allowed-images-settings` tells which",
        )
    return found[0]


def zones_for(
    edge: Edge, roles: Sequence[Role], catalog: Catalog, extras_usd: float, now_s: float, named: Sequence[str] = ()
) -> tuple[Zone, ...]:
    """The zones that have every type and a subnet, the cheapest first at the prices of this moment.

    All machines go into one zone: what workers send each other costs $0.02 a GB between zones, and takes longer.

    Args:
        edge: carries out calls.
        roles: the machines.
        catalog: of the region.
        extras_usd: an hour of what comes with a machine.
        now_s: seconds since the epoch.
        named: subnets that machines may be in; none: the default ones.

    Raises:
        CloudRefused: there is no such zone.
        BadInput: a type has no on-demand price, so that its worst case is not known; or subnets of several networks.
    """
    names = list(dict.fromkeys(name for role in roles for name in role.instance_types))
    offerings = read(
        "ec2",
        "describe_instance_type_offerings",
        "which zones have the types",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": names}],
    )
    offered = _offered(edge(offerings)["InstanceTypeOfferings"])
    machines = sum(role.machines for role in roles)
    open_ = [one for one in subnets_of(edge, named) if one.get("State") == "available"]
    # Of several in a zone the one with most room.
    roomy = sorted((one for one in open_ if _room(one) >= machines), key=_room)
    if open_ and not roomy:
        raise CloudRefused(
            f"no subnet has {machines} free addresses, one a machine; the most are {max(map(_room, open_)):.0f}.",
            hint="name larger `subnets`, or remove what is left over with `hetopt gc --on ec2`",
        )
    subnets = {one["AvailabilityZone"]: one for one in roomy}
    spot = newest_prices(edge(price_request(names, now_s)))
    zones = []
    for zone in sorted(set.intersection(*(offered.get(name, set()) for name in names)) & set(subnets)):
        subnet = subnets[zone]
        rates: dict[str, Rate] = {}
        for role in roles:
            for name in role.instance_types:
                rates[name] = _rate(
                    catalog, name, spot.get((zone, name)) if role.market == "spot" else None, extras_usd
                )
        zones.append(
            Zone(
                name=zone,
                zone_id=subnet.get("AvailabilityZoneId", zone),
                subnet_id=subnet["SubnetId"],
                vpc_id=subnet["VpcId"],
                rates=rates,
            )
        )
    if not zones:
        raise _no_zone(names, offered, subnets, named)
    return tuple(sorted(zones, key=partial(usd_per_hour, roles)))


def _room(subnet: Answer) -> float:
    """Its free addresses, where that is told."""
    return float(subnet.get("AvailableIpAddressCount", math.inf))


def _rate(catalog: Catalog, name: str, spot: float | None, extras_usd: float) -> Rate:
    on_demand = catalog.price(name, "on-demand")
    if on_demand is None:
        raise BadInput(
            f"the on-demand price of {name} in {catalog.region} is not known, so the worst case cannot be bounded.",
            hint=f"read the region's prices, without an account: `hetopt catalog refresh --region {catalog.region}`",
        )
    worst = max(on_demand.usd_per_hour, spot or 0.0)
    return Rate(
        usd_per_hour=(on_demand.usd_per_hour if spot is None else spot) + extras_usd,
        worst_usd_per_hour=worst + extras_usd,
    )


def _no_zone(
    names: Sequence[str], offered: Mapping[str, set[str]], subnets: Mapping[str, Any], named: Sequence[str]
) -> CloudRefused:
    if not subnets and named:
        return CloudRefused("none of the subnets is available.", hint="name other `subnets`")
    if not subnets:
        return CloudRefused("the region has no default subnet to put machines in.", hint=MAKE_SUBNETS)
    without = "plan again with `hetopt recommend PROFILE --exclude TYPE`"
    absent = [name for name in names if not offered.get(name)]
    if absent:
        return CloudRefused(f"{', '.join(absent)} cannot be rented in this region.", hint=without)
    where = "one of the subnets" if named else "a default subnet"
    return CloudRefused(f"no zone of the region has all of {', '.join(names)} and {where}.", hint=without)


def subnets_of(edge: Edge, named: Sequence[str]) -> list[Answer]:
    """The subnets that were named, or else the region's default ones.

    Raises:
        CloudRefused: one of them is not there.
        BadInput: they are in several networks, and a security group is in one; or have prices of their own, or no
            addresses of IPv4.
    """
    if not named:
        return default_subnets(edge)
    asked = read("ec2", "describe_subnets", "the subnets that were named", SubnetIds=list(named))
    answer = if_there(edge, asked, facts.NO_SUBNET.value)
    if answer is None:
        raise CloudRefused(
            f"not all of the subnets {', '.join(named)} are in this region.",
            hint="`aws ec2 describe-subnets` lists them: name others, or leave `subnets` out to take the default ones",
        )
    found = list(answer["Subnets"])
    networks = sorted({str(one["VpcId"]) for one in found})
    if len(networks) > 1:
        raise BadInput(
            f"the subnets are in several networks: {', '.join(networks)}.", hint="name `subnets` of one network"
        )
    for one in found:
        if one.get("Ipv6Native"):
            raise BadInput(
                f"the subnet {one['SubnetId']} has addresses of IPv6 alone, and machines reach each other by IPv4.",
                hint="name `subnets` that have IPv4, or leave `subnets` out",
            )
    _check_kinds(edge, found)
    _check_tenancy(edge, networks[0])
    return found


def _check_kinds(edge: Edge, subnets: Sequence[Answer]) -> None:
    """Make sure that subnets are in the region itself: in other places its prices bound no bill.

    Raises:
        BadInput: one of them is elsewhere.
    """
    zones = edge(read("ec2", "describe_availability_zones", "whether the subnets are in the region itself"))
    kinds = {str(one["ZoneName"]): str(one.get("ZoneType", "")) for one in zones["AvailabilityZones"]}
    for one in subnets:
        kind = kinds.get(str(one["AvailabilityZone"]), facts.USUAL_ZONE.value)
        if "OutpostArn" in one or kind != facts.USUAL_ZONE.value:
            where = "on an Outpost" if "OutpostArn" in one else f"in {one['AvailabilityZone']}, a {kind}"
            raise BadInput(
                f"the subnet {one['SubnetId']} is {where}: types, prices and spot machines there are not the region's.",
                hint="name `subnets` in availability zones of the region, or leave `subnets` out",
            )


def _check_tenancy(edge: Edge, network: str) -> None:
    """Make sure that machines of a network cost what machines cost. A default network's always do.

    Raises:
        BadInput: each of them has hardware of its own, whatever it asks for.
    """
    asked = read("ec2", "describe_vpcs", "whether machines cost there what they cost", VpcIds=[network])
    [found] = edge(asked)["Vpcs"]
    if found["InstanceTenancy"] != facts.SHARED_HARDWARE.value:
        share = f"aws ec2 modify-vpc-tenancy --vpc-id {network} --instance-tenancy {facts.SHARED_HARDWARE.value}"
        raise BadInput(
            f"machines in the network {network} have hardware of their own ({found['InstanceTenancy']} tenancy), which "
            "costs more than any price here, and $2 an hour for the region.",
            hint=f"`{share}` has new machines share it; or name `subnets` of another network",
        )


def check_group(edge: Edge, group: str, vpc_id: str) -> None:
    """Make sure that a security group is in the machines' network, and lets them reach each other.

    Raises:
        CloudRefused: it does not.
    """
    asked = read("ec2", "describe_security_groups", "the group of the machines", GroupIds=[group])
    answer = if_there(edge, asked, facts.NOT_KNOWN_YET.value)
    if answer is None:
        raise CloudRefused(
            f"there is no security group {group} in this region.",
            hint="`aws ec2 describe-security-groups` lists them: name another, or leave `security_group` out",
        )
    [found] = answer["SecurityGroups"]
    if found["VpcId"] != vpc_id:
        raise CloudRefused(
            f"the security group {group} is in the network {found['VpcId']}, and the machines are in {vpc_id}.",
            hint="name a `security_group` of that network, or `subnets` of the group's",
        )
    opens = [
        pair["GroupId"]
        for rule in found.get("IpPermissions", ())
        if rule.get("IpProtocol") == facts.ALL_PROTOCOLS.value
        for pair in rule.get("UserIdGroupPairs", ())
    ]
    if group not in opens:
        raise CloudRefused(
            f"the security group {group} does not let its machines reach each other on every port.",
            hint=f"`aws ec2 authorize-security-group-ingress --group-id {group} --protocol {facts.ALL_PROTOCOLS.value} "
            f"--source-group {group}`",
        )


def default_subnets(edge: Edge) -> list[Answer]:
    """The region's default subnets, one in each zone that has one."""
    filters = [{"Name": facts.DEFAULT_SUBNETS.value, "Values": ["true"]}]
    return list(edge(read("ec2", "describe_subnets", "the default subnet of each zone", Filters=filters))["Subnets"])


def _offered(offerings: Iterable[Answer]) -> dict[str, set[str]]:
    offered: dict[str, set[str]] = {}
    for found in offerings:
        offered.setdefault(found["InstanceType"], set()).add(found["Location"])
    return offered
