"""Whether a machine in a subnet reaches S3 and packages and is answered, and what that costs.

It needs a route to a gateway that the account does not block, and an address or translation; names that are resolved;
and a network ACL that lets HTTPS out, and the answers in. Machines of a run are in one subnet, and no ACL stands
between those (`facts.ACLS_STAND_OUTSIDE`).

Translation is paid for by the GB. What is counted is what a run is known to cause. A NAT gateway costs its hours
whether anybody trains or not, and is not made here. Data and checkpoints go the same way where S3 has no gateway
endpoint, which is free: that is told, and not counted, as no plan says how much that is.

    traffic = machines * packages * USD a GB
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.network_acls import Rules, acl_of
from hetopt.backends.ec2.renter.order import Network, Order, Role, WayOut, Zone
from hetopt.backends.ec2.renter.request import Answer, Edge, read
from hetopt.core.errors import CloudRefused
from hetopt.optimizer.cost.billing import Billing
from hetopt.optimizer.cost.provisioning import provisioning_facts


def tables_of(edge: Edge, networks: Iterable[str]) -> list[Answer]:
    """The tables of routes of networks.

    Raises:
        CloudRefused: they cannot be read.
    """
    filters = [{"Name": "vpc-id", "Values": list(dict.fromkeys(networks))}]
    return list(edge(read("ec2", "describe_route_tables", "ways out of the subnets", Filters=filters))["RouteTables"])


def table_of(subnet_id: str, network: str, tables: Sequence[Answer]) -> Answer:
    """A subnet's own table of routes, or its network's main one."""
    main: Answer = {}
    for table in tables:
        for link in table.get("Associations", ()):
            if link.get("SubnetId") == subnet_id:
                return table
            if link.get("Main") and table.get("VpcId") == network:
                main = table
    return main


def ways_out(table: Answer) -> list[Answer]:
    """The routes that lead to the internet."""
    return [
        one
        for one in table.get("Routes", ())
        if one.get("DestinationCidrBlock") == facts.ANYWHERE.value and one.get("State") != facts.DEAD_ROUTE.value
    ]


def by_gateway(routes: Sequence[Answer]) -> bool:
    """Whether internet gateways are the only way out."""
    return all(str(one.get("GatewayId", "")).startswith(facts.GATEWAY_IDS.value) for one in routes)


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """Why machines in a subnet reach neither S3 nor packages, and what mends that."""

    said: str
    hint: str


def unreachable(subnet: Answer, tables: Sequence[Answer], *, addressed: bool) -> Unreachable | None:
    """Whether what is in a subnet reaches the internet, by a gateway and an address, or by translation: None if so.

    Args:
        subnet: that one.
        tables: the routes of its network.
        addressed: whether machines are to have public addresses, as far as the subnet gives them any.
    """
    id_ = str(subnet["SubnetId"])
    routes = ways_out(table_of(id_, subnet["VpcId"], tables))
    if not routes:
        hint = (
            f"`aws ec2 create-route --destination-cidr-block {facts.ANYWHERE.value} --gateway-id GATEWAY "
            "--route-table-id TABLE`"
        )
        return Unreachable(said="there is no route to the internet", hint=hint)
    if not by_gateway(routes):
        return None
    if not addressed:
        said = "the only way out is an internet gateway, which serves machines with a public address alone"
        return Unreachable(said=said, hint="let them have one, or name other `subnets`")
    if not subnet.get("MapPublicIpOnLaunch"):
        said = "machines get no public address, and the only way out is an internet gateway"
        hint = f"`aws ec2 modify-subnet-attribute --subnet-id {id_} --map-public-ip-on-launch`, or name other `subnets`"
        return Unreachable(said=said, hint=hint)
    return None


@dataclass(frozen=True, kw_only=True)
class Ways:
    """What was found of an order's zones.

    Attributes:
        by_zone: why machines there reach neither S3 nor packages, by the name of the zone; None where they do.
        unread: what could not be looked at, which is held against no zone.
    """

    by_zone: Mapping[str, Unreachable | None]
    unread: tuple[CloudRefused, ...]


def ways_by_zone(edge: Edge, order: Order) -> Ways:
    """Why machines in an order's zones reach neither S3 nor packages, as far as may be read.

    Raises:
        CloudRefused: neither subnets nor routes can be read.
    """
    ids, network = [zone.subnet_id for zone in order.zones], order.zones[0].vpc_id
    subnets = edge(read("ec2", "describe_subnets", "whether machines get an address", SubnetIds=ids))["Subnets"]
    tables, addressed = tables_of(edge, [network]), order.network.public_address
    found = {str(one["AvailabilityZone"]): unreachable(one, tables, addressed=addressed) for one in subnets}
    unread: list[CloudRefused] = []

    def look(why: Callable[[], Mapping[str, Unreachable | None]]) -> None:
        try:
            found.update({zone: reason for zone, reason in why().items() if found[zone] is None})
        except CloudRefused as refused:
            unread.append(refused)

    look(lambda: _blocked(edge, subnets, tables))
    look(lambda: dict.fromkeys(found, _unnamed(edge, network)))
    look(lambda: _unanswered(edge, subnets, network))
    return Ways(by_zone=found, unread=tuple(unread))


def _blocked(edge: Edge, subnets: Sequence[Answer], tables: Sequence[Answer]) -> dict[str, Unreachable | None]:
    """Where the account blocks internet gateways, which it does for all networks but those that it excludes."""
    options = edge(read("ec2", "describe_vpc_block_public_access_options", "whether gateways are blocked"))
    mode = str(options["VpcBlockPublicAccessOptions"].get("InternetGatewayBlockMode", facts.GATEWAYS_OPEN.value))
    if mode == facts.GATEWAYS_OPEN.value:
        return {}
    asked = read("ec2", "describe_vpc_block_public_access_exclusions", "which networks are excluded from that")
    excluded = {
        str(one["ResourceArn"]).rpartition("/")[2]: one["InternetGatewayExclusionMode"]
        for one in edge(asked)["VpcBlockPublicAccessExclusions"]
        if one["State"] in facts.EXCLUSION_HOLDS.value
    }
    found: dict[str, Unreachable | None] = {}
    for one in subnets:
        mine = {mode, *(excluded.get(one[key]) for key in ("SubnetId", "VpcId"))}
        only_out = not by_gateway(ways_out(table_of(one["SubnetId"], one["VpcId"], tables)))
        if facts.EXCLUDED_BOTH_WAYS.value in mine or (only_out and mine & facts.ONLY_OUT.value):
            continue
        found[str(one["AvailabilityZone"])] = Unreachable(
            said=f"the account blocks internet gateways ({mode})",
            hint="an administrator excludes the network: `aws ec2 create-vpc-block-public-access-exclusion --vpc-id "
            f"{one['VpcId']} --internet-gateway-exclusion-mode {facts.EXCLUDED_BOTH_WAYS.value}`",
        )
    return found


def _unnamed(edge: Edge, network: str) -> Unreachable | None:
    """Whether the network resolves no names."""
    attribute = facts.RESOLVES_NAMES.value
    purpose = "whether names are resolved"
    told = edge(read("ec2", "describe_vpc_attribute", purpose, VpcId=network, Attribute=attribute))
    if told[f"{attribute[0].upper()}{attribute[1:]}"]["Value"]:
        return None
    return Unreachable(
        said=f"{network} resolves no names ({attribute} is off)",
        hint=f"`aws ec2 modify-vpc-attribute --vpc-id {network} --enable-dns-support Value=true`; nothing needs to be "
        "done where its DHCP options name a server of your own",
    )


def _unanswered(edge: Edge, subnets: Sequence[Answer], network: str) -> dict[str, Unreachable | None]:
    """Where a network ACL lets HTTPS not out, or its answers not in."""
    filters = [{"Name": "vpc-id", "Values": [network]}]
    acls = edge(read("ec2", "describe_network_acls", "what the subnets let through", Filters=filters))["NetworkAcls"]
    return {str(one["AvailabilityZone"]): _walled(acl_of(one["SubnetId"], acls)) for one in subnets}


def _walled(acl: Answer | None) -> Unreachable | None:
    first, last = facts.EPHEMERAL_PORTS.value
    https = facts.HTTPS_PORT.value
    for egress, ports, what in ((True, (https, https), "HTTPS out"), (False, (first, last), "answers in")):
        rules = Rules.of(acl, egress=egress)
        rule = rules.denying(*ports)
        if acl is not None and rule is not None:
            id_, direction = acl["NetworkAclId"], "egress" if egress else "ingress"
            return Unreachable(
                said=f"the network ACL {id_} does not let {what} (TCP {'-'.join(map(str, dict.fromkeys(ports)))}, "
                f"rule {rule})",
                hint=f"`aws ec2 create-network-acl-entry --network-acl-id {id_} --{direction} "
                f"--rule-number {rules.free_before(rule)} --protocol tcp --port-range From={ports[0]},To={ports[1]} "
                f"--cidr-block {facts.ANYWHERE.value} --rule-action allow`",
            )
    return None


def where_reachable(edge: Edge, order: Order) -> Order:
    """The order with those zones alone whose machines reach S3 and packages; as it is, where nobody can tell.

    Only of the default network: one that was named may have endpoints, which are no routes.

    Raises:
        CloudRefused: in none of them they do: they would boot, be paid for, and never tell of themselves.
    """
    if order.network != Network():
        return order
    try:
        ways = ways_by_zone(edge, order).by_zone
    except CloudRefused:
        return order
    open_ = tuple(zone for zone in order.zones if ways.get(zone.name) is None)
    if not open_:
        found = ways[order.zones[0].name]
        assert found is not None
        raise CloudRefused(f"machines would reach neither S3 nor packages: {found.said}.", hint=found.hint)
    return order.model_copy(update={"zones": open_})


def way_out(edge: Edge, zone: Zone) -> WayOut | None:
    """By what machines of a zone go out; None where that cannot be read, or they go by an address of their own."""
    try:
        table = table_of(zone.subnet_id, zone.vpc_id, tables_of(edge, [zone.vpc_id]))
    except CloudRefused:
        return None
    if not any("NatGatewayId" in one for one in ways_out(table)):
        return None
    endpoint = any(
        "DestinationPrefixListId" in one and str(one.get("GatewayId", "")).startswith(facts.ENDPOINT_IDS.value)
        for one in table.get("Routes", ())
    )
    return WayOut(s3_by_endpoint=endpoint)


def traffic_usd(way: WayOut | None, roles: Sequence[Role], billing: Billing) -> float:
    """What machines cause by that way to install their packages, where none of them finds these in the bucket."""
    if way is None:
        return 0.0
    known = provisioning_facts()
    gpu, cpu = known.gpu_packages_gb.value, known.cpu_packages_gb.value
    packages_gb = sum(role.machines * (gpu if role.image_kind.endswith("-gpu") else cpu) for role in roles)
    return packages_gb * billing.nat_gateway_usd_per_gb.value
