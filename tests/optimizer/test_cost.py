"""Vectors of Daly's model, laws of interruptions, and bills that add up.

Bills add up, obey the provider's rules, and equal to the cent what a short script makes of the catalogue's rows.
The expected time with losses: formula, discrete-event simulation and closed forms agree within 1 %.
Vectors and laws of the belief about spot pools, of machines that go together, and of the file of what was seen.
Laws of the simulated distribution: seeded, quick, centred on the formulas, and monotone in every limit.
"""

from __future__ import annotations

import csv
import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from numpy.typing import ArrayLike, NDArray

from hetopt.core.errors import BadInput
from hetopt.optimizer.cost.bill import (
    Usage,
    itemise,
    load_billing,
    requests,
    total_usd,
)
from hetopt.optimizer.cost.cost import (
    checkpoint_pause_s,
    checkpoint_time_s,
    daly_interval_s,
    factor_at,
    interruptions,
    interval_under_belief_s,
    unavailable_s,
)
from hetopt.optimizer.cost.monte_carlo import Finalist, RentedPool, losses, possible_runs, waits
from hetopt.optimizer.cost.preemption_rate import (
    HOURS_PER_MONTH,
    MONTH_LOST,
    OUTAGE_SHAPE,
    PAST_WEIGHT,
    RECORDED,
    SHOCK_REACH,
    SHOCK_SHARE,
    HazardComponent,
    ObservedPool,
    ObservedPreemptions,
    Outages,
    PreemptionRatePosterior,
    effective_machines,
    keep,
    scarce_prior,
)
from hetopt.optimizer.market.catalog import BUNDLED, Offer, load_catalog

HOUR = 3600.0
UNKNOWN = PreemptionRatePosterior.prior(None)
NO_OUTAGES = Outages(hours=0.0)
works = st.floats(60, 1e6)
rates_per_hour = st.floats(1e-4, 2)


def at_dalys_interval(work_s: float, losses_per_hour: float, checkpoint_s: float, restart_s: float) -> float:
    interval_s = daly_interval_s(HOUR / losses_per_hour, checkpoint_s)
    return float(factor_at(work_s, losses_per_hour, interval_s, checkpoint_s, restart_s))


@pytest.mark.parametrize(
    ("theta_h", "checkpoint_s", "restart_s", "best_min", "overhead"),
    [
        (4, 10, 180, 8.83, 0.0513),
        (24, 10, 180, 21.80, 0.0175),
        (300, 10, 180, 77.35, 0.0045),
        (1, 120, 600, 14.19, 0.5472),
    ],
)
def test_daly_vectors(theta_h: float, checkpoint_s: float, restart_s: float, best_min: float, overhead: float) -> None:
    assert float(daly_interval_s(theta_h * HOUR, checkpoint_s)) / 60 == pytest.approx(best_min, rel=2e-3)
    assert at_dalys_interval(1e9, 1 / theta_h, checkpoint_s, restart_s) - 1 == pytest.approx(overhead, rel=2e-2)


@given(works, rates_per_hour, st.floats(0.1, 60), st.floats(1, 600), st.floats(1, 3))
def test_more_losses_slower_restarts_never_help(
    work: float, rate: float, checkpoint: float, restart: float, more: float
) -> None:
    def factor(rate: float, restart: float) -> float:
        return at_dalys_interval(work, rate, checkpoint, restart)

    assert factor(rate, restart) >= 1 - 1e-9
    assert factor(rate, restart * more) >= factor(rate, restart) * (1 - 1e-9)
    assert factor(rate * more, restart) >= factor(rate, restart) * (1 - 1e-3)  # the interval is only nearly optimal


BILLING = load_billing()
CATALOG = load_catalog()


def rental(name: str, machines: int, market: str) -> tuple[Offer, int]:
    listing = CATALOG.listing(name)
    price = listing.spot if market == "spot" else listing.on_demand
    assert price is not None
    return Offer(instance_type=listing.instance_type, price=price, band=None), machines


# ---- the independent script: rows and terms of the files, Decimal, and the provider's rules written down once more


def from_the_rows(
    machines: list[tuple[str, int, str]],
    *,
    start_s: float,
    work_s: float,
    lost_s: float,
    checkpoint_gb: float,
    checkpoints: int,
    restores: int,
    disk_gb: int,
) -> Decimal:
    with (BUNDLED / "regions" / "us-east-1.csv").open(encoding="utf-8", newline="") as stream:
        rows = {row["instance_type"]: row for row in csv.DictReader(stream)}
    terms = {
        name: Decimal(str(term["value"]))
        for name, term in json.loads((BUNDLED / "billing.json").read_text(encoding="utf-8"))["terms"].items()
    }
    seconds = max(Decimal(str(start_s)) + Decimal(str(work_s)) + Decimal(str(lost_s)), terms["minimum_billed_s"])
    hours = seconds / 3600
    volume_hourly = disk_gb * terms["ebs_gp3_usd_per_gb_month"] / terms["hours_per_month"]
    usd = Decimal(0)
    for name, count, market in machines:
        hourly = Decimal(rows[name]["on_demand_usd_per_hour"])
        if market == "spot":
            saving = rows[name]["spot_saving_percent"]
            estimate = round(hourly * (100 - Decimal(saving)) / 100, 6) if saving else Decimal("nan")
            hourly = Decimal(rows[name]["spot_usd_per_hour"] or estimate)
        usd += count * hours * (hourly + volume_hourly + terms["public_ipv4_usd_per_hour"])
    size = Decimal(str(checkpoint_gb)) * 10**9
    parts = math.ceil(size / (8 * 1024 * 1024))
    puts = checkpoints * (parts if parts <= 1 else parts + 2)
    usd += puts * terms["s3_usd_per_1000_puts"] / 1000 + restores * parts * terms["s3_usd_per_1000_gets"] / 1000
    real = (Decimal(str(start_s)) + Decimal(str(work_s)) + Decimal(str(lost_s))) / 3600
    usd += Decimal(str(checkpoint_gb)) * min(checkpoints, 2) * real / 730 * terms["s3_usd_per_gb_month"]
    return usd


BILLS = [
    ([("g5.xlarge", 4, "spot")], 180, 7200, 300, 0, 0, 0, 100),
    ([("g5.xlarge", 4, "spot"), ("g4dn.xlarge", 2, "on-demand")], 180, 86400, 4000, 1.2, 40, 12, 200),
    ([("c7i.4xlarge", 16, "spot"), ("c7g.4xlarge", 3, "spot")], 240, 36000, 900, 0.4, 9, 19, 100),
    ([("p5.48xlarge", 1, "on-demand")], 0, 10, 0, 0.001, 1, 0, 100),
]


@pytest.mark.parametrize(("machines", "start", "work", "lost", "checkpoint", "written", "restores", "disk_gb"), BILLS)
def test_every_bill_equals_an_independent_script_to_the_cent(
    machines: list[tuple[str, int, str]],
    start: float,
    work: float,
    lost: float,
    checkpoint: float,
    written: int,
    restores: int,
    disk_gb: int,
) -> None:
    rentals = [rental(*machine) for machine in machines]
    usage = Usage(
        start_up_s=start,
        work_s=work,
        interruption_s=lost,
        checkpoint_bytes=checkpoint * 1e9,
        checkpoints=written,
        restores=restores,
    )
    lines = itemise(rentals, usage, BILLING, disk_gb=disk_gb)
    expected = from_the_rows(
        machines,
        start_s=start,
        work_s=work,
        lost_s=lost,
        checkpoint_gb=checkpoint,
        checkpoints=written,
        restores=restores,
        disk_gb=disk_gb,
    )
    assert f"{sum(line.usd for line in lines):.2f}" == f"{expected:.2f}"
    assert sum(line.usd for line in lines) == pytest.approx(float(expected), rel=1e-9)
    total = total_usd(
        usage,
        BILLING,
        machine_usd_per_hour=sum(count * offer.price.usd_per_hour for offer, count in rentals),
        machines=float(sum(count for _, count in rentals)),
        disk_gb=disk_gb,
    )
    assert float(total) == pytest.approx(float(expected), rel=1e-9)


@given(
    st.integers(1, 64),
    st.floats(0, 1000),
    st.floats(0, 1e6),
    st.floats(0, 1e5),
    st.floats(0, 1e11),
    st.integers(0, 1000),
)
def test_the_lines_sum_to_the_total(
    machines: int, start: float, work: float, lost: float, checkpoint: float, written: int
) -> None:
    usage = Usage(
        start_up_s=start,
        work_s=work,
        interruption_s=lost,
        checkpoint_bytes=checkpoint,
        checkpoints=float(written),
        restores=3.0,
    )
    kind = rental("g5.xlarge", machines, "spot")
    lines = itemise([kind], usage, BILLING)
    total = total_usd(
        usage, BILLING, machine_usd_per_hour=machines * kind[0].price.usd_per_hour, machines=float(machines)
    )
    assert sum(line.usd for line in lines) == pytest.approx(float(total), rel=1e-9)


@given(st.floats(0, 1e12))
def test_larger_objects_never_need_fewer_requests(size: float) -> None:
    assert float(requests(size)) <= float(requests(2 * size))
    assert float(requests(size)) == 0 if size == 0 else float(requests(size)) >= 1


def best_interval_s(mean_time_between_losses_s: ArrayLike, checkpoint_s: float) -> NDArray[np.float64]:
    """The root of 1 - t / Theta = e^(-(t + C) / Theta), by Newton's method from Daly's approximation."""
    theta = np.asarray(mean_time_between_losses_s, dtype=np.float64)
    x, c = daly_interval_s(theta, checkpoint_s) / theta, checkpoint_s / theta
    x = np.clip(x, 1e-12, 1 - 1e-12)
    for _ in range(6):
        decay = np.exp(-(x + c))
        x = np.clip(x - (1 - x - decay) / (decay - 1), x / 10, 1.0)
    return np.asarray(x * theta, dtype=np.float64)


CASES = [
    # Theta in hours, checkpoint, restart
    (0.5, 20.0, 120.0),
    (1.0, 120.0, 600.0),
    (4.0, 10.0, 180.0),
    (24.0, 30.0, 300.0),
]


def simulated_s(
    work_s: float, theta_s: float, interval_s: float, checkpoint_s: float, restart_s: float, draw: random.Random
) -> float:
    """One run, event by event: segments of work and a checkpoint, each broken off by a loss or not, and restarts."""
    now = done = 0.0
    next_loss = draw.expovariate(1 / theta_s)
    while done < work_s:
        segment = min(interval_s, work_s - done) + checkpoint_s
        if now + segment <= next_loss:
            now += segment
            done += segment - checkpoint_s
            continue
        now = next_loss
        next_loss = now + draw.expovariate(1 / theta_s)
        while now + restart_s > next_loss:
            now = next_loss
            next_loss = now + draw.expovariate(1 / theta_s)
        now += restart_s
    return now


@pytest.mark.parametrize(("theta_h", "checkpoint_s", "restart_s"), CASES)
def test_formula_events_and_draws_agree_within_a_percent(theta_h: float, checkpoint_s: float, restart_s: float) -> None:
    theta = theta_h * HOUR
    interval = float(best_interval_s(theta, checkpoint_s))
    work = 200 * interval
    formula = float(factor_at(work, 1 / theta_h, interval, checkpoint_s, restart_s))
    draw = random.Random(7)
    runs = [simulated_s(work, theta, interval, checkpoint_s, restart_s, draw) / work for _ in range(400)]
    assert np.mean(runs) == pytest.approx(formula, rel=0.01)
    _, _, added_s = losses(
        np.full(4000, work),
        np.full(4000, 1 / theta_h),
        interval,
        checkpoint_s,
        restart_s,
        np.random.default_rng(3),
    )
    factors = 1 + added_s / work
    assert float(factors.mean()) == pytest.approx(formula, rel=0.01)
    # The spread is that of the events too: what a promise of 90 % rests on.
    assert float(np.quantile(factors, 0.9)) == pytest.approx(float(np.quantile(runs, 0.9)), rel=0.01)


@pytest.mark.parametrize(("theta_h", "checkpoint_s", "restart_s"), CASES)
def test_closed_forms_are_within_a_percent_of_the_best_interval(
    theta_h: float, checkpoint_s: float, restart_s: float
) -> None:
    """Daly's interval costs at most a percent more time than the root; a scan finds none that is better."""
    theta = theta_h * HOUR
    best = float(best_interval_s(theta, checkpoint_s))

    def factor(interval: float) -> float:
        return float(factor_at(1e9, 1 / theta_h, interval, checkpoint_s, restart_s))

    assert float(daly_interval_s(theta, checkpoint_s)) == pytest.approx(best, rel=0.01)
    assert factor(float(daly_interval_s(theta, checkpoint_s))) <= 1.01 * factor(best)
    assert factor(best) <= min(factor(best * scale) for scale in np.geomspace(0.2, 5, 201)) * (1 + 1e-6)


@given(st.floats(60, 1e6), st.floats(1e-3, 2), st.floats(1, 60), st.floats(1, 600))
def test_time_is_at_least_work_and_checkpoints(work: float, hazard: float, checkpoint: float, restart: float) -> None:
    interval = float(best_interval_s(HOUR / hazard, checkpoint))
    factor = float(factor_at(work, hazard, interval, checkpoint, restart))
    assert factor >= (1.0 if work <= interval else 1 + checkpoint / interval) - 1e-9
    assert float(factor_at(work, 0.0, interval, checkpoint, restart)) == pytest.approx(
        1.0 if work <= interval else 1 + checkpoint / interval
    )


@pytest.mark.parametrize("machines", [1, 4, 16])
@pytest.mark.parametrize("checkpoint_s", [1.0, 10.0, 100.0])
def test_an_uncertain_hazard_has_the_interval_that_a_scan_finds(machines: int, checkpoint_s: float) -> None:
    hazards = PreemptionRatePosterior.prior(None).sample(4000, np.random.default_rng(0))[0][None, :] * machines
    best = float(interval_under_belief_s(hazards, 1 / 4000, checkpoint_s, 210.0)[0])

    def factor(interval: float) -> float:
        return float(factor_at(1e9, hazards, interval, checkpoint_s, 210.0).mean())

    assert factor(best) <= min(factor(best * scale) for scale in np.geomspace(0.2, 5, 61)) * 1.002


def test_a_known_hazard_has_the_interval_of_its_equation() -> None:
    rates = np.array([0.001, 0.05, 1.0])
    found = interval_under_belief_s(rates[:, None], 1.0, 30.0, 240.0)
    assert found == pytest.approx(best_interval_s(HOUR / rates, 30.0), rel=0.01)


@pytest.mark.parametrize("machines", [1, 4, 16])
def test_the_forecast_over_the_prior_is_the_mean_of_possible_runs(machines: int) -> None:
    """The formula that prices clusters against draws of runs whose hazard nobody knows: within 1 %."""
    belief = replace(UNKNOWN, outages=NO_OUTAGES)
    effective = float(effective_machines(machines))
    formula = interruptions(
        8 * HOUR,
        calm_per_hour=effective * UNKNOWN.calm.mean_per_hour,
        scarce_per_hour=effective * UNKNOWN.scarce.mean_per_hour,
        scarce_chance=belief.scarce_chance,
        checkpoint_s=10.0,
        restart_s=210.0,
    )
    run = finalist(machines, belief, start_up_s=0.0, interval_s=float(formula.interval_s))
    drawn = possible_runs([run], seed=0, draws=20_000)
    assert float(drawn.total_s.mean()) / (8 * HOUR) == pytest.approx(float(formula.expected_factor), rel=0.01)


def test_what_saves_nothing_loses_all_that_was_done() -> None:
    """The formula with no interval against draws of runs that begin again, and against the equation of one segment."""
    belief = replace(UNKNOWN, outages=NO_OUTAGES)
    hazard = {
        "calm_per_hour": UNKNOWN.calm.mean_per_hour,
        "scarce_per_hour": UNKNOWN.scarce.mean_per_hour,
        "scarce_chance": belief.scarce_chance,
        "checkpoint_s": 10.0,
        "restart_s": 210.0,
    }
    formula = interruptions(HOUR / 2, interval_s=np.inf, **hazard)
    run = finalist(1, belief, start_up_s=0.0, work_s=HOUR / 2, interval_s=np.inf)
    drawn = possible_runs([run], seed=0, draws=20_000)
    assert float(drawn.total_s.mean()) / (HOUR / 2) == pytest.approx(float(formula.expected_factor), rel=0.01)
    rate = 0.4 / HOUR
    whole = float(factor_at(8 * HOUR, 0.4, np.inf, 10.0, 0.0))
    assert whole == pytest.approx(math.expm1(8 * HOUR * rate) / (8 * HOUR * rate))
    assert interruptions(8 * HOUR, interval_s=np.inf, **hazard).expected_factor > 2 * formula.expected_factor


@given(st.integers(10**6, 10**11), st.sampled_from([*MONTH_LOST]), st.floats(0.05, 48))
def test_a_little_more_work_takes_a_little_longer(gradient_bytes: int, band: str | None, work_h: float) -> None:
    """No amount of work is where a plan falls off a cliff: a tenth more is never a third longer, however large a
    checkpoint is."""
    belief = PreemptionRatePosterior.prior(band)
    times_s = [
        work_s
        * float(
            interruptions(
                work_s,
                calm_per_hour=belief.calm.mean_per_hour,
                scarce_per_hour=UNKNOWN.scarce.mean_per_hour,
                scarce_chance=belief.scarce_chance,
                checkpoint_s=checkpoint_pause_s(gradient_bytes),
                written_s=checkpoint_time_s(gradient_bytes),
                restart_s=210.0,
            ).expected_factor
        )
        for work_s in (work_h * HOUR, 1.1 * work_h * HOUR)
    ]
    assert times_s[0] <= times_s[1] <= 1.33 * times_s[0]


losses_seen = st.integers(0, 50)
hours_seen = st.floats(0.1, 5000)


@pytest.mark.parametrize(
    ("losses", "hours", "scarce", "mean"),
    [(2, 10, 0.9998, 0.250), (0, 10, 0.011, 0.00102), (0, 200, 6.73e-4, 1.006e-4), (1, 100, 0.1154, 0.00253)],
)
def test_vectors_of_the_posterior(losses: int, hours: float, scarce: float, mean: float) -> None:
    belief = PreemptionRatePosterior(
        calm=HazardComponent(shape=0.5, rate_h=4937.0),
        scarce=HazardComponent(shape=1.0, rate_h=2.0),
        scarce_chance=0.0625,
    ).after(losses, hours)
    assert belief.scarce_chance == pytest.approx(scarce, rel=0.04)
    assert belief.mean_per_hour == pytest.approx(mean, rel=0.04)


@pytest.mark.parametrize("band", [*MONTH_LOST])
def test_a_band_loses_as_much_in_a_month_as_the_advisor_says(band: str | None) -> None:
    belief, month_h = PreemptionRatePosterior.prior(band), HOURS_PER_MONTH
    kept = (belief.calm.rate_h / (belief.calm.rate_h + month_h)) ** belief.calm.shape
    scarce = (belief.scarce.rate_h / (belief.scarce.rate_h + month_h)) ** belief.scarce.shape
    lost = 1 - (1 - belief.scarce_chance) * kept - belief.scarce_chance * scarce
    assert lost == pytest.approx(MONTH_LOST[band], abs=3e-3)


@given(st.integers(1, 40), st.floats(0.1, 400))
def test_outages_lie_between_their_prior_and_what_was_seen(outages: int, hours: float) -> None:
    prior, belief = UNKNOWN.outages, UNKNOWN.outages.after(outages, hours)
    low, high = sorted((prior.usual_h, hours / outages))
    assert low * (1 - 1e-9) <= belief.usual_h <= high * (1 + 1e-9)


def test_a_pool_is_away_for_what_its_two_states_say() -> None:
    """Of a known pool: hazard times outage of each working hour, and at first what is left of an outage."""
    count, hazard, outage_h = 100_000, 0.5, 2.0
    each = np.ones(count)
    later, first = waits(48 * HOUR * each, hazard * each, outage_h * HOUR * each, np.random.default_rng(0))
    assert float(later.mean()) == pytest.approx(48 * HOUR * hazard * outage_h, rel=0.02)
    left_h = outage_h * (1 + 1 / OUTAGE_SHAPE) / 2
    assert float(first.mean()) == pytest.approx(0.5 * left_h * HOUR, rel=0.02)


@pytest.mark.parametrize("band", [*MONTH_LOST])
def test_the_shown_upper_end_is_late_by_what_one_run_in_twenty_waits(band: str | None) -> None:
    """Within a factor of two of runs that are drawn, or of a fiftieth of the work: in a calm pool nothing waits."""
    belief, work = PreemptionRatePosterior.prior(band), np.full(50_000, 24 * HOUR)
    hazard, outage_h = belief.sample(len(work), np.random.default_rng(1))
    later, first = waits(work, hazard, HOUR * outage_h, np.random.default_rng(0))
    drawn = float(np.quantile(later + first, 0.95))
    expected, most = unavailable_s(work[:1], np.array([belief.missing]), np.array([belief.scarce_chance]))
    assert 0 < expected[0] <= most[0]
    assert most[0] < 2 * max(drawn, 0.02 * work[0])
    assert drawn < 2 * max(most[0], 0.02 * work[0])


def test_recordings_give_the_prior_and_one_of_them_does_not_decide() -> None:
    pools = ObservedPreemptions.load(RECORDED).pools
    assert all(pool.source and pool.times >= 10 for pool in pools)
    whole, outages = scarce_prior(pools)
    for out in range(len(pools)):
        scarce, others = scarce_prior(pools[:out] + pools[out + 1 :])
        assert scarce.mean_per_hour == pytest.approx(whole.mean_per_hour, rel=0.2)
        assert others.usual_h == pytest.approx(outages.usual_h, rel=0.25)


def test_rows_of_recordings_are_their_totals(shared_data: Path) -> None:
    """The rows that are in the shared data, counted again."""
    rows = {
        pool.source.split()[2].rstrip(":"): pool for pool in ObservedPreemptions.load(RECORDED).pools if pool.source
    }
    for path in shared_data.glob("spot-traces/*/*-node/*/*.json"):
        row, recorded = rows[str(path.relative_to(shared_data / "spot-traces"))], json.loads(path.read_text())
        running, hours = np.array(recorded["data"]), recorded["metadata"]["gap_seconds"] / HOUR
        drops = np.maximum(-np.diff(running), 0)
        assert (row.losses, row.events) == (drops.sum(), np.count_nonzero(drops))
        assert [row.instance_hours, row.outage_hours] == pytest.approx(
            [running.sum() * hours, (running.max() - running).sum() * hours], abs=0.1
        )


def test_machines_that_are_away_take_time_and_no_money() -> None:
    scarce = replace(UNKNOWN, scarce_chance=1.0)
    runs = [
        replace(finalist(4, replace(scarce, outages=outages)), work_s=HOUR) for outages in (scarce.outages, NO_OUTAGES)
    ]
    drawn = possible_runs(runs, seed=3)
    (away, there), costs = np.median(drawn.total_s, axis=1), np.median(drawn.cost_usd, axis=1)
    assert away > 1.1 * there
    assert costs[0] == pytest.approx(costs[1], rel=0.02)


@given(losses_seen, hours_seen)
def test_a_component_lies_between_its_prior_and_what_was_seen(losses: int, hours: float) -> None:
    for part in (UNKNOWN.calm, UNKNOWN.scarce):
        low, high = sorted((part.mean_per_hour, losses / hours))
        assert low * (1 - 1e-9) <= part.after(losses, hours).mean_per_hour <= high * (1 + 1e-9)


@given(losses_seen, hours_seen, losses_seen, hours_seen)
def test_what_is_seen_in_two_parts_is_what_is_seen_at_once(k1: int, h1: float, k2: int, h2: float) -> None:
    first = UNKNOWN.after(k1, h1)
    assume(1e-6 < first.scarce_chance < 1 - 1e-6)  # beyond, a probability has no digits left to come back with
    parts, whole = first.after(k2, h2), UNKNOWN.after(k1 + k2, h1 + h2)
    assert parts.mean_per_hour == pytest.approx(whole.mean_per_hour, rel=1e-6)


@given(st.integers(1, 40), hours_seen, st.floats(1, 4))
def test_machines_that_go_together_tell_less(losses: int, hours: float, together: float) -> None:
    """The estimate of a component moves less far from its prior, never beyond."""
    alone, bulk = UNKNOWN.calm.after(losses, hours), UNKNOWN.after(losses, hours, lost_together=together).calm
    assert (
        abs(bulk.mean_per_hour - UNKNOWN.calm.mean_per_hour)
        <= abs(alone.mean_per_hour - UNKNOWN.calm.mean_per_hour) + 1e-12
    )


@given(st.floats(0, 1), st.floats(0.05, 1), st.integers(1, 64))
def test_shocks_stop_a_pool_less_often_than_single_losses(share: float, reach: float, machines: int) -> None:
    effective = float(effective_machines(machines, share=share, reach=reach))
    assert 1 - 1e-9 <= effective <= machines + 1e-9
    assert float(effective_machines(machines, share=0, reach=reach)) == pytest.approx(machines)


def lost_with_another(machines: int) -> float:
    """Share of the lost machines that go together with another one, of a pool of so many."""
    return SHOCK_SHARE * (1 - (1 - SHOCK_REACH) ** (machines - 1))


def test_shocks_reproduce_the_pools_that_they_were_taken_from() -> None:
    """48 % of the lost machines of two pools of four went with another; sizes 2, 3, 4 came 40, 14 and 2 times."""
    assert lost_with_another(4) == pytest.approx(0.48, abs=0.01)
    sizes = [math.comb(4, k) * SHOCK_REACH**k * (1 - SHOCK_REACH) ** (4 - k) for k in (2, 3, 4)]
    assert [40 * size / sizes[0] for size in sizes] == pytest.approx([40, 14, 2], rel=0.1)


def test_shocks_hold_against_the_recorded_losses(shared_data: Path) -> None:
    """The share that goes together, counted again from the traces."""
    folder = shared_data / "spot-traces" / "preemption" / "4-node"
    if not folder.is_dir():
        pytest.skip("no traces")
    together = lost = 0
    for path in folder.rglob("*.json"):
        drops = -np.diff(np.array(json.loads(path.read_text())["data"]))
        lost += int(drops[drops > 0].sum())
        together += int(drops[drops > 1].sum())
    assert lost_with_another(4) == pytest.approx(together / lost, abs=0.03)


def test_the_file_of_what_was_seen_moves_the_belief_of_its_pool_alone() -> None:
    seen = ObservedPreemptions(until="2026-11-20T12:00:00+00:00")
    seen = seen.adding(
        ObservedPool(instance_type="g5.xlarge", region="us-east-1", zone="use1-az1", instance_hours=10, losses=1),
        until="2026-11-20T13:00:00+00:00",
    )
    seen = seen.adding(
        ObservedPool(
            instance_type="g5.xlarge", region="us-east-1", zone="use1-az1", instance_hours=10, losses=3, events=1
        ),
        until="2026-11-20T14:00:00+00:00",
    )
    assert (seen.pools[0].losses, seen.pools[0].events, seen.pools[0].instance_hours) == (4, 2, 20)
    assert seen.until == "2026-11-20T14:00:00+00:00"
    again = ObservedPreemptions.from_json(seen.model_dump_json(), origin="seen.json")
    assert again == seen
    prior = PreemptionRatePosterior.prior("<5%")
    assert prior.seeing(again.watched("g5.xlarge", "us-east-1")).mean_per_hour > prior.mean_per_hour
    assert prior.seeing(again.watched("g5.2xlarge", "us-east-1")) == prior
    assert prior.seeing(again.watched("g5.xlarge", "us-east-1", zone="use1-az2")) == prior


def test_zones_tell_of_the_region_together() -> None:
    """What was seen in two zones moves the belief of the region as much as the sum of it."""
    pools = [
        ObservedPool(
            instance_type="g5.xlarge", region="us-east-1", zone=zone, instance_hours=hours, losses=losses, events=losses
        )
        for zone, hours, losses in (("us-east-1a", 30.0, 3), ("us-east-1b", 10.0, 1))
    ]
    seen = ObservedPreemptions(until="2026-11-20T12:00:00+00:00", pools=tuple(pools))
    watched = seen.watched("g5.xlarge", "us-east-1")
    assert (watched.instance_hours, watched.losses, watched.lost_together) == (40.0, 4, 1.0)
    assert UNKNOWN.seeing(watched) == UNKNOWN.after(PAST_WEIGHT * 4, PAST_WEIGHT * 40.0)
    assert seen.watched("g5.xlarge", "us-east-1", zone="us-east-1c") is None
    assert seen.watched("g5.xlarge", "eu-west-1") is None
    assert watched.in_words == "4 losses in 40 instance-hours"


def test_runs_that_end_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "home" / "observed-losses.json"
    pool = ObservedPool(instance_type="g5.xlarge", region="us-east-1", instance_hours=1, losses=1, events=1)
    with ThreadPoolExecutor(8) as runs:
        list(runs.map(lambda _: keep(path, [pool], until="2026-11-20T12:00:00+00:00"), range(24)))
    kept = ObservedPreemptions.load(path)
    assert (kept.pools[0].instance_hours, kept.pools[0].losses, kept.pools[0].events) == (24, 24, 24)


@pytest.mark.parametrize(
    "pool",
    [
        {"instance_hours": 0, "losses": 1},
        {"instance_hours": 5, "losses": 1, "events": 2},
        {"instance_hours": 5, "losses": 1, "events": 0},
        {"instance_hours": -1, "losses": 0},
    ],
)
def test_an_impossible_file_is_one_sentence(pool: dict[str, float]) -> None:
    text = '{"kind": "observed-losses", "schema_version": 1, "until": "2026-11-20", "pools": [%s]}'
    inside = ", ".join(f'"{key}": {value}' for key, value in pool.items())
    with pytest.raises(BadInput, match="pools"):
        ObservedPreemptions.from_json(
            text % f'{{"instance_type": "g5.xlarge", "region": "us-east-1", {inside}}}', origin="seen.json"
        )


def known(rate: float) -> PreemptionRatePosterior:
    """A hazard that is known exactly."""
    part = HazardComponent(shape=1e8, rate_h=1e8 / rate)
    return PreemptionRatePosterior(calm=part, scarce=part, scarce_chance=0.0)


def finalist(
    machines: int, belief: PreemptionRatePosterior | None, *, start_up_s: float = 180.0, **facts: float
) -> Finalist:
    pool = RentedPool(machines=machines, usd_per_hour=0.4, price_log_sd=0.15 if belief else 0.0, belief=belief)
    usual = {
        "work_s": 8 * HOUR,
        "start_up_s": start_up_s,
        "restart_s": 210.0,
        "checkpoint_s": 10.0,
        "interval_s": 600.0,
    }
    return Finalist(pools=(pool,), billing=BILLING, **usual | facts)


def test_the_same_seed_gives_the_same_draws_and_another_others() -> None:
    many = [finalist(4, PreemptionRatePosterior.prior(None), steps_log_sd=0.2, start_up_log_sd=0.5)]
    first, again, other = (possible_runs(many, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.total_s, again.total_s)
    assert np.array_equal(first.cost_usd, again.cost_usd)
    assert not np.array_equal(first.total_s, other.total_s)


def test_nothing_unknown_gives_one_figure_and_its_bill() -> None:
    run = finalist(3, None, interval_s=np.inf)
    drawn = possible_runs([run], seed=0, draws=50)
    assert np.ptp(drawn.total_s) == 0
    bill = total_usd(Usage(start_up_s=180.0, work_s=run.work_s), BILLING, machine_usd_per_hour=1.2, machines=3.0)
    assert float(drawn.cost_usd[0, 0]) == pytest.approx(float(bill))


def test_chances_grow_with_the_limits_and_quantiles_with_the_share() -> None:
    run = finalist(4, PreemptionRatePosterior.prior(">20%"), steps_log_sd=0.3, start_up_log_sd=0.5)
    drawn = possible_runs([run], seed=0)
    deadlines = [float(np.quantile(drawn.total_s, q)) for q in (0.1, 0.5, 0.9, 0.99)]
    assert deadlines == sorted(deadlines)
    chances = [float(drawn.chance(deadline_s=deadline)[0]) for deadline in deadlines]
    assert chances == pytest.approx([0.1, 0.5, 0.9, 0.99], abs=0.002)
    both = float(drawn.chance(budget_usd=float(np.quantile(drawn.cost_usd, 0.9)), deadline_s=deadlines[2])[0])
    assert 0.8 <= both <= 0.9
    assert float(drawn.chance()[0]) == 1.0


def test_a_late_run_moves_in_time_if_the_budget_pays_for_it() -> None:
    """To the deadline, and all that stay are as they were; a budget that pays for none changes none."""
    run = replace(finalist(1, replace(UNKNOWN, scarce_chance=1.0)), deadline_s=12 * HOUR, on_demand_usd_per_hour=2.0)
    stays, moves, poor = (possible_runs([replace(run, budget_usd=usd)], seed=0) for usd in (0.0, 1e3, 1.0))
    late = moves.total_s < stays.total_s
    assert 0.1 < late.mean() < 0.9
    assert np.array_equal(moves.total_s, np.where(late, 12 * HOUR, stays.total_s))
    assert (moves.cost_usd > stays.cost_usd)[late].mean() > 0.9
    assert np.array_equal(poor.total_s, stays.total_s)


def test_losses_are_simulated_up_to_hopeless_hazards() -> None:
    drawn = possible_runs([finalist(256, known(3.0))], seed=0, draws=100)
    assert np.isfinite(drawn.total_s).all()
    assert float(drawn.chance(deadline_s=1e6)[0]) < 1
