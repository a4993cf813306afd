"""Laws of the policies that search or judge: GraVAC, ScaDLES's threshold, and AR-Topk's choice made exact."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetopt.core.comm.cost import LinkSpeed
from hetopt.trainer.policies.ratio.gravac import Gravac, ideal_factor
from hetopt.trainer.policies.ratio.policy import DENSE, GainCurve, RatioObservation
from hetopt.trainer.policies.ratio.scan import Prospect, ScanRatio, pareto, scan
from hetopt.trainer.policies.ratio.threshold import ThresholdRatio

from .ratio_periods import NETWORK, OPTIONS, WORKERS, observe
from .virtual_exchange import RATIOS, VirtualRun

# --- GraVAC ---


def test_the_published_search_ends_with_the_smaller_factor():
    """1029.9 at 1280x against 1035.4 at 2000x, within 1 %."""
    worth = {640.0: 900.0, 1280.0: 1029.9, 2000.0: 1035.4}
    assert ideal_factor(worth, 0.01) == 1280
    assert ideal_factor(worth, 0.001) is None
    assert ideal_factor({10.0: 1.0}, 0.01) is None


def gravac_factors(policy, gain_of, periods, *, step_time_of=lambda ratio: 0.02 + ratio, steps=20):
    """The factors that were sent, period by period, and the last state."""
    state, decision, found = policy.initial(), policy.first(None), []
    step = 0
    for _ in range(periods):
        levels, sent = None, DENSE
        if decision.least_gain is not None:
            ratios = (decision.ratio, decision.floor_ratio)
            levels = tuple(map(gain_of, ratios))
            kept = zip(ratios, levels, strict=True)
            sent = next((ratio for ratio, gain in kept if gain >= decision.least_gain), DENSE)
        found.append(round(1 / sent))
        length = min(steps, decision.look_after_steps or steps)
        step += length
        gain = 1.0 if sent == DENSE else gain_of(sent)
        seen = observe(
            decision.ratio, gain=gain, levels=levels, step=step, steps=length, step_time_s=step_time_of(sent)
        )
        state, decision = policy.decide(state, seen)
    return found, state


@pytest.mark.parametrize(
    ("policy", "largest", "factors"),
    [
        ("exponential", 1000, [10, 20, 40, 160, 1000]),
        ("geometric", 2000, [10, 20, 40, 80, 160, 320, 640, 1280, 2000]),
    ],
)
def test_factors_rise_as_published(policy, largest, factors):
    """Every factor is worth far more than the one before, so the search goes to the end."""
    gravac = Gravac(raises=policy, largest=largest, window=20, eps=0.1, omega=0.0)
    found, state = gravac_factors(gravac, lambda ratio: ratio**0.01, 30, step_time_of=lambda ratio: ratio)
    assert list(dict.fromkeys(found)) == factors
    assert state.done
    assert found[-1] == largest


def test_the_search_ends_where_more_compression_is_worth_nothing():
    """Throughput times gain is 6.65, 7.14, 7.30 and 7.26 at 40x, 80x, 160x and 320x."""
    gravac = Gravac(raises="geometric", largest=2000, window=20, eps=0.1, omega=0.02)
    found, state = gravac_factors(gravac, lambda ratio: ratio**0.05, 30, step_time_of=lambda ratio: 0.1 + ratio)
    assert state.done
    assert found[-1] == 160
    assert max(found) == 320


@given(st.floats(0.0, 0.7), st.sampled_from(["exponential", "geometric"]), st.floats(0.05, 1.0))
@settings(max_examples=40)
def test_factors_stay_within_bounds_and_what_is_sent_keeps_enough(exponent, policy, least_gain):
    gravac = Gravac(raises=policy, window=40, eps=least_gain)
    found, _ = gravac_factors(gravac, lambda ratio: ratio**exponent, 40)
    assert all(factor == 1 or 10 <= factor <= 1000 for factor in found)
    assert all(factor == 1 or (1 / factor) ** exponent >= least_gain - 1e-3 for factor in found)


def test_where_everything_is_worth_most_everything_is_sent():
    """In the first period nothing keeps enough; and a step that sends less takes twice as long."""
    gains = itertools.chain([0.1, 0.1], itertools.repeat(0.99))
    gravac = Gravac(window=60)
    found, state = gravac_factors(
        gravac, lambda ratio: next(gains), 30, step_time_of=lambda ratio: 0.5 if ratio == DENSE else 1 + ratio
    )
    assert state.done
    assert state.candidate == found[-1] == 1


def test_an_impossible_gain_means_plain_data_parallel_training():
    found, _ = gravac_factors(Gravac(eps=1.01), lambda ratio: 1.0, 20)
    assert set(found) == {1}


def test_the_floor_rises_where_the_candidate_loses_nothing():
    gravac = Gravac(raises="geometric", window=20, omega=0.01)
    _, state = gravac_factors(gravac, lambda ratio: 1.0, 4, step_time_of=lambda ratio: ratio)
    assert (state.floor, state.candidate) == (80, 160)


# --- ScaDLES ---


def votes(policy, gains):
    kept = tuple((gain,) for gain in gains)
    own = GainCurve(ratios=(policy.ratio,), kept=kept, energy=(1.0,) * len(gains))
    observation = RatioObservation(
        step=20,
        steps=20,
        epoch=0,
        ratio=1.0,
        compute_s=0.1,
        step_s=0.1,
        kept_energy=(1.0,) * len(gains),
        energy=(1.0,) * len(gains),
        gradient_norm=1.0,
        gain_curve=own,
    )
    return policy.decide(policy.initial(), observation)[1].ratio


@pytest.mark.parametrize(
    ("combine", "compressed"), [("majority", (3, 4)), ("any", (1, 2, 3, 4)), ("all", (4,)), ("mean", (4,))]
)
def test_votes_are_combined_as_named(combine, compressed):
    """A minority and a tie do not compress, as they do in the released code."""
    policy = ThresholdRatio(ratio=0.1, delta=0.1, combine=combine)
    for count in range(5):
        expected = 0.1 if count in compressed else DENSE
        assert votes(policy, (0.9,) * count + (0.5,) * (4 - count)) == expected


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=8))
def test_delta_of_nothing_is_dense_and_of_one_always_compresses(gains):
    assert votes(ThresholdRatio(delta=0.0), gains) == DENSE
    assert votes(ThresholdRatio(delta=1.0), gains) == 0.1


# --- AR-Topk's scan ---

prospects = st.lists(st.builds(Prospect, time_s=st.floats(1e-4, 10), gain=st.floats(0.01, 1)), min_size=1, max_size=20)


@given(prospects, st.floats(0, 1), st.floats(0, 1))
def test_the_scan_is_the_brute_force_optimum(candidates, time_weight, gain_weight):
    chosen = scan(candidates, time_weight=time_weight, gain_weight=gain_weight)
    front = pareto(candidates)
    assert chosen in front
    times, losses = [candidates[i].time_s for i in front], [1 / candidates[i].gain for i in front]

    def scaled(value, values):
        width = max(values) - min(values)
        return (value - min(values)) / width if width > 0 else 0.0

    def objective(i):
        return max(
            time_weight * scaled(candidates[i].time_s, times), gain_weight * scaled(1 / candidates[i].gain, losses)
        )

    assert objective(chosen) == min(objective(i) for i in front)


@given(prospects)
def test_the_front_holds_exactly_what_nothing_beats(candidates):
    front = {(candidates[i].time_s, candidates[i].gain) for i in pareto(candidates)}
    for one, other in itertools.permutations({(c.time_s, c.gain) for c in candidates}, 2):
        if other[0] <= one[0] and other[1] >= one[1]:
            assert one not in front
    assert len(front) == len(pareto(candidates))


def test_the_scan_is_repeated_when_gain_or_network_has_moved():
    policy = ScanRatio(options=OPTIONS[1:], least_gain=0)
    first = policy.first(NETWORK)
    assert first.ratio == max(RATIOS)

    def seen(option, exponent, network=NETWORK):
        own = observe(0.1, gain_of=lambda ratio: ratio**exponent, option=option)
        return RatioObservation(
            **{f: getattr(own, f) for f in own.__dataclass_fields__ if f != "network"}, network=network
        )

    state, decision = policy.decide(policy.initial(), seen(first.option, 0.1))
    assert decision.reason is not None
    state, still = policy.decide(state, seen(decision.option, 0.101))
    assert not still.reason is not None
    slow = VirtualRun(workers=WORKERS, links=[LinkSpeed(latency_s=0.3, bytes_per_s=1e9)], compute_s=0.1).fresh()
    _, moved = policy.decide(state, seen(decision.option, 0.1, slow))
    assert moved.reason is not None
