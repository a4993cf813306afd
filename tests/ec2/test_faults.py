"""Whatever call fails, with whatever error, wherever the process dies: no machine stays, nothing is spent beyond the
budget, and whoever reads the message knows the cause and what to type next.

The cases are generated: every call that a run makes in its life, times every row of the table of errors, and a kill
before and after each. By default a seeded sample of them is run; ``--slow`` runs all.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hetopt.backends.ec2.renter.edge import BotoEdge
from hetopt.backends.ec2.renter.order import ORDER_FILE, Order
from hetopt.backends.ec2.renter.ordering import Orders
from hetopt.backends.ec2.renter.request import Edge
from hetopt.backends.host.bundle import Bundle
from hetopt.backends.options import Ec2
from hetopt.core.errors import HetoptError
from hetopt.core.profile import Profile
from hetopt.optimizer.cost.billing import Billing
from hetopt.optimizer.market.catalog import Catalog
from hetopt.optimizer.plan import Plan
from tests.ec2.conftest import Patience, leftovers, plan_of, start_over
from tests.ec2.faults import Fault, Faulty, Killed, Life, codes

SAMPLE = 1
"""Of the calls, for each error, by default; with --slow all of them."""

EVERY = 8
"""Of the moments to be killed at, every so many by default; with --slow all of them."""

COMMAND = re.compile(r"`[^`]+`|--\w|try again|wait|launch again|look at|set the clock|nothing needs")

PARTS = 6

KNOWN_CALLS: list[str] = []

NewLife = Callable[[], Life]


@pytest.fixture(scope="module")
def small_plan(profile: Profile, catalog: Catalog) -> Plan:
    return plan_of(profile, catalog, (("c7i.large", 2, "spot"), ("c7g.xlarge", 1, "on-demand")))


@pytest.fixture
def lives(
    cloud: BotoEdge, small_plan: Plan, catalog: Catalog, billing: Billing, bundle: Bundle, tmp_path: Path
) -> NewLife:
    count = iter(range(10**6))

    def new() -> Life:
        start_over(cloud)
        patience = Patience()
        folder = tmp_path / f"run-{next(count)}"
        folder.mkdir()

        def order(edge: Edge) -> Order:
            orders = Orders(edge=edge, catalog=catalog, billing=billing, options=Ec2(), version="0.1.0")
            return orders.of_plan(
                small_plan, run_id=folder.name, bundle_sha256=bundle.sha256, now_s=patience.now_s
            ).model_copy(update={"region": "us-east-1"})

        return Life(cloud=cloud, plan=small_plan, bundle=b"code", folder=folder, patience=patience, make_order=order)

    return new


def calls_of(lives: NewLife) -> list[str]:
    """The calls of a life without faults; it is lived once for all tests, as every life has the same."""
    if KNOWN_CALLS:
        return KNOWN_CALLS
    life = lives()
    edge = Faulty(inner=life.cloud, fault=None)
    life.live(edge)
    assert leftovers(life.cloud) == []
    KNOWN_CALLS.extend(edge.steps)
    return KNOWN_CALLS


def chosen(steps: list[str], kind: str, everything: bool) -> list[Fault]:
    faults = [Fault(call=number, kind=kind, step=step) for number, step in enumerate(steps)]
    return faults if everything else sorted(random.Random(kind).sample(faults, SAMPLE), key=lambda one: one.call)


def suffer(life: Life, fault: Fault) -> None:
    """One case."""
    edge = Faulty(inner=life.cloud, fault=fault)
    error: HetoptError | None = None
    killed = False
    try:
        life.live(edge)
    except HetoptError as refused:
        error = refused
    except Killed:
        killed = True
    assert killed == fault.is_kill, fault
    stayed = leftovers(life.cloud)
    if error is not None:
        assert error.exit_code in (2, 3, 4, 5, 6), fault
        assert error.message.endswith("."), fault
        assert error.hint is not None, fault
        assert COMMAND.search(error.hint), f"{fault}: {error.hint}"
        if stayed and (life.folder / "seen.json").exists() is False:
            assert "hetopt gc --on ec2" in error.hint, f"{fault} left {stayed} and did not say so: {error.hint}"
    if (life.folder / ORDER_FILE).exists():
        order = Order.load(life.folder / ORDER_FILE)
        worst = order.worst_usd_per_hour() * order.lifetime_s / 3600 + order.fixed_usd
        assert worst <= order.budget_usd * (1 + 1e-9), fault
        for one in stayed:
            assert one.expires_at_s is not None, fault
            assert one.expires_at_s <= order.created_s + order.lifetime_s + 1, fault
    life.collect()
    assert leftovers(life.cloud) == [], fault


@pytest.mark.parametrize(
    "code",
    [  # every third, and an answer that is lost; the call that is refused is drawn for each
        pytest.param(code, marks=[pytest.mark.slow] * (number % 3 != 0 and code != "lost"))
        for number, code in enumerate(codes())
    ],
)
def test_a_refused_call_leaves_nothing(code: str, lives: NewLife, pytestconfig: pytest.Config) -> None:
    for fault in chosen(calls_of(lives), code, bool(pytestconfig.getoption("--slow"))):
        suffer(lives(), fault)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("moment", ["killed before", "killed after"])
def test_a_killed_process_leaves_nothing_that_cannot_be_found(
    moment: str, part: int, lives: NewLife, pytestconfig: pytest.Config
) -> None:
    every = 1 if pytestconfig.getoption("--slow") else EVERY
    for fault in chosen(calls_of(lives), moment, everything=True)[part :: PARTS * every]:
        suffer(lives(), fault)
