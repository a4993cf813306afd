"""Vectors and laws of the belief about spot pools, of machines that go together, and of the file of what was seen."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hetopt.core.errors import BadInput
from hetopt.optimizer.cost.observed_preemptions import ObservedPool, ObservedPreemptions, keep
from hetopt.optimizer.cost.preemption_rate import (
    CALM,
    SCARCE,
    SHOCKS,
    CommonShocks,
    HazardComponent,
    PreemptionRatePosterior,
)

UNKNOWN = PreemptionRatePosterior.prior(None)
losses_seen = st.integers(0, 50)
hours_seen = st.floats(0.1, 5000)


@pytest.mark.parametrize(
    ("losses", "hours", "scarce", "mean"),
    [(2, 10, 0.997, 0.249), (0, 10, 0.018, 0.0020), (0, 200, 0.0012, 4.2e-4), (1, 100, 0.047, 0.0022)],
)
def test_vectors_of_the_posterior(losses: int, hours: float, scarce: float, mean: float) -> None:
    belief = UNKNOWN.after(losses, hours)
    assert belief.scarce_chance == pytest.approx(scarce, rel=0.04)
    assert belief.mean_per_hour == pytest.approx(mean, rel=0.04)


@given(losses_seen, hours_seen)
def test_a_component_lies_between_its_prior_and_what_was_seen(losses: int, hours: float) -> None:
    for part in (CALM, SCARCE):
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
    alone, bulk = CALM.after(losses, hours), UNKNOWN.after(losses, hours, lost_together=together).calm
    assert abs(bulk.mean_per_hour - CALM.mean_per_hour) <= abs(alone.mean_per_hour - CALM.mean_per_hour) + 1e-12


def test_samples_have_the_mean_and_are_seeded() -> None:
    draws = UNKNOWN.sample(200_000, np.random.default_rng(1))
    assert float(draws.mean()) == pytest.approx(UNKNOWN.mean_per_hour, rel=0.03)
    assert np.array_equal(draws, UNKNOWN.sample(200_000, np.random.default_rng(1)))


def test_what_cannot_be_observed_is_refused() -> None:
    for seen in ({"losses": 1, "instance_hours": 0}, {"losses": -1, "instance_hours": 1}):
        with pytest.raises(ValueError, match="observed"):
            UNKNOWN.after(**seen)
    with pytest.raises(ValueError, match="above 0"):
        HazardComponent(shape=0, rate_h=1)


@given(st.floats(0, 1), st.floats(0.05, 1), st.integers(1, 64))
def test_shocks_stop_a_pool_less_often_than_single_losses(share: float, reach: float, machines: int) -> None:
    shocks = CommonShocks(share=share, reach=reach)
    effective = float(shocks.effective_machines(machines))
    assert 1 - 1e-9 <= effective <= machines + 1e-9
    assert float(CommonShocks(share=0, reach=reach).effective_machines(machines)) == pytest.approx(machines)


def lost_with_another(machines: int) -> float:
    """Share of the lost machines that go together with another one, of a pool of so many."""
    return SHOCKS.share * (1 - (1 - SHOCKS.reach) ** (machines - 1))


def test_shocks_reproduce_the_pools_that_they_were_taken_from() -> None:
    """48 % of the lost machines of two pools of four went with another; sizes 2, 3, 4 came 40, 14 and 2 times."""
    assert lost_with_another(4) == pytest.approx(0.48, abs=0.01)
    sizes = [math.comb(4, k) * SHOCKS.reach**k * (1 - SHOCKS.reach) ** (4 - k) for k in (2, 3, 4)]
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
    assert (
        again.belief("g5.xlarge", "us-east-1", "<5%").mean_per_hour > PreemptionRatePosterior.prior("<5%").mean_per_hour
    )
    assert again.belief("g5.2xlarge", "us-east-1", "<5%") == PreemptionRatePosterior.prior("<5%")
    assert again.belief("g5.xlarge", "us-east-1", "<5%", zone="use1-az2") == PreemptionRatePosterior.prior("<5%")


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
    assert watched is not None
    assert (watched.instance_hours, watched.losses, watched.lost_together) == (40.0, 4, 1.0)
    assert seen.belief("g5.xlarge", "us-east-1", None) == PreemptionRatePosterior.prior(None).after(4, 40.0)
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
