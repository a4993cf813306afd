"""How machines in a subnet reach S3 and packages: by a gateway, or by translation, whose traffic is paid for by the GB.

What is counted is what a run is known to cause. A NAT gateway costs its hours whether anybody trains or not, and is not
made here. Data and checkpoints go the same way where S3 has no gateway endpoint, which is free: that is told, and not
counted, as no plan says how much that is.

    traffic = machines * packages * USD a GB
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.order import Role, WayOut, Zone
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
