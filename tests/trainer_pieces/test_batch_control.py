"""Laws of the batch controllers: the batch and the bounds are kept, one update balances, noise moves nothing."""

from __future__ import annotations

import json
import random
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hetopt.profiler.errors import BadInput
from hetopt.trainer.control.batch import BatchObservation, BatchState, FixedBatches, ProportionalBatches


def unbounded(workers, **options):
    return ProportionalBatches(minimum=(1,) * workers, maximum=(None,) * workers, **options)


def observe(shares, times):
    return BatchObservation(local_batch_sizes=tuple(shares), compute_s=tuple(times))


def run(controller, shares, time_s, periods, state=None):
    """The shares after each of so many periods, when worker i takes ``time_s(i, b)``; and the last state."""
    state, history = state or BatchState(), []
    for _ in range(periods):
        times = [time_s(worker, share) for worker, share in enumerate(shares)]
        state, decision = controller.decide(state, observe(shares, times))
        shares = decision.local_batch_sizes
        history.append(shares)
    return history, state


positive_times = st.floats(1e-4, 1e3)


@st.composite
def situations(draw):
    workers = draw(st.integers(1, 6))
    shares = draw(st.lists(st.integers(1, 200), min_size=workers, max_size=workers))
    low = draw(st.lists(st.integers(1, 20), min_size=workers, max_size=workers))
    high = [draw(st.none() | st.integers(lowest, 300)) for lowest in low]
    assume(sum(low) <= sum(shares) <= sum(sum(shares) if h is None else h for h in high))
    times = draw(st.lists(st.lists(positive_times, min_size=workers, max_size=workers), min_size=1, max_size=6))
    return ProportionalBatches(minimum=tuple(low), maximum=tuple(high)), shares, times


@given(situations())
def test_batch_and_bounds_are_kept_whatever_is_measured(situation):
    controller, shares, periods = situation
    total, state = sum(shares), BatchState()
    for period, times in enumerate(periods):
        state, decision = controller.decide(state, observe(shares, times))
        assert decision.changed == (decision.local_batch_sizes != tuple(shares))
        shares = decision.local_batch_sizes
        assert sum(shares) == total
        if period > 0:
            assert all(low <= share for low, share in zip(controller.minimum, shares, strict=True))
            assert all(high is None or share <= high for high, share in zip(controller.maximum, shares, strict=True))


@given(situations())
def test_every_rank_decides_alike_and_a_restart_changes_nothing(situation):
    controller, shares, periods = situation
    state = BatchState()
    for times in periods:
        restored = BatchState.from_dict(json.loads(json.dumps(state.to_dict())))
        assert restored == state
        outcome = controller.decide(state, observe(shares, times))
        assert controller.decide(restored, observe(shares, times)) == outcome
        state, shares = outcome[0], outcome[1].local_batch_sizes


@given(st.lists(st.floats(0.01, 0.1), min_size=1, max_size=8), st.integers(10, 200))
def test_one_update_balances_times_in_proportion_to_the_batch(per_sample_s, average):
    """Then the slowest is within the dead-band, or a sample and the least gain, of the ideal, and nothing moves."""
    workers = len(per_sample_s)
    history, _ = run(unbounded(workers), (average,) * workers, lambda i, b: per_sample_s[i] * b, periods=8)
    assert all(shares == history[1] for shares in history[1:])
    ideal_s = workers * average / sum(1 / slope for slope in per_sample_s)
    slowest_s = max(share * slope for share, slope in zip(history[1], per_sample_s, strict=True))
    assert slowest_s <= max(ideal_s / 0.95, (ideal_s + max(per_sample_s)) / 0.99) * (1 + 1e-9)


@pytest.mark.parametrize(("throughputs", "shares"), [((9, 12, 18), (22, 30, 44)), ((2, 17, 20), (5, 42, 49))])
def test_published_clusters(throughputs, shares):
    """H2 and H10 of arXiv 2305.12213, from 32 samples a worker; balanced gains at least 90 % of the ideal."""
    history, _ = run(unbounded(3), (32, 32, 32), lambda i, b: b / throughputs[i], periods=3)
    assert history == [(32, 32, 32), shares, shares]
    before, after = (max(b / x for b, x in zip(s, throughputs, strict=True)) for s in (history[0], shares))
    assert before / after >= 0.9 * sum(throughputs) / (3 * min(throughputs))


def test_fixed_costs_slow_convergence_down_but_do_not_prevent_it():
    """With t = c0 + s b the error shrinks by about c0 / t an update."""
    fixed_s, slopes = (0.02, 0.02), (0.001, 0.004)
    history, _ = run(unbounded(2), (64, 64), lambda i, b: fixed_s[i] + slopes[i] * b, periods=12)
    spread = [abs((0.02 + 0.001 * a) - (0.02 + 0.004 * b)) for a, b in history]
    assert spread[-1] < 0.05 * 0.12
    assert len(set(history)) <= 4


@given(st.lists(st.floats(0.978, 1.022), min_size=2, max_size=8), st.integers(1, 300))
def test_times_within_the_dead_band_move_nothing(times, share):
    """The real-valued share of b / t moves by no more than the ratio of any two times, here less than 5 %."""
    history, _ = run(unbounded(len(times)), (share,) * len(times), lambda i, _: times[i], periods=4)
    assert set(history) == {(share,) * len(times)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shares", [(32, 32), (148, 74, 34), (3, 50), (22, 30, 44, 5, 5, 5, 60, 60)])
def test_noisy_steps_move_nothing(shares, seed):
    """Steps with a standard deviation of 5 %, as means over a period of 20: balanced shares stay for 300 periods."""
    noise = random.Random(seed)
    history, _ = run(
        unbounded(len(shares)),
        shares,
        lambda i, b: statistics.fmean(b / shares[i] * noise.gauss(1.0, 0.05) for _ in range(20)),
        periods=300,
    )
    assert set(history) == {shares}


@given(situations(), st.randoms(use_true_random=False))
def test_names_of_ranks_are_irrelevant(situation, shuffler):
    """Only ties are broken by rank, and these times and shares have none."""
    controller, shares, periods = situation
    order = list(range(len(shares)))
    shuffler.shuffle(order)
    times = [t * (1 + 1e-3 * i) for i, t in enumerate(periods[0])]
    moved = ProportionalBatches(
        minimum=tuple(controller.minimum[i] for i in order), maximum=tuple(controller.maximum[i] for i in order)
    )
    throughputs = {share / time_s for share, time_s in zip(shares, times, strict=True)}
    assume(len(throughputs) == len(shares))
    state = BatchState(local_batch_sizes=tuple(shares), settled=True)
    moved_state = BatchState(local_batch_sizes=tuple(shares[i] for i in order), settled=True)
    one = controller.decide(state, observe(shares, times))[1].local_batch_sizes
    observed = observe([shares[i] for i in order], [times[i] for i in order])
    two = moved.decide(moved_state, observed)[1].local_batch_sizes
    assert sum(abs(one[i] - b) for i, b in zip(order, two, strict=True)) <= 2  # a rounding tie in the last bit
    assert sorted(abs(one[i] - b) for i, b in zip(order, two, strict=True))[-1] <= 1


def test_the_first_look_at_new_shares_is_dropped():
    """A slow first period (allocation, autotuning) must not decide anything; smoothing starts afresh after it."""
    controller = unbounded(2, smoothing=0.5)
    state, decision = controller.decide(BatchState(), observe((10, 10), (9.0, 1.0)))
    assert not decision.changed
    state, decision = controller.decide(state, observe((10, 10), (1.0, 3.0)))
    assert decision.local_batch_sizes == (15, 5)
    assert "expected" in str(decision.reason)
    state, decision = controller.decide(state, observe((15, 5), (90.0, 1.0)))
    assert not decision.changed
    state, decision = controller.decide(state, observe((15, 5), (1.5, 1.5)))
    assert state.compute_s == (1.5, 1.5)
    state, decision = controller.decide(state, observe((15, 5), (1.5, 1.6)))
    assert state.compute_s == (1.5, 1.55)
    assert not decision.changed


def test_shares_changed_by_somebody_else_start_afresh():
    controller = unbounded(2)
    state = BatchState(local_batch_sizes=(10, 10), compute_s=(1.0, 3.0), settled=True)
    state, decision = controller.decide(state, observe((8, 8, 4), (1.0, 1.0, 9.0)))
    assert (state.local_batch_sizes, state.compute_s, decision.changed) == ((8, 8, 4), None, False)


def test_a_shrunk_memory_limit_is_obeyed_inside_the_dead_band():
    controller = ProportionalBatches(minimum=(1, 1), maximum=(9, None))
    state = BatchState(local_batch_sizes=(10, 10), settled=True)
    assert controller.decide(state, observe((10, 10), (1.0, 1.0)))[1].local_batch_sizes == (9, 11)


def test_fixed_batches_stay():
    state, decision = FixedBatches().decide(BatchState(), observe((1, 99), (50.0, 0.1)))
    assert (state, decision.local_batch_sizes, decision.changed) == (BatchState(), (1, 99), False)


@pytest.mark.parametrize("times", [(1.0,), (1.0, 0.0), (1.0, float("nan")), (1.0, float("inf"))])
def test_impossible_observations_are_refused(times):
    with pytest.raises(ValueError, match="time"):
        observe((1, 1), times)
    with pytest.raises(ValueError, match="shares"):
        observe((1, 0), (1.0, 1.0))


@pytest.mark.parametrize("options", [{"smoothing": 0.0}, {"smoothing": 1.5}, {"dead_band": -0.1}, {"least_gain": 1.0}])
def test_impossible_controllers_are_refused(options):
    with pytest.raises(ValueError, match="smoothing"):
        unbounded(2, **options)
    with pytest.raises(ValueError, match="bounds"):
        ProportionalBatches(minimum=(0,), maximum=(None,))


def test_damaged_state_is_refused():
    with pytest.raises(BadInput, match="damaged"):
        BatchState.from_dict({"local_batch_sizes": "3,4"})
