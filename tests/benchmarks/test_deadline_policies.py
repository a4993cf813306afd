"""Deadline policies: the deadline holds whatever the pool does, the table agrees with simulation, ours is cheaper."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._deadline_policies import (
    Assignment,
    Choice,
    DeadlinePolicy,
    SwitchWhenLate,
    UniformProgress,
)
from benchmarks._expected_cost import ExpectedCost
from benchmarks._policy_runs import CostPromise, imagined, run_policy
from benchmarks._pool_capacity import Capacity, Seen

JOB = Assignment(
    work_s=4 * 3600.0,
    deadline_s=5.2 * 3600.0,
    changeover_s=360.0,
    spot_usd_per_hour=0.3,
    on_demand_usd_per_hour=1.0,
)
LOOK_S = 180.0
LOOKS = round(JOB.deadline_s / LOOK_S) + 2
PAIRS = Capacity.unknown(nodes=3)
OURS = ExpectedCost(JOB, PAIRS)
POLICIES: list[DeadlinePolicy] = [SwitchWhenLate(), UniformProgress(), OURS]
names = [type(policy).__name__ for policy in POLICIES]
ALONE_USD = (JOB.work_s + JOB.changeover_s) / 3600


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=30), st.sampled_from(POLICIES))
def test_the_deadline_holds_whatever_the_pool_does(stretches: list[tuple[bool, int]], policy: DeadlinePolicy) -> None:
    pattern = np.concatenate([np.full(length, up) for up, length in stretches])
    available = np.resize(pattern, LOOKS)[:, None]
    outcome = run_policy(policy, JOB, available, LOOK_S)
    assert outcome.finished_s[0] <= JOB.deadline_s
    assert JOB.work_s / 3600 * 0.3 <= outcome.cost_usd[0] <= JOB.deadline_s / 3600


@pytest.mark.parametrize("policy", POLICIES[1:], ids=names[1:])
def test_a_pool_that_always_has_machines_is_used_throughout(policy: DeadlinePolicy) -> None:
    outcome = run_policy(policy, JOB, np.ones((LOOKS, 1), dtype=np.bool_), LOOK_S)
    assert outcome.cost_usd[0] == pytest.approx(0.3 * ALONE_USD)
    assert outcome.on_demand_s[0] == 0


@pytest.mark.parametrize("policy", POLICIES, ids=names)
def test_a_pool_without_machines_costs_what_on_demand_costs(policy: DeadlinePolicy) -> None:
    outcome = run_policy(policy, JOB, np.zeros((LOOKS, 1), dtype=np.bool_), LOOK_S)
    assert ALONE_USD - 1e-9 <= outcome.cost_usd[0] <= 1.15 * ALONE_USD


@pytest.mark.parametrize(("loss", "back"), [(0.2, 1.0), (1.0, 1.0), (0.5, 0.3)])
def test_the_table_agrees_with_simulation_and_is_cheapest(loss: float, back: float) -> None:
    """Expected cost at the start, from the table, against the mean of imagined runs of the same policy."""
    known = Capacity.known(loss, back)
    best = ExpectedCost(JOB, known)
    look_s = JOB.deadline_s / 1280  # a look's length is kept in reserve, which the table does not know
    available = imagined(
        known, round(JOB.deadline_s / look_s) + 2, look_s, 1500, np.random.default_rng(0), dispersion=1.0
    )
    mean = {type(p).__name__: run_policy(p, JOB, available, look_s).cost_usd.mean() for p in [*POLICIES[:3], best]}
    assert mean["ExpectedCost"] == pytest.approx(float(best.expected_usd(Seen.nothing(1))[0]), rel=0.03)
    assert mean["ExpectedCost"] < 0.99 * min(usd for name, usd in mean.items() if name != "ExpectedCost")


def test_what_is_learned_is_worth_money() -> None:
    """Over pools of the prior, ours without knowledge costs less than both rules, and knowledge less than ours."""
    available = imagined(PAIRS, LOOKS, LOOK_S, 60, np.random.default_rng(1), dispersion=1.0)
    ours, greedy, uniform = (
        run_policy(policy, JOB, available, LOOK_S).cost_usd.mean()
        for policy in (OURS, SwitchWhenLate(), UniformProgress())
    )
    knowing = np.mean(
        [
            run_policy(ExpectedCost(JOB, Capacity.known(float(loss), float(back))), JOB, part, LOOK_S).cost_usd.mean()
            for loss, back, part in zip(
                PAIRS.loss_per_hour, PAIRS.back_per_hour, np.split(available, len(PAIRS.weight), axis=1), strict=True
            )
        ]
    )
    assert ours < min(greedy, uniform)
    assert knowing <= ours <= 1.05 * knowing


def test_a_promise_holds_over_the_belief_and_narrows_with_what_is_seen() -> None:
    promise = CostPromise.of(OURS, JOB, PAIRS, seed=0, look_s=LOOK_S)
    nothing = promise.budget_usd(Seen.nothing(1), 0.9)[0]
    fresh = imagined(PAIRS, LOOKS, LOOK_S, 100, np.random.default_rng(9))
    kept = (run_policy(OURS, JOB, fresh, LOOK_S).cost_usd <= nothing + 1e-9).mean()
    assert kept >= 0.87
    plenty = Seen(up_h=np.array([200.0]), losses=np.array([3.0]), down_h=np.array([2.0]), returns=np.array([3.0]))
    assert promise.budget_usd(plenty, 0.9)[0] < nothing
    assert promise.budget_usd(plenty, 0.5)[0] <= promise.budget_usd(plenty, 0.9)[0]


def test_seen_capacity_moves_the_weights_to_the_rates_that_explain_it() -> None:
    busy = Seen(up_h=np.array([10.0]), losses=np.array([20.0]), down_h=np.array([10.0]), returns=np.array([20.0]))
    weights = PAIRS.weights(busy)[0]
    assert weights.sum() == pytest.approx(1)
    assert float((weights * PAIRS.loss_per_hour).sum()) == pytest.approx(3.0, rel=0.1)
    wider = PAIRS.weights(busy, dispersion=10.0)[0]
    assert (wider**2).sum() < (weights**2).sum()


def test_imagined_pools_have_the_rates_they_were_asked_for() -> None:
    pool = Capacity.known(0.5, 0.25)
    for dispersion in (1.0, 3.0):
        available = imagined(pool, 3000, 60.0, 600, np.random.default_rng(0), dispersion=dispersion)
        assert available.mean() == pytest.approx(1 / 3, abs=0.02)
        losses = (available[:-1] & ~available[1:]).sum() / (available.sum() / 60)
        assert losses == pytest.approx(0.5, rel=0.08)


def test_impossible_assignments_are_refused() -> None:
    with pytest.raises(ValueError, match="quickest"):
        Assignment(work_s=100.0, deadline_s=100.0, changeover_s=1.0, spot_usd_per_hour=0.3, on_demand_usd_per_hour=1.0)
    other = Assignment(
        work_s=100.0, deadline_s=400.0, changeover_s=10.0, spot_usd_per_hour=0.3, on_demand_usd_per_hour=1.0
    )
    with pytest.raises(ValueError, match="another assignment"):
        run_policy(OURS, other, np.ones((10, 1), dtype=np.bool_), 60.0)


class _SpotAlways:
    def choose(self, assignment: Assignment, moment: object) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        return np.array([Choice.SPOT], dtype=np.intp)


def test_spot_cannot_be_chosen_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="where there is none"):
        run_policy(_SpotAlways(), JOB, np.zeros((5, 1), dtype=np.bool_), LOOK_S)
