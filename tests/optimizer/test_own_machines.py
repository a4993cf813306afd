"""Plans for one's own machines: each is there once, its electricity is the bill, and the better of all ways wins."""

from __future__ import annotations

import datetime
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import hetopt
from hetopt.backends import on_this_machine
from hetopt.core.batch_partition import WorkerTime, solve_shares
from hetopt.core.errors import BadInput, NoFeasiblePlan
from hetopt.core.hosts import Host, Hours, alike
from hetopt.core.profile import Profile, Provisioned
from hetopt.optimizer.market.catalog import load_catalog
from hetopt.optimizer.market.clouds import owned
from hetopt.optimizer.plan import Goal, Plan
from hetopt.optimizer.recommendation.candidates import expected_scores
from hetopt.optimizer.recommendation.places import better_of, on_own_machines
from hetopt.optimizer.recommendation.recommend import Options, PlanRequest, recommend
from hetopt.optimizer.step_time.transfer import mean_worker
from hetopt.reports.plan_document import next_commands, page
from hetopt.reports.text import whole

REPOSITORY = Path(__file__).resolve().parents[2]
GOAL = Goal(ends="epochs", amount=50, budget_usd=5)
OPTIONS = Options(trials=0, batch_size=128, types=("c7i.large", "c7i.xlarge"), max_workers=4)
NOW = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)


@cache
def profile() -> Profile:
    return Profile.load(REPOSITORY / "tests" / "recorded" / "resnet20-cifar10.json")


@cache
def rented() -> Plan:
    return recommend(PlanRequest(profile(), load_catalog(), GOAL, OPTIONS), seed=0, now=NOW)


def own(*hosts: Host) -> Plan:
    return on_own_machines(PlanRequest(profile(), load_catalog(), GOAL, OPTIONS), hosts, seed=0, now=NOW)


def score(plan: Plan) -> float:
    """What plans are ranked by: means, where people are shown medians."""
    return float(expected_scores([plan.chosen], OPTIONS.limits(GOAL))[0])


def box(name: str, **more: object) -> Host:
    told = {"cpus": 8, "memory_gib": 32.0, "network_mbit": 940.0, "usd_per_hour": 0.1, **more}
    return Host(name=name, address=name, **told)


HOSTS = st.builds(
    box,
    st.just("box"),
    cpus=st.sampled_from([2, 4, 8, 16, 64]),
    network_mbit=st.sampled_from([25.0, 100.0, 940.0, 1e4]),
    usd_per_hour=st.floats(0.005, 1.0),
    devices=st.sampled_from([("cpu",), ("T4",), ("L4", "L4")]),
    hours=st.sampled_from([None, Hours.model_validate("18:00-08:00")]),
)


def named(hosts: list[Host]) -> list[Host]:
    return [
        host.model_copy(update={"name": f"box{place}", "address": f"box{place}"}) for place, host in enumerate(hosts)
    ]


INVENTORIES = st.lists(HOSTS, min_size=1, max_size=3).map(named)


@given(INVENTORIES)
def test_the_plan_is_never_worse_than_the_better_of_either_alone(hosts: list[Host]) -> None:
    plan = better_of(PlanRequest(profile(), load_catalog(), GOAL, OPTIONS), hosts, rented, seed=0, now=NOW)
    alone = [score(rented())]
    try:
        mine = own(*hosts)
        alone.append(score(mine))
        groups = mine.chosen.groups
        kinds = alike(hosts)
        assert all(group.is_own and group.machines <= len(kinds[group.instance_type]) for group in groups)
        costs = {host.name: host.cost_usd_per_hour or 0.0 for host in hosts}
        hourly = sum(group.machines * costs[group.instance_type] for group in groups)
        took = mine.chosen.prediction
        worked_s = took.startup_s + took.training_s.value
        assert took.total_s.value >= (took.startup_s + took.training_s.value) * (1 - 1e-9)
        if all(host.hours is None for host in hosts):
            assert took.closed_s == 0
        billed_usd = sum(term.usd for term in took.cost_terms)
        assert billed_usd == pytest.approx(hourly * worked_s / 3600, rel=1e-6), "and nothing beside"
    except NoFeasiblePlan:
        pass
    assert score(plan) <= min(alone) * (1 + 1e-9)
    assert {"own", "rented"} & {name for way in plan.choices for name in way.names} or any(
        "machines: Nothing fits " in reason for reason in plan.reasons
    )


def test_hours_count_where_the_run_does_not_end_in_them() -> None:
    here = NOW.astimezone()
    opens, closes = here + datetime.timedelta(hours=3), here + datetime.timedelta(hours=17)
    later = Hours.model_validate(f"{opens:%H:%M}-{closes:%H:%M}")
    now_open = Hours.model_validate(f"{here:%H:%M}-{closes:%H:%M}")
    plans = [own(box("box", hours=hours)) for hours in (None, now_open, later)]
    assert ["closed for 3 h of that" in whole(page(plan)) for plan in plans] == [False, False, True]
    free, open_, waits = (plan.chosen.prediction for plan in plans)
    assert open_.total_s.value == pytest.approx(free.total_s.value), "it ends before they do"
    assert (free.closed_s, open_.closed_s) == (0, 0)
    assert waits.closed_s == pytest.approx(3 * 3600), "it begins with them"
    assert waits.total_s.high == pytest.approx(free.total_s.high + 3 * 3600)
    assert waits.cost_usd.value == pytest.approx(free.cost_usd.value), "nothing is drawn before"


def test_a_box_with_unlike_gpus_has_a_worker_for_each() -> None:
    """The plan, and the run that it starts, give each as much as it computes in the same time."""
    both = own(box("both", devices=("T4", "L4", "T4")))
    (group,) = both.chosen.groups
    assert group.workers_per_machine == 3
    slow, quick, other = group.local_batch_sizes
    assert quick / slow > 1.2
    assert abs(slow - other) <= 1
    assert [worker.local_batch_size for worker in both.run.workers] == [slow, quick, other]
    assert group.hardware is not None
    assert group.hardware.in_words == "2 × T4 16 GiB + L4 22 GiB"
    slowest, quickest = (own(box("same", devices=(name,) * 3)).chosen.prediction for name in ("T4", "L4"))
    assert quickest.compute_s < both.chosen.prediction.compute_s < slowest.compute_s


@cache
def score_of_one(card: str) -> float:
    """Return the score of a box with this card alone."""
    return score(own(box("box", devices=(card,))))


CARDS = st.lists(st.sampled_from(["RTX 3090", "GTX 1080 Ti", "T4", "L4"]), min_size=2, max_size=3, unique=True)


@given(CARDS)
def test_a_card_that_does_not_pay_is_left_out(cards: list[str]) -> None:
    """A box with unlike cards is never worse than one that has one of them alone, and what runs has those cards."""
    whole = box("box", devices=tuple(cards))
    plan = own(whole)
    assert score(plan) <= min(map(score_of_one, cards)) * (1 + 1e-9)
    run, [host] = on_this_machine._mapped(plan, [whole])
    assert (host.way, len(host.devices)) == (whole.way, len(run.run.workers))
    assert set(host.devices) <= set(cards)


def test_the_precision_is_that_of_the_machines_in_a_cluster(tmp_path: Path) -> None:
    """A card that multiplies fp16 at 1/64 of fp32 is planned in fp32, and changes nothing for others."""
    inventory, job = tmp_path / "hosts.toml", {"params": "110M", "samples": "3M", "tokens": 128}
    hosts = "usd_per_hour = 0.1\nnetwork_mbit = 940\ncpus = 8\n[old]\ndevices = ['GTX 1080 Ti']\n"
    inventory.write_text(hosts, encoding="utf-8")
    alone, beside = (hetopt.estimate(inventory=inventory, market=market, **job) for market in ("own", "any"))
    assert (alone.plan.chosen.precision, beside.plan.chosen.precision) == ("fp32", "bf16")
    hurried = hetopt.estimate(inventory=inventory, market="any", deadline="3h", **job)
    sentences = [estimate.beside for estimate in (alone, beside, hurried)]
    assert sentences == [None, None, "Your own machines: Nothing fits a deadline of 3 h."]


TIMES = st.builds(
    WorkerTime,
    fixed_s=st.floats(0, 0.01),
    per_sample_s=st.floats(1e-4, 1e-2),
    micro_batch=st.none() | st.integers(1, 64),
)


@given(st.lists(TIMES, min_size=1, max_size=5), st.integers(50, 400))
def test_one_that_stands_for_unlike_workers_ends_when_they_do(times: list[WorkerTime], samples: int) -> None:
    free = [replace(time, micro_batch=None) for time in times]
    exact = solve_shares(free, samples * len(free)).compute_s
    most_s = max(time.per_sample_s for time in free)  # by what no sample can be divided, and nobody has nothing
    assert mean_worker(free).time_s(samples) <= exact * (1 + 1e-9)
    assert exact <= max(mean_worker(free).time_s(samples) + most_s, max(time.time_s(1) for time in free)) * (1 + 1e-9)
    one = mean_worker([times[0]] * 3)
    assert one.time_s(samples) == pytest.approx(times[0].time_s(samples)), "with its micro-batches"


@pytest.mark.parametrize(
    ("host", "says"),
    [
        (box("box", usd_per_hour=None), r"needs to know .* of box: add usd_per_hour = 0.10 \(or kw"),
        (box("box", cpus=None, usd_per_hour=None), "of box: add cpus = 8, usd_per_hour = 0.10"),
        (box("box", devices=("GTX 9",)), "box: There is no GPU called 'GTX 9'"),
        (box("box", devices=("M2 Max",)), "box: M2 Max is made by Apple"),
        (box("box", devices=("3090",)), "box: .*did you mean 'RTX 3090' or 'RTX 3090 Ti'"),
        (box("box", devices=("A100",)), "made with 40 GiB or 80 GiB.*write 'A100 40 GiB' or 'A100 80 GiB'"),
        (box("c7i.large"), "as a type that can be rented"),
    ],
)
def test_what_a_plan_needs_to_know_is_asked_for(host: Host, says: str) -> None:
    with pytest.raises(BadInput, match=says) as refused:
        own(host)
    assert refused.value.hint


def test_cards_that_nobody_rents_are_planned_by_their_data_sheets() -> None:
    """Whatever spelling; an own figure of a driver is the same card."""
    for name in ("RTX 3090", "NVIDIA GeForce RTX 3090", "rtx-3090"):
        [machine] = owned(load_catalog(), [box("box", devices=(name,))], NOW.date())[0].listings.values()
        accelerator = machine.instance_type.accelerator
        assert accelerator is not None
        assert (accelerator.name, accelerator.memory_gib) == ("RTX 3090", 24)
        assert accelerator.model is not None
        assert accelerator.model.fp32_tflops == 35.6


def test_nothing_is_rented_where_that_is_asked_for(tmp_path: Path) -> None:
    """Though renting would be better: who names machines of their own may have other reasons than money."""
    path = tmp_path / "hosts.toml"
    path.write_text("[slow]\ncpus = 2\nnetwork_mbit = 940\nusd_per_hour = 0.5\n", encoding="utf-8")
    wish = {"epochs": 50, "budget_usd": 50, "types": "c7i.large", "trials": 0, "inventory": path}
    better = hetopt.recommend(profile(), **wish)
    assert not any(group.is_own for group in better.chosen.groups)
    plan = hetopt.recommend(profile(), market="own", **wish)
    assert all(group.is_own for group in plan.chosen.groups)
    assert next_commands(plan, "plan.json") == ("hetopt launch plan.json --on ssh --inventory hosts.toml",)


def test_a_start_takes_what_launches_on_that_host_took() -> None:
    """And what one's own machines took says nothing of rented ones, which boot."""
    took = {"box0": (4.0, 6.0), "box1": (30.0,)}
    launches = [
        Provisioned(run=f"{name}-{n}", types=(name,), took_s=s)
        for name, every in took.items()
        for n, s in enumerate(every)
    ]
    launches.append(Provisioned(run="both", types=("box0", "box1"), took_s=33.0))
    known = profile().model_copy(update={"provisioned": tuple(launches)})

    def start_s(*hosts: Host) -> float:
        plan = on_own_machines(PlanRequest(known, load_catalog(), GOAL, OPTIONS), hosts, seed=0, now=NOW)
        return plan.chosen.prediction.startup_s

    assert start_s(box("box0")) == pytest.approx(5.0)
    assert start_s(box("box1")) == pytest.approx(30.0)
    assert start_s(box("box2")) == pytest.approx(profile().startup_s), "nothing is known of it"
    again = recommend(PlanRequest(known, load_catalog(), GOAL, OPTIONS), seed=0, now=NOW)
    assert again.chosen.prediction == rented().chosen.prediction
