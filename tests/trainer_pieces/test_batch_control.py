"""Laws of the batch policies, and what each does on clusters with known speeds, noise and changes."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, strategies as st

from hetopt.core.batch_partition import first_shares, micro_batch_size, whole_micro_batches, within_memory
from hetopt.core.errors import BadInput
from hetopt.core.run_spec import RunSpec, StopRule, WorkerSpec
from hetopt.trainer.policies.policy import (
    AllocateMicroBatches,
    BatchObservation,
    DynamicShares,
    KeepShares,
    ModelShares,
    ProportionalShares,
    choose_policy,
    omnilearn,
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
        return omnilearn(minimum=minimum)


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
    slow, fast = watch(omnilearn(), VirtualCluster((1, 30, 30, 30)), (SHARE,) * 4, periods=3).shares[-1][:2]
    assert (slow, fast) == (16, 38)
    shares = watch(omnilearn(), VirtualCluster((1, 1, 1, 30)), (SHARE,) * 4, periods=3).shares[-1]
    assert max(shares) == 80  # 96 would leave less than 16 for the others
    assert not watch(omnilearn(), VirtualCluster((10, 11, 9)), (SHARE,) * 3, periods=3).changed


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


@pytest.mark.parametrize("samples", [0, 10])
@pytest.mark.parametrize("speeds", PUBLISHED)
def test_model_is_as_good_as_any_policy_side_by_side(speeds, samples):
    """From equal shares, without noise: 95 % of the ideal within three adjustments, and never behind for long."""
    policies = {
        "proportional": ProportionalShares(),
        "dynamic": DynamicShares(),
        "omnilearn": omnilearn(),
        "allocation": AllocateMicroBatches(micro=4),
        "model": ModelShares(),
        "static": KeepShares(),
    }
    histories = {
        name: watch(policy, VirtualCluster(speeds, fixed_s=overhead(speeds, samples)), equal(speeds), periods=12)
        for name, policy in policies.items()
    }
    reached = {name: history.efficiency[3] for name, history in histories.items()}
    assert reached["model"] >= 0.95
    assert reached["model"] >= max(reached.values()) - 0.02
    assert len(histories["model"].changed) <= min(3, 1 + len(histories["proportional"].changed))
    mean = {name: statistics.fmean(history.efficiency) for name, history in histories.items()}
    assert mean["model"] >= max(mean.values()) - 0.02


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
