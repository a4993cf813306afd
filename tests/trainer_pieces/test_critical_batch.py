"""The batch that follows the gradient noise: what it may do, and that it gains where something can be gained."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from hetopt.core.batch_partition import WorkerTime, solve_shares
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression
from hetopt.core.training_laws import FEWEST_NOISE_SAMPLES, Moments, NoiseCurve, step_worth
from hetopt.trainer.engine import Balance
from hetopt.trainer.policies.policy import (
    BatchObservation,
    CriticalBatch,
    CriticalState,
    choose_policy,
)

from .contracts import BatchPolicyContract
from .runs import run_of

GIVEN, MOST = 64, 512
RUN = run_of(16, 16, batch_policy="critical")


class TestCritical(BatchPolicyContract):
    """Without noise it is the policy ``model``."""

    def make(self, minimum):
        return CriticalBatch(given=1, most=10**6, minimum=minimum)


class Cluster:
    """Workers of 2 and 1 ms a sample whose steps take ``rest_s`` besides, and a gradient of which ``noise`` is told."""

    def __init__(self, rest_s, *, scale=math.inf, spread=0.1, seed=0):
        self.rest_s, self.scale, self.spread = rest_s, scale, spread
        self.times = [WorkerTime(fixed_s=0.0, per_sample_s=each) for each in (0.002, 0.001)]
        self.random = random.Random(seed)
        self.seen = 0

    def step_s(self, batch):
        return self.rest_s + solve_shares(self.times, batch).compute_s

    def seconds_per_progress(self, batch):
        moments = Moments(gradient_variance=self.scale, gradient_square=1.0)
        return self.step_s(batch) / step_worth(moments, batch, GIVEN)

    def observe(self, shares):
        self.seen += 20 * sum(shares)
        compute_s = tuple(each.time_s(share) for each, share in zip(self.times, shares, strict=True))
        return BatchObservation(
            local_batch_sizes=shares,
            compute_s=compute_s,
            spread_s=(0.0, 0.0),
            steps=20,
            epoch=0,
            step_time_s=self.rest_s + max(compute_s),
            noise=Moments(
                gradient_variance=self.scale * max(0.0, self.random.gauss(1, self.spread)),
                gradient_square=self.random.gauss(1, self.spread),
            ),
            samples_seen=self.seen,
        )


def follow(cluster, periods, *, policy=None, shares=(22, 42)):
    policy = policy or CriticalBatch(given=GIVEN, most=MOST)
    state, story = policy.initial(), [(CriticalState(), shares)]
    for _ in range(periods):
        state, decision = policy.decide(state, cluster.observe(shares))
        shares = decision.local_batch_sizes
        story.append((state, shares))
    return story


moments = st.builds(Moments, gradient_variance=st.floats(0, 1e6), gradient_square=st.floats(-1e3, 1e6))


@given(moments, st.integers(1, 1000), st.floats(1, 64), st.floats(1, 4))
def test_a_step_is_worth_at_least_one_and_at_most_its_size_and_grows_with_it(noise, given_size, times, more):
    worth = step_worth(noise, given_size * times, given_size)
    assert 1 - 1e-9 <= worth <= times * (1 + 1e-9)
    assert worth <= step_worth(noise, given_size * times * more, given_size) * (1 + 1e-9)
    assert step_worth(noise, given_size, given_size) == 1


@given(st.floats(0.1, 10), st.floats(0, 0.5), st.integers(0, 99))
def test_noise_is_told_from_zero_only_where_it_is_there(scale, spread, seed):
    draw, curve, nothing = random.Random(seed), NoiseCurve(), NoiseCurve()
    for count in range(100):
        assert (curve.surely is None) or count >= FEWEST_NOISE_SAMPLES
        curve = curve.add(
            Moments(gradient_variance=scale * draw.gauss(1, spread), gradient_square=draw.gauss(1, spread))
        )
        nothing = nothing.add(Moments(gradient_variance=0.0, gradient_square=draw.gauss(1, spread)))
        curve = curve.add(Moments(gradient_variance=1e200, gradient_square=1.0))  # a step that diverges
    assert nothing.surely is None
    surely = curve.surely
    assert surely is not None
    assert 0.5 * scale <= surely.gradient_variance / surely.gradient_square <= 1.05 * scale


@given(st.floats(0, 1), st.floats(1, 1e5), st.floats(0, 2), st.integers(0, 9))
def test_the_batch_grows_within_bounds_by_a_factor_of_two_at_most_and_never_shrinks(rest_s, scale, spread, seed):
    story = follow(Cluster(rest_s, scale=scale, spread=spread, seed=seed), 40)
    sizes = [sum(shares) for _, shares in story]
    assert set(sizes[:FEWEST_NOISE_SAMPLES]) == {GIVEN}
    for (before, last), (state, shares) in itertools.pairwise(story):
        assert sum(last) <= sum(shares) <= min(MOST, 2 * sum(last))
        assert 1 <= state.worth <= sum(shares) / GIVEN + 1e-9
        progress = state.progress(state.since, sum(shares))
        # Progress goes on from where it was, never faster than samples and never slower than steps.
        gained = progress - before.progress(before.since, sum(last))
        assert gained == pytest.approx((state.since - before.since) * before.worth * GIVEN / sum(last))
        if sum(shares) == GIVEN:
            assert (state.worth, progress) == (1, state.since)


@pytest.mark.parametrize(("rest_s", "scale"), [(0.2, 1000), (0.05, 3000), (0.02, 300), (1.0, 1e5)])
def test_what_is_reached_is_near_the_best_batch(rest_s, scale):
    cluster = Cluster(rest_s, scale=scale)
    reached = sum(follow(cluster, 60)[-1][1])
    best = min(range(GIVEN, MOST + 1), key=cluster.seconds_per_progress)
    assert cluster.seconds_per_progress(reached) <= 1.06 * cluster.seconds_per_progress(best)
    assert cluster.seconds_per_progress(reached) <= cluster.seconds_per_progress(GIVEN)


@pytest.mark.parametrize(("rest_s", "scale"), [(0.2, 1.0), (0.0, 1e5), (0.001, 100)])
def test_where_nothing_can_be_gained_the_batch_stays(rest_s, scale):
    assert {sum(shares) for _, shares in follow(Cluster(rest_s, scale=scale), 60)} == {GIVEN}


def test_one_slow_step_is_no_reason_to_grow():
    cluster, policy = Cluster(0.0, scale=1e5), CriticalBatch(given=GIVEN, most=MOST)
    state, shares = follow(cluster, 30)[-1]
    loud = replace(cluster.observe(shares), step_time_s=9.0)
    assert not policy.decide(state, loud)[1].changed


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"script": ("t.py",)}, "loader gives batches of one size"),
        ({"task": "session"}, "loader gives batches of one size"),
        ({"compression": Compression(name="topk", ratio=0.1)}, "whole gradients are summed"),
        ({"ratio_policy": "auto"}, "whole gradients are summed"),
        ({"sync": {"name": "local-sgd"}}, "whole gradients are summed"),
        ({"partition": {"name": "shards"}}, "one order for all"),
    ],
)
def test_runs_whose_batch_cannot_follow_are_refused(fields, said):
    with pytest.raises(BadInput, match=said):
        choose_policy(run_of(16, 16, batch_policy="critical", **fields), minimum=1)


def test_workers_that_are_left_keep_the_batch_and_its_progress():
    balance = Balance(RUN, choose_policy(RUN, minimum=1))
    state = CriticalState(given=32, worth=1.5, spent=10.0, since=100)
    for shares, given_size, expected in (((30, 20, 14), 48, (16, 16)), ((30, 20, 14), 32, (32, 32))):
        saved = state.model_copy(update={"given": given_size}).model_dump(mode="json")
        balance.resume(policy="critical", shares=shares, state=saved)
        assert balance.shares == expected
    assert (balance.worth, balance.progress(164)) == (1.5, 90 + 48)


def test_settings_and_memory_bound_the_batch():
    run = run_of(16, 16, batch_policy="critical", batch_settings={"most": 4.0})
    assert choose_policy(run, minimum=1) == CriticalBatch(given=32, most=128)
    small = [worker.model_copy(update={"max_local_batch_size": 20}) for worker in run.workers]
    assert choose_policy(run.model_copy(update={"workers": tuple(small)}), minimum=1).most == 40
