"""Plans for one's own machines: each is there once, its electricity is the bill, and the better of both ways wins."""

from __future__ import annotations

import datetime
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.hosts import Host, read_hosts
from hetopt.core.profile import Profile
from hetopt.core.step_samples import Node, StepSample
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.market.owned import OWN
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.options import Options
from hetopt.optimizer.recommendation.own_machines import better_of, on_own_machines
from hetopt.optimizer.recommendation.recommend import recommend
from hetopt.optimizer.step_time.profiled import sampled_machines

REPOSITORY = Path(__file__).resolve().parents[2]
GOAL = Goal(ends="epochs", amount=50, budget_usd=5)
OPTIONS = Options(trials=0, worlds=False, batch_size=128, only_types=("c7i.large", "c7i.xlarge"), max_workers=4)
NOW = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)


@cache
def profile() -> Profile:
    return Profile.load(REPOSITORY / "tests" / "recorded" / "resnet20-cifar10.json")


@cache
def rented() -> Plan:
    return recommend(profile(), load_catalog(), GOAL, OPTIONS, seed=0, now=NOW)


def own(*hosts: Host) -> Plan:
    return on_own_machines(profile(), load_catalog(), hosts, GOAL, OPTIONS, seed=0, now=NOW)


def score(plan: Plan) -> float:
    took = plan.chosen.prediction
    weight = OPTIONS.limits(GOAL).time_weight
    return float(took.total_s.value**weight * took.cost_usd.value ** (1 - weight))


def box(name: str, **more: object) -> Host:
    told = {"cpus": 8, "memory_gib": 32.0, "network_mbit": 940.0, "usd_per_hour": 0.1, **more}
    return Host(name=name, address=name, **told)  # type: ignore[arg-type]  # as each test wants it


HOSTS = st.builds(
    box,
    st.just("?"),
    cpus=st.sampled_from([2, 4, 8, 16, 64]),
    network_mbit=st.sampled_from([25.0, 100.0, 940.0, 1e4]),
    usd_per_hour=st.floats(0.005, 1.0),
    devices=st.sampled_from([("cpu",), ("T4",), ("L4", "L4")]),
)


def named(hosts: list[Host]) -> list[Host]:
    from dataclasses import replace

    return [replace(host, name=f"box{place}", address=f"box{place}") for place, host in enumerate(hosts)]


@given(st.lists(HOSTS, min_size=1, max_size=3).map(named))
def test_the_plan_is_never_worse_than_the_better_of_either_alone(hosts: list[Host]) -> None:
    plan = better_of(profile(), load_catalog(), hosts, GOAL, OPTIONS, rented, seed=0, now=NOW)
    alone = [score(rented())]
    try:
        mine = own(*hosts)
        alone.append(score(mine))
        groups = mine.chosen.groups
        assert all(group.machines == 1 and group.region == OWN for group in groups), "each is there once"
        assert len({group.instance_type for group in groups}) == len(groups)
        costs = {host.name: host.cost_usd_per_hour or 0.0 for host in hosts}
        hourly = sum(costs[group.instance_type] for group in groups)
        took = mine.chosen.prediction
        assert took.cost_usd.value == pytest.approx(hourly * took.total_s.value / 3600, rel=1e-6), "and nothing beside"
    except NoFeasiblePlan:
        pass
    assert score(plan) <= min(alone) * (1 + 1e-9)
    assert "Rented machines" in plan.reasons[0] or "our own machines" in plan.reasons[0]


def test_a_slow_host_is_left_out_where_it_costs_more_than_it_brings() -> None:
    quick, slow = box("quick", cpus=32), box("slow", cpus=2, usd_per_hour=2.0)
    assert [group.instance_type for group in own(quick, slow).chosen.groups] == ["quick"]
    assert score(own(quick, slow)) <= score(own(quick)) * (1 + 1e-9)


def test_two_equal_hosts_are_both_used_where_that_is_worth_it() -> None:
    fast = [box(f"box{place}", cpus=4, network_mbit=1e4, usd_per_hour=0.01) for place in range(2)]
    both = own(*fast)
    assert score(both) <= score(own(fast[0])) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("host", "says"),
    [
        (box("box", usd_per_hour=None), "nobody said what box costs"),
        (box("box", cpus=None), "needs to know the CPUs of box"),
        (box("box", devices=("T4", "L4")), "unlike GPUs"),
        (box("box", devices=("GTX 9",)), "no rates of the GTX 9"),
        (box("c7i.large"), "as a type that can be rented"),
    ],
)
def test_what_a_plan_needs_to_know_is_asked_for(host: Host, says: str) -> None:
    with pytest.raises(BadInput, match=says) as refused:
        own(host)
    assert refused.value.hint


def test_the_example_can_be_planned_for() -> None:
    plan = own(*read_hosts(REPOSITORY / "examples" / "hosts.toml"))
    assert plan.chosen.groups[0].price_source == "the inventory"
    assert not any(way.quotas for way in plan.choices), "AWS has no say in them"


def test_hosts_that_were_measured_are_known_by_their_names() -> None:
    """Their samples count in plans for them, and say nothing of what is rented."""
    steps = (("box0", 32, 0.05), ("box0", 64, 0.09), ("box1", 32, 0.1), ("box1", 64, 0.18))
    samples = tuple(
        StepSample(nodes=(Node(type=name, workers=1),), local_batch_size=size, step_time_s=took_s)
        for name, size, took_s in steps
    )
    known = profile().model_copy(update={"samples": samples})
    hosts = [box("box0"), box("box1")]
    plan = on_own_machines(known, load_catalog(), hosts, GOAL, OPTIONS, seed=0, now=NOW)
    assert {group.evidence for group in plan.chosen.groups} == {"measured"}
    assert plan.chosen.groups[0].instance_type == "box0", "the quicker of two at one price"
    assert sampled_machines(known, load_catalog().instance_types) is None
