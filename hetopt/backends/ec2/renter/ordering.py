"""Writes an order from a plan: which machines, where, by which images, for how long at most, at present prices.

Machines boot Amazon Linux 2023 everywhere, with NVIDIA's driver where there is a GPU. The ids of images are looked up
by public parameters that Amazon keeps: the newest image, in any region. Both have Python 3.12 and the AWS command line,
which booting relies on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter import calls
from hetopt.backends.ec2.renter.order import (
    UNPLACED_S,
    BootImage,
    Network,
    Order,
    Rate,
    Role,
    Zone,
    changes_of,
    lifetime_s,
    price_request,
    usd_per_hour,
    with_highest_prices,
    worst_usd_per_hour,
)
from hetopt.backends.ec2.renter.request import Answer, Edge, if_there, read
from hetopt.backends.options import IMAGE_KINDS, Ec2
from hetopt.core.budget_law import SECONDS_PER_HOUR, SHUTDOWN_S
from hetopt.core.errors import BadInput, BudgetStop, CloudRefused, setting
from hetopt.core.formatting import usd
from hetopt.core.listening import new_secret
from hetopt.core.paths import BUCKET_PATTERN, is_name, shown
from hetopt.optimizer.cost.bill import Billing, extras_usd_per_hour, fixed_usd, least_budget_usd, load_billing
from hetopt.optimizer.cost.cost import checkpoint_bytes, checkpoint_time_s
from hetopt.optimizer.cost.provisioning import provisioning_facts
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.market.instance_type import InstanceType, pinned
from hetopt.optimizer.plan import AWS, Plan, cloud_of

MAKE_SUBNETS = "make the default network, `aws ec2 create-default-vpc`, or name `subnets`"

IMAGES = {
    kind: (facts.GPU_PARAMETER if kind.endswith("-gpu") else facts.CPU_PARAMETER).format(
        architecture=kind.partition("-")[0]
    )
    for kind in IMAGE_KINDS
}
"""Public parameter that holds the id of the newest image, by kind of machine."""


def image_kind(rented: InstanceType) -> str:
    """Return the kind of boot image of an instance type, such as ``x86_64-gpu``.

    Raises:
        BadInput: the type cannot train: its accelerator is not one that torch or the image drives, or its architecture
            is not known.
    """
    objection = "architecture is not known" if rented.architecture is None else pinned().objection(rented)
    if rented.accelerator is not None and not rented.accelerator.is_cuda:
        objection = f"{rented.accelerator.name} is one that hetopt cannot train on"
    if objection is not None:
        raise BadInput(
            f"{rented.name} cannot be trained on: its {objection}.",
            hint=f"plan without it: `hetopt recommend PROFILE --exclude {rented.name}`",
        )
    return f"{rented.architecture}-{'gpu' if rented.cuda_devices else 'cpu'}"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The AWS account and caller of the credentials in use, as STS tells them.

    Attributes:
        account_id: number of the account.
        arn: name of the caller.
        user_id: id of the caller; of a role's session, 'ID:SESSION'.
    """

    account_id: str
    arn: str
    user_id: str

    @property
    def owner(self) -> str:
        """The id of the caller in the tags of rented resources, the same in every process.

        A role's session is called by the role's id and a name of its own, which profiles make anew in each process.
        """
        return self.user_id.partition(":")[0] if ":assumed-role/" in self.arn else self.user_id


def identity(edge: Edge) -> Identity:
    """Ask STS for the account and caller of these credentials; as that needs no permission, a refusal is about them.

    Raises:
        CloudRefused: the credentials are missing or refused, or AWS does not answer.
    """
    answer = edge(read("sts", "get_caller_identity", "whose credentials these are"))
    return Identity(account_id=answer["Account"], arn=answer["Arn"], user_id=answer["UserId"])


def regions(edge: Edge) -> list[str]:
    """Ask EC2 for the sorted names of all regions that the account can use.

    Raises:
        CloudRefused: AWS refuses, or does not answer.
    """
    answer = edge(read("ec2", "describe_regions", "which regions the account can use"))
    return sorted(str(region["RegionName"]) for region in answer["Regions"])


def check_bucket_name(bucket: str) -> None:
    """Refuse a name that no S3 bucket can have; AWS is not asked.

    Raises:
        BadInput: it is no such name.
    """
    if not is_name(BUCKET_PATTERN, bucket):
        raise BadInput(
            f"`bucket` must be 3 to 63 small letters, digits, dots and dashes, got {shown(bucket)}.",
            hint="no bucket can have another name: correct it, or leave it out to use the account's usual one",
        )


def check_bucket(edge: Edge, bucket: str, account_id: str, region: str) -> None:
    """Ask S3, and raise unless the bucket exists, belongs to the account, and is in the machines' region.

    botocore goes wherever a bucket is; machines would, too, and pay for each gigabyte between regions.

    Args:
        edge: makes the call.
        bucket: name of the bucket.
        account_id: number of the account that must own it.
        region: region of the machines.

    Raises:
        CloudRefused: the bucket does not exist, is another account's or in another region.
        BadInput: no bucket can have that name.
    """
    check_bucket_name(bucket)
    answer = edge(
        read(
            "s3",
            "head_bucket",
            "the bucket is there, and is this account's own",
            Bucket=bucket,
            ExpectedBucketOwner=account_id,
        )
    )
    where = answer.get("BucketRegion") or region
    if where != region:
        raise CloudRefused(
            f"the bucket {bucket} is in {where}, and the machines are in {region}.",
            hint=f"make one there: `hetopt setup --create-bucket --region {region}`, or name another `bucket`",
        )


def default_bucket(account_id: str, region: str) -> str:
    """Return the name of an account's default bucket in a region, ``hetopt-ACCOUNT-REGION``; it need not exist."""
    return f"hetopt-{account_id}-{region}"


def boot_image(edge: Edge, kind: str, chosen: str | None) -> BootImage:
    """Ask AWS for the boot image of a kind of machine, and the name of its root device.

    Args:
        edge: makes the calls.
        kind: kind of machine, such as ``x86_64-gpu``.
        chosen: id of an image; None: Amazon's newest of that kind.

    Raises:
        CloudRefused: the account sees no such image in this region.
        BadInput: the image brings disks that outlive their machine.
    """
    parameter = read("ssm", "get_parameter", f"the newest image for {kind} machines", Name=IMAGES[kind])
    id_ = chosen or str(edge(parameter)["Parameter"]["Value"])
    described = read("ec2", "describe_images", f"the root device of the image for {kind} machines", ImageIds=[id_])
    images: Sequence[Answer] = edge(described)["Images"]
    if not images:
        raise CloudRefused(
            f"this account sees no image {id_} for {kind} machines in this region.",
            hint=f"name another, {setting('images', {kind: 'AMI'})}, or none to take Amazon's newest; where the "
            "account allows some alone, `aws ec2 get-allowed-images-settings` tells which",
        )
    root = str(images[0].get("RootDeviceName") or facts.ROOT_DEVICE)
    others = [
        disk["DeviceName"]
        for disk in images[0].get("BlockDeviceMappings", ())
        if disk["DeviceName"] != root and disk.get("Ebs", {}).get("DeleteOnTermination") is False
    ]
    if others:
        raise BadInput(
            f"the image {id_} brings {', '.join(others)}, which stays, and is paid for, when its machine has ended.",
            hint="make an image whose disks go with their machine (DeleteOnTermination), or leave "
            f"{setting('images', {kind: id_})} out to take Amazon's newest",
        )
    return BootImage(ami=id_, root_device=root)


def zones_for(
    edge: Edge, roles: Sequence[Role], catalog: Catalog, extras_usd: float, now_s: float, named: Sequence[str] = ()
) -> tuple[Zone, ...]:
    """Ask EC2 for the zones with a subnet and a type of every role; return them, the cheapest first at present prices.

    All machines go into one zone: what workers send each other costs $0.02 a GB between zones, and takes longer.

    Args:
        edge: makes the calls.
        roles: fleets to rent.
        catalog: catalog of the region.
        extras_usd: USD an hour of a machine's volume, address and requests.
        now_s: seconds since the epoch.
        named: ids of the subnets that machines may be in; empty: the default ones.

    Raises:
        CloudRefused: no zone has a subnet and a type of every role, or a named subnet does not exist.
        BadInput: a type has no on-demand price, so that its worst case is not known; or the subnets do not fit (see
            `subnets_of`).
    """
    names = list(dict.fromkeys(name for role in roles for name in role.instance_types))
    offerings = read(
        "ec2",
        "describe_instance_type_offerings",
        "which zones have the types",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": names}],
    )
    offered = {
        (offering["InstanceType"], offering["Location"]) for offering in edge(offerings)["InstanceTypeOfferings"]
    }
    available = [subnet for subnet in subnets_of(edge, named) if subnet.get("State") == "available"]
    # Of several in a zone the one with most free addresses, where that is told.
    available.sort(key=lambda subnet: float(subnet.get("AvailableIpAddressCount", math.inf)))
    subnets = {subnet["AvailabilityZone"]: subnet for subnet in available}
    changes = changes_of(edge(price_request(names, now_s)))
    spot = {(change.zone, change.instance_type): change.usd_per_hour for change in changes}
    have_all = sorted(
        zone for zone in subnets if all(any((name, zone) in offered for name in role.instance_types) for role in roles)
    )
    if not have_all:
        planned = ", ".join(role.instance_types[0] for role in roles)
        raise CloudRefused(
            f"no zone of the region has all of {planned} and {'one of the' if named else 'default'} subnets.",
            hint=f"plan again with `hetopt recommend PROFILE --exclude TYPE`; {MAKE_SUBNETS}",
        )
    zones = (
        Zone(
            name=zone,
            zone_id=subnets[zone].get("AvailabilityZoneId", zone),
            subnet_id=subnets[zone]["SubnetId"],
            vpc_id=subnets[zone]["VpcId"],
            gives_address=bool(subnets[zone].get("MapPublicIpOnLaunch", True)),
            rates={
                name: _rate(catalog, name, spot.get((zone, name)) if role.market == "spot" else None, extras_usd)
                for role in roles
                for name in role.instance_types
                if (name, zone) in offered
            },
        )
        for zone in have_all
    )
    return tuple(sorted(zones, key=partial(usd_per_hour, roles)))


def _rate(catalog: Catalog, name: str, spot: float | None, extras_usd: float) -> Rate:
    """Return a type's prices in a zone, with extras; ``spot`` None: it is on demand, or nothing is known of its spot.

    Raises:
        BadInput: the on-demand price is not known.
    """
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
        on_demand_usd_per_hour=on_demand.usd_per_hour + extras_usd,
    )


def subnets_of(edge: Edge, named: Sequence[str]) -> list[Answer]:
    """Ask EC2 for its descriptions of the ``named`` subnets, or of the region's default subnets if none is named.

    Raises:
        CloudRefused: a named subnet does not exist in this region.
        BadInput: the named subnets are in several networks, outside the region's availability zones, or in a network
            whose machines cost more (dedicated tenancy).
    """
    if not named:
        filters = [{"Name": facts.DEFAULT_SUBNETS, "Values": ["true"]}]
        return list(
            edge(read("ec2", "describe_subnets", "the default subnet of each zone", Filters=filters))["Subnets"]
        )
    asked = read("ec2", "describe_subnets", "the subnets that were named", SubnetIds=list(named))
    answer = if_there(edge, asked, facts.NO_SUBNET)
    if answer is None:
        raise CloudRefused(
            f"not all of the subnets {', '.join(named)} are in this region.",
            hint="`aws ec2 describe-subnets` lists them: name others, or leave `subnets` out to take the default ones",
        )
    subnets = list(answer["Subnets"])
    networks = sorted({str(subnet["VpcId"]) for subnet in subnets})
    if len(networks) > 1:
        raise BadInput(
            f"the subnets are in several networks: {', '.join(networks)}.", hint="name `subnets` of one network"
        )
    _check_zones(edge, subnets)
    _check_tenancy(edge, networks[0])
    return subnets


def _check_zones(edge: Edge, subnets: Sequence[Answer]) -> None:
    """Refuse subnets outside the region's own availability zones, where its prices bound no bill.

    Raises:
        BadInput: a subnet is on an Outpost, or in a local or Wavelength zone.
    """
    zones = edge(read("ec2", "describe_availability_zones", "whether the subnets are in the region itself"))
    usual = {zone["ZoneName"] for zone in zones["AvailabilityZones"] if zone.get("ZoneType") == facts.USUAL_ZONE}
    away = [each["SubnetId"] for each in subnets if "OutpostArn" in each or each["AvailabilityZone"] not in usual]
    if away:
        raise BadInput(
            f"{', '.join(away)} is on an Outpost, or in a local or Wavelength zone: types, prices and spot machines "
            "there are not the region's.",
            hint="name `subnets` in availability zones of the region, or leave `subnets` out",
        )


def _check_tenancy(edge: Edge, network: str) -> None:
    """Refuse a network whose machines have hardware of their own, which costs more than the prices here.

    Args:
        edge: makes the calls.
        network: id of the network (VPC) of named subnets; the default one always shares hardware.

    Raises:
        BadInput: machines of the network do not share hardware, whatever they ask for.
    """
    asked = read("ec2", "describe_vpcs", "whether machines cost there what they cost", VpcIds=[network])
    [vpc] = edge(asked)["Vpcs"]
    if vpc["InstanceTenancy"] != facts.SHARED_HARDWARE:
        share = f"aws ec2 modify-vpc-tenancy --vpc-id {network} --instance-tenancy {facts.SHARED_HARDWARE}"
        raise BadInput(
            f"machines in the network {network} have hardware of their own ({vpc['InstanceTenancy']} tenancy), which "
            "costs more than any price here, and $2 an hour for the region.",
            hint=f"`{share}` has new machines share it; or name `subnets` of another network",
        )


def check_group(edge: Edge, group: str, vpc_id: str) -> None:
    """Ask EC2, and raise unless a security group is in the network ``vpc_id`` and open between its machines.

    Args:
        edge: makes the call.
        group: id of the security group.
        vpc_id: id of the machines' network.

    Raises:
        CloudRefused: the group does not exist, is in another network, or does not let its machines reach each other.
    """
    asked = read("ec2", "describe_security_groups", "the group of the machines", GroupIds=[group])
    [described] = edge(asked)["SecurityGroups"]
    if described["VpcId"] != vpc_id:
        raise CloudRefused(
            f"the security group {group} is in the network {described['VpcId']}, and the machines are in {vpc_id}.",
            hint="name a `security_group` of that network, or `subnets` of the group's",
        )
    opens = [
        pair["GroupId"]
        for rule in described.get("IpPermissions", ())
        if rule.get("IpProtocol") == facts.ALL_PROTOCOLS
        for pair in rule.get("UserIdGroupPairs", ())
    ]
    if group not in opens:
        raise CloudRefused(
            f"the security group {group} does not let its machines reach each other on every port.",
            hint=f"`aws ec2 authorize-security-group-ingress --group-id {group} --protocol {facts.ALL_PROTOCOLS} "
            f"--source-group {group}`",
        )


PROFILE_NAME = "hetopt-node"
"""Name of the instance profile where none is given; see `hetopt setup`."""


def network_of(options: Ec2) -> Network:
    """Return the network settings of machines that launch options give."""
    return Network(
        subnets=tuple(options.subnets),
        security_group=options.security_group,
        public_address=options.public_address,
        proxy=options.proxy,
    )


def region_of(plan: Plan) -> str:
    """Return the AWS region that a plan rents in.

    Raises:
        BadInput: the plan is for several regions, another cloud, or the user's own machines.
    """
    regions = {group.region for group in plan.chosen.groups}
    if any(group.is_own for group in plan.chosen.groups):
        raise BadInput(
            "the plan is for machines of your own, of which nothing is rented.",
            hint='choose `on="ssh"` with their `inventory`, or plan without it',
        )
    if len(regions) > 1:
        raise BadInput(
            f"the plan has machines in {' and '.join(sorted(regions))}, and a cluster lives in one region.",
            hint=f"make it again with `{Plan.MADE_BY}`",
        )
    region = regions.pop()
    if cloud_of(region) != AWS:
        raise BadInput(
            f"the plan is for machines of {cloud_of(region)}, which hetopt does not rent.",
            hint='rent them there, name them in an inventory and choose `on="ssh"`; or `hetopt export` the plan',
        )
    return region


def roles_of(plan: Plan, catalog: Catalog) -> tuple[Role, ...]:
    """Return the plan's groups as fleets to ask for, in order, with the run's hosts and the types that may stand in.

    Args:
        plan: plan to be rented.
        catalog: catalog of its region.

    Raises:
        BadInput: the run's hosts are not as many as the groups' machines, or a type cannot train.
    """
    hosts = list(dict.fromkeys(worker.host for worker in plan.run.workers))
    if len(hosts) != sum(group.machines for group in plan.chosen.groups):
        raise BadInput(
            f"the plan rents {sum(group.machines for group in plan.chosen.groups)} machines for {len(hosts)} hosts.",
            hint=f"it was edited; make it again with `{Plan.MADE_BY}`",
        )
    roles = []
    for number, (group, others) in enumerate(plan.with_stand_ins):
        mine, hosts = hosts[: group.machines], hosts[group.machines :]
        roles.append(
            Role(
                name=f"{number}-{group.instance_type.replace('.', '-')}",
                instance_types=(group.instance_type, *others),
                hosts=tuple(mine),
                market=group.market,
                image_kind=image_kind(catalog.instance_type(group.instance_type)),
            )
        )
    return tuple(roles)


def budget_of(plan: Plan, wished_usd: float | None) -> float:
    """Return the budget in USD of a launch: ``wished_usd``, or else the plan's.

    A budget below the plan's high cost is refused, unless the plan says how likely its own budget is enough, and the
    launch's is no lower than the plan's.

    Args:
        plan: plan to be launched.
        wished_usd: budget of this launch; None: the plan's.

    Raises:
        BadInput: neither the launch nor the plan has a budget.
        BudgetStop: the plan may cost more than the budget.
    """
    planned, high = plan.goal.budget_usd, plan.chosen.prediction.cost_usd.high
    budget = wished_usd if wished_usd is not None else planned
    if budget is None:
        raise BadInput(
            "the plan has no budget, and nothing is rented without one.",
            hint=f"say how much it may cost: `budget_usd={max(1, math.ceil(high))}`",
        )
    says_how_likely = plan.insight is not None and plan.insight.chance is not None
    if not (says_how_likely and planned is not None and budget >= planned) and high > budget * 1.001:
        raise BudgetStop(
            f"the plan may cost up to {usd(high)}, and the budget is {usd(budget)}.",
            hint="plan again with `hetopt recommend PROFILE --budget USD`, or raise `budget_usd`",
        )
    return budget


def move_usd(
    worst_usd_per_hour: float,
    *,
    roles: Sequence[Role],
    budget_usd: float,
    fixed_usd: float = 0.0,
    deadline_s: float | None = None,
    spent_usd: float = 0.0,
    may_cost_usd: float | None = None,
) -> float:
    """Return the USD to keep back for a move to on-demand machines before the deadline; 0: not needed, not affordable.

    What is kept back pays the cluster for 25 minutes at its worst price. It is 0 where there is no deadline or no
    prediction, where all machines are on demand, where the budget pays for nothing beside what was planned, or would
    then not last until the cluster has booted.

    Args:
        worst_usd_per_hour: highest rate of the whole cluster, on demand.
        roles: fleets of the cluster.
        budget_usd: budget for everything, earlier lives included.
        fixed_usd: costs whatever the machines do.
        deadline_s: seconds from the order on; None: no deadline, and no move.
        spent_usd: cost of earlier lives.
        may_cost_usd: most that the prediction says; None: nothing was predicted, and no move.
    """
    moves = deadline_s is not None and any(role.market == "spot" for role in roles)
    if not moves or may_cost_usd is None:
        return 0.0
    usd = worst_usd_per_hour * UNPLACED_S / 3600
    needed = max(may_cost_usd, least_budget_usd(worst_usd_per_hour, fixed_usd))
    return 0.0 if spent_usd + needed + usd > budget_usd else usd


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The maker of orders, which asks AWS for identity, zones, prices and images, and computes budgets and lifetimes.

    Attributes:
        edge: makes the calls, which only read.
        catalog: catalog of the region.
        options: what was chosen at launch.
        billing: prices beside the machines' own.
        version: version of hetopt.
    """

    edge: Edge
    catalog: Catalog
    options: Ec2
    billing: Billing = field(default_factory=load_billing)
    version: str = field(default_factory=partial(version, "hetopt"))

    def of_plan(
        self, plan: Plan, *, run_id: str, bundle_sha256: str, now_s: float, life: int = 0, spent_usd: float = 0.0
    ) -> Order:
        """Return the order of a plan at present prices, by reading from AWS; nothing is rented.

        Args:
            plan: what to run.
            run_id: name of the run.
            bundle_sha256: hash of the code.
            now_s: seconds since the epoch.
            life: how often the run was resumed.
            spent_usd: cost of its earlier lives.

        Raises:
            CloudRefused: the account, a zone, an image or the bucket is not there, or AWS refuses a call.
            BudgetStop: the plan may cost more than the budget, or that does not last until the cluster has booted.
            BadInput: the plan cannot be rented as it is, or an option names what does not fit.
        """
        prediction = plan.chosen.prediction
        order = self.of_job(
            roles=roles_of(plan, self.catalog),
            budget_usd=budget_of(plan, self.options.budget_usd),
            gradient_bytes=plan.profile.job.gradient_bytes,
            disk_gb=plan.chosen.disk_gb,
            run_id=run_id,
            bundle_sha256=bundle_sha256,
            now_s=now_s,
            life=life,
            deadline_s=plan.goal.deadline_s,
            # Who brings the data set to the region has paid for that out of the same budget.
            spent_usd=spent_usd + prediction.data_transfer_usd,
            may_cost_usd=prediction.cost_usd.high - prediction.data_transfer_usd,
            # Machines that are waited for are not paid.
            may_take_s=(prediction.total_s.value - prediction.unavailable_s)
            * prediction.training_s.high
            / prediction.training_s.value,
        )
        return order.of_run(plan.run)

    def of_job(
        self,
        *,
        roles: tuple[Role, ...],
        budget_usd: float,
        gradient_bytes: int,
        disk_gb: int,
        run_id: str,
        bundle_sha256: str,
        now_s: float,
        life: int = 0,
        deadline_s: float | None = None,
        spent_usd: float = 0.0,
        may_cost_usd: float | None = None,
        may_take_s: float | None = None,
    ) -> Order:
        """Return the order for roles at present prices, by reading from AWS. Nothing is rented.

        Args:
            roles: fleets of the cluster.
            budget_usd: budget for everything, earlier lives included.
            gradient_bytes: bytes of the model, which checkpoints are a multiple of.
            disk_gb: size of each machine's volume.
            run_id: name of the run.
            bundle_sha256: hash of the code.
            now_s: seconds since the epoch.
            life: how often the run was resumed.
            deadline_s: as of `move_usd`; the machines' lifetime ends then, too.
            spent_usd: as of `move_usd`.
            may_cost_usd: as of `move_usd`.
            may_take_s: seconds that the budget is to pay at spot machines' highest prices, which it so bounds; None:
                they are bounded by the prices on demand.

        Raises:
            CloudRefused: the account, a zone, an image or the bucket is not there, or AWS refuses a call.
            BudgetStop: the budget does not last until the cluster has booted.
            BadInput: the zone that the options name does not have all types, or another option names what does not fit.
        """
        who = identity(self.edge)
        bucket = self.options.bucket or default_bucket(who.account_id, self.catalog.region)
        check_bucket(self.edge, bucket, who.account_id, self.catalog.region)
        extras = extras_usd_per_hour(self.billing, disk_gb)
        if not self.options.public_address:
            extras -= self.billing.public_ipv4_usd_per_hour.value
        zones = zones_for(self.edge, roles, self.catalog, extras, now_s, self.options.subnets)
        if self.options.security_group is not None:
            check_group(self.edge, self.options.security_group, zones[0].vpc_id)
        if self.options.zone is not None:
            zones = tuple(zone for zone in zones if self.options.zone in (zone.name, zone.zone_id))
            if not zones:
                raise BadInput(
                    f"the zone {self.options.zone} does not have all types of the plan in this account.",
                    hint="leave `zone` out; zone names differ between accounts, ids such as use1-az4 do not",
                )
        fixed = fixed_usd(checkpoint_bytes(gradient_bytes), self.billing)
        if not (self.options.public_address and all(zone.gives_address for zone in zones)):
            fixed += _nat_usd(roles, self.billing)
        move = move_usd(
            worst_usd_per_hour(roles, zones, on_demand=True),
            roles=roles,
            budget_usd=budget_usd,
            fixed_usd=fixed,
            deadline_s=deadline_s,
            spent_usd=spent_usd,
            may_cost_usd=may_cost_usd,
        )
        gone_usd = fixed + move + spent_usd
        if may_take_s is not None:
            affordable = SECONDS_PER_HOUR * (budget_usd - gone_usd) / (may_take_s + SHUTDOWN_S)
            zones = tuple(with_highest_prices(zone, roles, affordable) for zone in zones)
        worst = worst_usd_per_hour(roles, zones)
        longest_s = lifetime_s(budget_usd, fixed_usd=gone_usd, worst_usd_per_hour=worst)
        types = [self.catalog.instance_type(name) for role in roles for name in role.instance_types]
        slowest = min(instance_type.network_bytes_per_s for instance_type in types)
        return Order(
            run_id=run_id,
            life=life,
            hetopt_version=self.version,
            region=self.catalog.region,
            account_id=who.account_id,
            owner=who.owner,
            launched_by=who.arn,
            bucket=bucket,
            instance_profile=self.options.instance_profile or PROFILE_NAME,
            end_role=calls.end_role(self.edge),
            volume_gb=disk_gb,
            extras_usd_per_hour=extras,
            zones=zones,
            roles=roles,
            images={
                kind: boot_image(self.edge, kind, (self.options.images).get(kind))
                for kind in dict.fromkeys(role.image_kind for role in roles)
            },
            network=network_of(self.options),
            bundle_sha256=bundle_sha256,
            group_secret=new_secret(),
            created_s=now_s,
            budget_usd=budget_usd,
            fixed_usd=fixed,
            move_usd=move,
            # Writing one, and uploading it over the slowest sustained network there may be.
            checkpoint_s=checkpoint_time_s(gradient_bytes) + checkpoint_bytes(gradient_bytes) / slowest,
            lifetime_s=min(longest_s, deadline_s or longest_s),
        )


def _nat_usd(roles: Sequence[Role], billing: Billing) -> float:
    """Return the USD for the packages that machines without a public address load through a NAT gateway.

    Neither the gateway's hours, which are paid whoever trains, nor traffic with S3, which is free, is counted.
    """
    facts = provisioning_facts()
    kinds = [(role.machines, "gpu" if role.image_kind.endswith("-gpu") else "cpu") for role in roles]
    packages_gb = sum(machines * facts[f"{kind}_packages_gb"].value for machines, kind in kinds)
    return packages_gb * billing.nat_gateway_usd_per_gb.value


def check_prices(plan: Plan, order: Order) -> None:
    """Refuse a plan that may cost more than the budget because prices rose by over 2 % since it was made.

    At the prices that it was planned with the plan itself says how likely it stays within.

    Args:
        plan: plan to be rented.
        order: order by which it would be rented now.

    Raises:
        BudgetStop: a type became more expensive, and the high cost is above the order's budget.
    """
    high, dearer = order.expected_usd(plan)[1], order.dearer(plan)
    if dearer and high > order.budget_usd * 1.001:
        why = "; ".join(
            f"{group.instance_type} was planned at ${group.price_usd_per_hour:.4g} an hour, "
            f"and costs ${order.machine_usd_per_hour(group.instance_type):.4g}"
            for group in dearer
        )
        raise BudgetStop(
            f"at the prices of now the plan may cost {usd(high)}, and the budget is {usd(order.budget_usd)} ({why}).",
            hint="plan again, or raise `budget_usd`",
        )
