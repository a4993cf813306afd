"""Whether a subnet has a route to S3 and packages, and what that costs.

Machines need a route to a gateway, and an address or translation. Network ACLs, blocked gateways and names that are not
resolved are not imitated here: machines behind them never say that they live, and are ended as such.

Translation is paid for by the GB. What is counted is what a run is known to cause. A NAT gateway costs its hours
whether anybody trains or not, and is not made here. Data and checkpoints go the same way where S3 has no gateway
endpoint, which is free: that is told, and not counted, as no plan says how much that is.

    traffic = machines * packages * USD a GB
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetopt.backends.ec2 import facts
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


def ways_by_zone(edge: Edge, order: Order) -> dict[str, Unreachable | None]:
    """Why machines in an order's zones reach neither S3 nor packages, by the zones' names; None where they do.

    Raises:
        CloudRefused: subnets or routes cannot be read.
    """
    ids, network = [zone.subnet_id for zone in order.zones], order.zones[0].vpc_id
    subnets = edge(read("ec2", "describe_subnets", "whether machines get an address", SubnetIds=ids))["Subnets"]
    tables, addressed = tables_of(edge, [network]), order.network.public_address
    return {str(one["AvailabilityZone"]): unreachable(one, tables, addressed=addressed) for one in subnets}


def where_reachable(edge: Edge, order: Order) -> Order:
    """The order with those zones alone whose machines reach S3 and packages; as it is, where nobody can tell.

    Only of the default network: one that was named may have endpoints, which are no routes.

    Raises:
        CloudRefused: in none of them they do: they would boot, be paid for, and never tell of themselves.
    """
    if order.network != Network():
        return order
    try:
        ways = ways_by_zone(edge, order)
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
