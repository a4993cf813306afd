"""Types that stand in: a run whose planned machines cannot be had is rented on others of its plan, within its cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetopt.backends.ec2.renter.order import Order, worst_usd_per_hour
from hetopt.backends.ec2.renter.request import BotoEdge
from hetopt.backends.host.bundle import Bundle
from hetopt.core.errors import CloudRefused
from hetopt.core.profile import Profile
from hetopt.core.run_folder import read_spec
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import Patience, be_unkind, leftovers, plan_of, rent

SPOT, ON_DEMAND = ("c7i.large", "c6i.large", "c5.large"), ("c7i.xlarge", "c6i.xlarge")
ZONES = [f"us-east-1{letter}" for letter in "abcdef"]


def dry(*types: str, usd: float = 0.03) -> dict[str, list[list[float]]]:
    """Pools without a machine, or (``usd``) dearer than a run pays."""
    return {f"{zone}/{name}": [[0, 0 if usd < 1 else 9, usd]] for zone in ZONES for name in types}


@pytest.fixture
def plan(profile: Profile, catalog: Catalog) -> Plan:
    made = plan_of(profile, catalog, ((SPOT[0], 2, "spot"), (ON_DEMAND[0], 1, "on-demand")))
    return made.model_copy(update={"stand_ins": (SPOT[1:], ON_DEMAND[1:])})


STORIES: dict[str, tuple[dict[str, Any], tuple[str, str] | None]] = {
    "all there": ({}, (SPOT[0], ON_DEMAND[0])),
    "no planned spot": ({"exhausted": SPOT[:1]}, (SPOT[1], ON_DEMAND[0])),
    "no planned on demand": ({"exhausted": ON_DEMAND[:1]}, (SPOT[0], ON_DEMAND[1])),
    "neither": ({"exhausted": [SPOT[0], ON_DEMAND[0]]}, (SPOT[1], ON_DEMAND[1])),
    "the last stand-in": ({"exhausted": [*SPOT[:2], ON_DEMAND[0]]}, (SPOT[2], ON_DEMAND[1])),
    "dearer than the run pays": ({"pools": dry(SPOT[0], usd=5.0)}, (SPOT[1], ON_DEMAND[0])),
    "dry in every zone": ({"pools": dry(SPOT[0])}, (SPOT[1], ON_DEMAND[0])),
    "one of two": ({"pools": {f"{zone}/{SPOT[0]}": [[0, 1, 0.03]] for zone in ZONES}}, (SPOT[1], ON_DEMAND[0])),
    "a stand-in in one zone alone": (
        {"pools": {name: steps for name, steps in dry(*SPOT).items() if name != f"us-east-1d/{SPOT[1]}"}},
        (SPOT[1], ON_DEMAND[0]),
    ),
    "nothing": ({"exhausted": [*SPOT]}, None),
}


@pytest.mark.parametrize(
    "story", [name if at % 4 == 1 else pytest.param(name, marks=pytest.mark.slow) for at, name in enumerate(STORIES)]
)
def test_what_may_stand_in_trains_within_the_stated_cost(
    story: str,
    cloud: BotoEdge,
    order_for: Callable[..., Order],
    plan: Plan,
    bundle: Bundle,
    patience: Patience,
    tmp_path: Path,
) -> None:
    order, (how, expected) = order_for(), STORIES[story]
    be_unkind(**{name: list(value) if isinstance(value, tuple) else value for name, value in how.items()})
    if expected is None:
        with pytest.raises(CloudRefused, match="no zone has all machines"):
            rent(cloud, order, plan, bundle, tmp_path, patience)
        assert leftovers(cloud) == []
        return
    rented = rent(cloud, order, plan, bundle, tmp_path, patience)
    assert [machine.instance_type for machine in rented.machines] == [expected[0]] * 2 + [expected[1]]
    hourly = sum(machine.usd_per_hour for machine in rented.machines)
    assert hourly <= worst_usd_per_hour(order.roles, order.zones), "what the lease was reckoned with"
    # Later plans learn from the run what these types do.
    types = {worker.host: worker.type for worker in read_spec(tmp_path).workers}
    assert types == {machine.host: machine.instance_type for machine in rented.machines}
