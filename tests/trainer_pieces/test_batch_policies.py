"""Laws of the batch policies, and what each does on clusters with known speeds, noise and changes.

The batch that follows the gradient noise: what it may do, and that it gains where something can be gained.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from hetopt.core.batch_partition import (
    WorkerTime,
    first_shares,
    micro_batch_size,
    solve_shares,
    whole_micro_batches,
    within_memory,
)
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import Compression, RunSpec, StopRule, WorkerSpec
from hetopt.core.training_laws import FEWEST_NOISE_SAMPLES, KAPPA, Moments, NoiseCurve, step_worth
from hetopt.trainer.engine import Balance
from hetopt.trainer.policies.policy import (
    POLICIES,
    AllocateMicroBatches,
    BatchObservation,
    CriticalBatch,
    CriticalState,
    DynamicShares,
    KeepShares,
    ModelShares,
    ProportionalShares,
    choose_policy,
)
from tests.thinned import few

from .contracts import BatchPolicyContract
from .runs import run_of
from .virtual_cluster import VirtualCluster, watch

PUBLISHED = ((9, 12, 18), (12, 12, 8, 16), (9, 9, 6, 24), (6, 6, 4, 32), (2, 17, 20))
SHARE = 32
"""Samples of an equal share in the published experiments."""


def equal(speeds):
    return (SHARE,) * len(speeds)


def overhead(speeds, samples):
    """Fixed costs worth so many samples, on every worker."""
    return (0.01 * samples,) * len(speeds)


def observe(shares, times, *, epoch=0, steps=20, spread=0.0):
    return BatchObservation(
        local_batch_sizes=tuple(shares),
        compute_s=tuple(times),
        spread_s=tuple(spread * time_s for time_s in times),
        steps=steps,
        epoch=epoch,
    )


class TestKeep(BatchPolicyContract):
    def make(self, minimum):
        return KeepShares()


class TestProportionalOncePerEpoch(BatchPolicyContract):
    def make(self, minimum):
        return ProportionalShares(minimum=minimum)


class TestProportional(BatchPolicyContract):
    def make(self, minimum):
        return ProportionalShares(minimum=minimum, every="period")


class TestDynamic(BatchPolicyContract):
    def make(self, minimum):
        return DynamicShares(minimum=minimum)


class TestOmniLearn(BatchPolicyContract):
    def make(self, minimum):
        return POLICIES["omnilearn"](RUN, minimum)


class TestAllocation(BatchPolicyContract):
    UNIT = 3

    def make(self, minimum):
        return AllocateMicroBatches(micro=self.UNIT)


class TestModel(BatchPolicyContract):
    def make(self, minimum):
        return ModelShares(minimum=minimum)


# --- The published policies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ProportionalShares(), DynamicShares()], ids=["proportional", "dynamic"])
@pytest.mark.parametrize(("speeds", "shares"), [((9, 12, 18), (22, 30, 44)), ((2, 17, 20), (5, 42, 49))])
def test_published_clusters_take_one_update(policy, speeds, shares):
    """H2 and H10 of arXiv 2305.12213, from 32 samples a worker; balanced gains at least 90 % of the ideal."""
    history = watch(policy, VirtualCluster(speeds), equal(speeds), periods=4)
    assert history.shares == [equal(speeds), shares, shares, shares]
    before, after = (max(b / x for b, x in zip(s, speeds, strict=True)) for s in history.shares[:2])
    assert before / after >= 0.9 * sum(speeds) / (3 * min(speeds))


@given(st.lists(st.floats(0.978, 1.022), min_size=2, max_size=8), st.integers(1, 300))
def test_times_within_the_dead_band_move_nothing(times, share):
    """The real-valued share of b / t moves by no more than the ratio of any two times, here less than 5 %."""
    state, policy = None, DynamicShares()
    for _ in range(4):
        state, decision = policy.decide(state or policy.initial(), observe((share,) * len(times), times))
        assert not decision.changed


def test_times_are_smoothed_since_the_last_change():
    policy = DynamicShares(smoothing=0.5, dead_band=0.3)
    state, _ = policy.decide(policy.initial(), observe((10, 10), (1.0, 1.2)))
    state, decision = policy.decide(state, observe((10, 10), (1.0, 3.0)))
    assert decision.local_batch_sizes == (14, 6)  # 1 s against the average of 1.2 and 3
    state, decision = policy.decide(state, observe((14, 6), (1.4, 1.5)))
    assert state.smoothed_s == (1.4, 1.5)
    state, _ = policy.decide(state, observe((14, 6), (1.4, 1.7)))
    assert state.smoothed_s == (1.4, 1.6)


def test_a_share_whose_growth_cost_throughput_goes_back_and_stays_there():
    """10 -> 15 samples made worker 0 slower a sample: its bound is the share it grew from."""
    policy = DynamicShares()
    state, decision = policy.decide(policy.initial(), observe((10, 10), (1.0, 3.0)))
    assert decision.local_batch_sizes == (15, 5)
    state, decision = policy.decide(state, observe((15, 5), (2.5, 1.5)))
    assert (decision.local_batch_sizes, state.caps) == ((10, 10), (10, None))
    for _ in range(5):
        state, decision = policy.decide(state, observe((10, 10), (1.0, 3.0)))
        assert not decision.changed


def test_omnilearn_keeps_half_to_three_times_the_equal_share():
    """[16, 96] at 32 samples a worker, and a dead-band of a fifth."""
    policy = POLICIES["omnilearn"](RUN, 1)
    slow, fast = watch(policy, VirtualCluster((1, 30, 30, 30)), (SHARE,) * 4, periods=3).shares[-1][:2]
    assert (slow, fast) == (16, 38)
    shares = watch(policy, VirtualCluster((1, 1, 1, 30)), (SHARE,) * 4, periods=3).shares[-1]
    assert max(shares) == 80  # 96 would leave less than 16 for the others
    assert not watch(policy, VirtualCluster((10, 11, 9)), (SHARE,) * 3, periods=3).changed


def test_allocation_moves_whole_micro_batches_until_one_more_would_not_help():
    history = watch(AllocateMicroBatches(micro=4), VirtualCluster((2, 17, 20)), equal((1, 1, 1)), periods=6)
    assert history.changed == [0]
    assert history.shares[-1] == (4, 44, 48)
    tight = AllocateMicroBatches(micro=4, tolerance=0.0)
    assert watch(tight, VirtualCluster((2, 17, 20)), equal((1, 1, 1)), periods=6).shares == history.shares


def test_allocation_takes_shares_from_elsewhere_to_micro_batches_at_once():
    policy = AllocateMicroBatches(micro=4)
    _, decision = policy.decide(policy.initial(), observe((7, 9, 16), (1.0, 1.0, 1.0)))
    assert decision.local_batch_sizes == (8, 8, 16)
    with pytest.raises(BadInput, match="cannot be cut into micro-batches of 4"):
        policy.decide(policy.initial(), observe((7, 9, 15), (1.0, 1.0, 1.0)))


# --- The model: numbers it promises -----------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(1, 30), st.floats(0, 2)), min_size=2, max_size=8),
    st.integers(20, 200),
)
def test_model_finds_the_optimum_of_any_lines(workers, share):
    """Overheads up to twice an equal share's compute: within 6 % after three adjustments, and then at rest.

    Of shares of at least 20: where one sample more or less is as much as that, nothing is seen that would pay.
    """
    speeds = tuple(speed for speed, _ in workers)
    cluster = VirtualCluster(speeds, fixed_s=tuple(0.01 * share * part for _, part in workers))
    history = watch(ModelShares(), cluster, (share,) * len(workers), periods=20, steps=3)
    third = history.changed[2] if len(history.changed) > 2 else 5
    assert min(history.efficiency[third + 1 :]) >= 0.94
    assert len(history.changed) <= 4
    assert not any(change >= 10 for change in history.changed)


def late_changes(speeds, samples, *, seeds, steps):
    """How many of the seeds change a share in the 500 steps after shares have stayed for four periods."""
    late = 0
    for seed in seeds:
        cluster = VirtualCluster(speeds, fixed_s=overhead(speeds, samples), noise=0.05, seed=seed)
        history = watch(ModelShares(), cluster, equal(speeds), periods=12 + 500 // steps, steps=steps)
        settled = next(k for k in range(100) if not any(k <= change < k + 4 for change in history.changed))
        assert settled <= 10
        assert sum(change < settled for change in history.changed) <= 4
        assert history.efficiency[settled] >= 0.94
        late += any(settled <= change < settled + 4 + 500 // steps for change in history.changed)
    return late


@pytest.mark.parametrize("samples", [0, 10])
@pytest.mark.parametrize("speeds", few(3, [(12, 12, 12, 12), (2, 17, 20), *PUBLISHED[:-1]]))
def test_noise_of_five_percent_moves_nothing_once_settled(speeds, samples):
    assert late_changes(speeds, samples, seeds=range(6), steps=20) == 0


@pytest.mark.parametrize("samples", [0, 10])
@pytest.mark.parametrize("noise", few(1, [0.05, 0.0]))
@pytest.mark.parametrize("speeds", few(3, PUBLISHED[::-1]))
def test_the_optimum_is_regained_within_five_periods_of_a_worker_becoming_three_times_slower(speeds, noise, samples):
    """95 % of the ideal is there for good."""
    for seed in range(2 * len(speeds)):
        slowed = tuple(x / 3 if rank == seed % len(speeds) else x for rank, x in enumerate(speeds))
        cluster = VirtualCluster(
            speeds,
            fixed_s=overhead(speeds, samples),
            noise=noise,
            seed=seed,
            changes={20 * 20 + (7 * seed) % 20: slowed},
        )
        history = watch(ModelShares(), cluster, equal(speeds), periods=40)
        assert min(history.efficiency[21 + 5 :]) >= 0.95


# --- The model: what it understands -----------------------------------------------------------------------------------


def test_shares_below_the_minimum_are_raised_whatever_the_gain():
    policy = ModelShares(minimum=2)
    _, decision = policy.decide(policy.initial(), observe((1, 9), (0.5, 0.56), spread=0.5))
    assert decision.local_batch_sizes == (2, 8)


# --- Which policy a run has -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 100), min_size=1, max_size=9))
def test_first_shares(shares):
    assert first_shares(run_of(*shares)) == tuple(shares)
    if sum(shares) >= 2 * len(shares):
        raised = first_shares(run_of(*shares), minimum=2)
        assert sum(raised) == sum(shares)
        assert min(raised) >= 2
        assert raised == tuple(shares) or min(shares) < 2
    uniform = first_shares(run_of(*shares, batch_policy="uniform"))
    assert sum(uniform) == sum(shares)
    assert max(uniform) - min(uniform) <= 1
    allocated = run_of(*shares, batch_policy="allocation")
    size, parts = micro_batch_size(allocated), first_shares(allocated)
    assert sum(parts) == sum(shares)
    assert all(part % size == 0 and part > 0 for part in parts)


@pytest.mark.parametrize(
    ("shares", "wish", "size"),
    [
        ((24, 8), {}, None),
        ((24, 8), {"micro_batch_size": 5}, 5),
        ((24, 8), {"batch_policy": "allocation"}, 2),
        ((96, 32), {"batch_policy": "allocation"}, 8),
        ((24, 8), {"batch_policy": "allocation", "micro_batch_size": 16}, 16),
    ],
)
def test_micro_batches(shares, wish, size):
    assert micro_batch_size(run_of(*shares, **wish)) == size
    assert whole_micro_batches((31, 1), 8) == (24, 8)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (run_of(24, 8, batch_policy="allocation", micro_batch_size=5), "global batch of 32 cannot be cut"),
        (run_of(24, 8, batch_policy="allocation", micro_batch_size=32), "at least one for each of 2 workers"),
        (run_of(4, 3, batch_policy="allocation"), "Micro-batches of 1 samples are too small"),
        (run_of(2, 1), "must be at least 4 for 2 workers, got 3"),
        (run_of(2, 1, batch_policy="uniform"), "must be at least 4 for 2 workers"),
    ],
)
def test_runs_that_cannot_be_shared_are_refused(run, says):
    with pytest.raises(BadInput, match=says):
        choose_policy(run, minimum=2)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40) | st.none()), min_size=1, max_size=6),
    st.booleans(),
)
def test_a_script_is_given_no_more_than_memory_holds_at_once(workers, is_script):
    """A task cuts what does not fit into micro-batches; where all together cannot hold it, nothing is changed."""
    spec = RunSpec(
        task="t",
        script=("train.py",) if is_script else (),
        workers=tuple(
            WorkerSpec(host=f"h{rank}", type="t", local_batch_size=1, max_local_batch_size=limit)
            for rank, (_, limit) in enumerate(workers)
        ),
        stop=StopRule(max_steps=1),
    )
    shares = tuple(share for share, _ in workers)
    limits = [math.inf if limit is None else limit for _, limit in workers]
    told = within_memory(spec, shares)
    assert sum(told) == sum(shares)
    fits = all(share <= limit for share, limit in zip(shares, limits, strict=True))
    if not is_script or fits or sum(limits) < sum(shares):
        assert told == shares
    else:
        assert all(1 <= share <= limit for share, limit in zip(told, limits, strict=True))


GIVEN, MOST = 64, 512
RUN = run_of(16, 16, batch_policy="critical")


class TestCritical(BatchPolicyContract):
    """Without noise it is the policy ``model``."""

    def make(self, minimum):
        return CriticalBatch(given=1, least=1, most=10**6, minimum=minimum)


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
        moments = Moments(gradient_variance=KAPPA * self.scale, gradient_square=1.0)
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
    policy = policy or CriticalBatch(given=GIVEN, least=GIVEN, most=MOST)
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


@given(st.floats(0.1, 10), st.floats(0, 0.35), st.integers(0, 99))
def test_noise_is_told_from_zero_only_where_it_is_there(scale, spread, seed):
    draw, curve, nothing = random.Random(seed), NoiseCurve(), NoiseCurve()
    for count in range(100):
        assert (curve.likely is None) or count >= FEWEST_NOISE_SAMPLES
        curve = curve.add(
            Moments(gradient_variance=scale * draw.gauss(1, spread), gradient_square=draw.gauss(1, spread))
        )
        nothing = nothing.add(Moments(gradient_variance=0.0, gradient_square=draw.gauss(1, spread)))
        curve = curve.add(Moments(gradient_variance=1e200, gradient_square=1.0))  # a step that diverges
    assert nothing.likely is None
    likely = curve.likely
    assert likely is not None
    assert 0.6 * scale <= likely.gradient_variance / likely.gradient_square <= 1.6 * scale


@given(st.floats(0, 1), st.floats(1, 1e5), st.floats(0, 2), st.integers(0, 9))
def test_the_batch_moves_within_bounds_by_a_factor_of_two_at_most(rest_s, scale, spread, seed):
    story = follow(Cluster(rest_s, scale=scale, spread=spread, seed=seed), 40)
    sizes = [sum(shares) for _, shares in story]
    assert set(sizes[:FEWEST_NOISE_SAMPLES]) == {GIVEN}
    has_moved = False
    for (before, last), (state, shares) in itertools.pairwise(story):
        has_moved = has_moved or sum(shares) != GIVEN
        assert max(GIVEN, sum(last) / 2 - 1) <= sum(shares) <= min(MOST, 2 * sum(last))
        assert 1 <= state.worth <= sum(shares) / GIVEN + 1e-9
        progress = state.progress(state.since, sum(shares))
        # Progress goes on from where it was, never faster than samples and never slower than steps.
        gained = progress - before.progress(before.since, sum(last))
        assert gained == pytest.approx((state.since - before.since) * before.worth * GIVEN / sum(last))
        assert has_moved or (state.worth, progress) == (1, state.since)


@pytest.mark.parametrize(("rest_s", "scale"), [(0.2, 1000), (0.05, 3000), (0.02, 300), (1.0, 1e5)])
def test_what_is_reached_is_near_the_best_batch(rest_s, scale):
    cluster = Cluster(rest_s, scale=scale)
    reached = sum(follow(cluster, 60)[-1][1])
    best = min(range(GIVEN, MOST + 1), key=cluster.seconds_per_progress)
    assert cluster.seconds_per_progress(reached) <= 1.06 * cluster.seconds_per_progress(best)
    assert cluster.seconds_per_progress(reached) <= cluster.seconds_per_progress(GIVEN)


@pytest.mark.parametrize(("rest_s", "scale"), [(0.2, 1.0), (0.0, 1e5), (0.001, 100)])
def test_where_nothing_can_be_gained_the_batch_hardly_moves(rest_s, scale):
    """One look shows how long a step of a few more samples takes."""
    cluster = Cluster(rest_s, scale=scale)
    sizes = [sum(shares) for _, shares in follow(cluster, 60)]
    assert max(sizes) <= 1.2 * GIVEN
    assert cluster.seconds_per_progress(sizes[-1]) <= 1.02 * cluster.seconds_per_progress(GIVEN)


def test_computing_that_takes_as_long_whatever_the_batch_is_found_out():
    cluster = Cluster(0.0, scale=1e5)
    cluster.times = [WorkerTime(fixed_s=0.1, per_sample_s=each) for each in (0.002, 0.001)]
    assert sum(follow(cluster, 60)[-1][1]) > 4 * GIVEN


@pytest.mark.parametrize(("rest_s", "scale"), [(0.2, 1000), (0.05, 3000), (0.02, 300), (0.0, 1e5)])
def test_what_a_plan_knows_is_begun_with_and_gone_back_from_where_it_is_wrong(rest_s, scale):
    cluster = Cluster(rest_s, scale=scale)
    overhead = max(1.0, 300 * cluster.rest_s / (cluster.step_s(600) - cluster.step_s(300)))
    policy = CriticalBatch(given=256, least=GIVEN, most=MOST, critical=KAPPA * scale, overhead=overhead)
    story = follow(cluster, 60, policy=policy, shares=(85, 171))
    least_s = min(map(cluster.seconds_per_progress, range(GIVEN, MOST + 1)))
    assert cluster.seconds_per_progress(sum(story[-1][1])) <= 1.06 * least_s
    # At the planned batch a step is worth what the plan takes it for.
    planned = Moments(gradient_variance=KAPPA * scale, gradient_square=1.0)
    assert policy.believed(NoiseCurve()) == planned
    assert policy.planned_worth == pytest.approx(step_worth(planned, 256, GIVEN))


def test_one_slow_step_is_no_reason_to_grow():
    cluster, policy = Cluster(0.0, scale=1e5), CriticalBatch(given=GIVEN, least=GIVEN, most=MOST)
    state, shares = follow(cluster, 30)[-1]
    loud = replace(cluster.observe(shares), step_time_s=9.0)
    assert not policy.decide(state, loud)[1].changed


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"script": ("t.py",)}, "loader gives batches of one size"),
        ({"task": "session"}, "loader gives batches of one size"),
        ({"compression": Compression(name="topk", ratio=0.1)}, "sums of whole gradients"),
        ({"ratio_policy": "auto"}, "sums of whole gradients"),
        ({"sync": {"name": "local-sgd"}}, "sums of whole gradients"),
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
    run = run_of(16, 16, batch_policy="critical", batch_settings={"most": 4.0, "least": 0.25, "critical": 90.0})
    assert choose_policy(run, minimum=1) == CriticalBatch(given=32, least=8, most=128, critical=90.0)
    small = [worker.model_copy(update={"max_local_batch_size": 20}) for worker in run.workers]
    assert choose_policy(run.model_copy(update={"workers": tuple(small)}), minimum=1).most == 40
