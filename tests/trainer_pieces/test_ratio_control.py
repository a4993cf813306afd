"""Laws of the ratio policies: all ranks decide alike, restarts change nothing, and each does what was published."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from hetopt.trainer.policies.ratio.auto import AutoRatio
from hetopt.trainer.policies.ratio.policy import DENSE, GainCurve
from hetopt.trainer.policies.ratio.published import (
    WARM_UP,
    Accordion,
    Gravac,
    Prospect,
    ScanRatio,
    ScheduledRatio,
    ThresholdRatio,
    ideal_factor,
    pareto,
    scan,
)

from .ratio_periods import NETWORK, OPTIONS, curve, observe

ORIGINAL = {"gentle": 0.99, "strong": 0.25, "threshold": 0.5, "smoothing": 1.0, "epochs": 10.0, "decay": True}
"""Accordion as in the paper, with the released ratios for Top-k."""

POLICIES = {
    "fixed": ScheduledRatio(ratio=0.01),
    "dense": ScheduledRatio(),
    "warm-up": ScheduledRatio(ratio=0.001, schedule=WARM_UP),
    "accordion, released": Accordion(),
    "accordion, original": Accordion(**ORIGINAL),
    "gravac": Gravac(window=40),
    "gravac, geometric": Gravac(raises="geometric", largest=2000, window=20),
    "threshold": ThresholdRatio(ratio=0.01),
    "scan": ScanRatio(options=OPTIONS[1:], least_gain=0),
    "auto": AutoRatio(options=OPTIONS, least_gain=0.05),
}


@st.composite
def periods(draw):
    """What one period may be like, but for the ratio."""
    exponent = draw(st.floats(0, 0.6))
    return {
        "gain_of": (lambda ratio: ratio**exponent) if draw(st.integers(0, 3)) else None,
        "steps": draw(st.integers(1, 50)),
        "step_time_s": draw(st.floats(1e-3, 10)),
        "norm": draw(st.floats(0, 100)),
        "rate": draw(st.none() | st.floats(1e-4, 1)),
        "gain": None if draw(st.booleans()) else draw(st.floats(1e-3, 1)),
        "levels": draw(st.none() | st.tuples(st.floats(1e-3, 1), st.floats(1e-3, 1)).map(sorted).map(tuple)),
    }


@pytest.mark.parametrize("name", POLICIES)
@given(seen=st.lists(periods(), min_size=1, max_size=12))
@settings(max_examples=15)
def test_every_rank_decides_alike_and_a_restart_changes_nothing(name, seen):
    policy = POLICIES[name]
    decision, state, step = policy.first(NETWORK), policy.initial(), 0
    for k, period in enumerate(seen):
        step += period["steps"]
        used = next((o for o in OPTIONS if o.key == decision.option), None)
        option = used.key if used is not None else None
        observation = observe(decision.ratio, step=step, epoch=k / 3, option=option, **period)
        restored = type(state).model_validate_json(state.model_dump_json())
        assert restored == state
        outcome = policy.decide(state, observation)
        assert policy.decide(restored, observation) == outcome
        before, (state, decision) = decision, outcome
        assert 0 < decision.ratio <= 1
        sent = [(each.ratio, each.option, each.floor_ratio) for each in (before, decision)]
        assert (decision.reason is not None) == (sent[0] != sent[1])
        assert decision.look_after_steps is None or decision.look_after_steps >= 1
        assert len(state.model_dump_json()) < 6000


# --- what is observed ---


@given(st.floats(0, 1), st.lists(st.floats(0.01, 100), min_size=2, max_size=5), st.floats(-3.5, 0))
def test_a_gain_curve_is_monotone_and_ends_at_one(exponent, energies, at):
    own = curve(lambda ratio: ratio**exponent, energies=tuple(energies))
    ratio = 10**at
    assert own.gain(1.0) == 1
    assert ratio <= own.gain(ratio) + 1e-9
    assert own.gain(ratio) <= own.gain(min(1.0, 2 * ratio)) + 1e-12
    assert own.gains(ratio) == pytest.approx((own.gain(ratio),) * len(energies))


def test_workers_count_by_their_energy():
    own = GainCurve(ratios=(0.1,), kept=((1.0,), (9.0,)), energy=(10.0, 10.0))
    assert own.gain(0.1) == pytest.approx(0.5)
    assert own.gains(0.1) == pytest.approx((0.1, 0.9))
    assert GainCurve(ratios=(0.1,), kept=((0.0,),), energy=(0.0,)).gain(0.1) == 1


# --- DGC's warm-up ---


def test_warm_up_is_dgcs():
    """Sparsity of 75, 93.75, 98.4375, 99.6 and from the fourth epoch on 99.9 %."""
    policy = ScheduledRatio(ratio=0.001, schedule=WARM_UP)
    assert [round(100 * (1 - policy.at(epoch)), 4) for epoch in range(6)] == [75, 93.75, 98.4375, 99.6, 99.9, 99.9]
    assert policy.first(None).ratio == 0.25
    _, decision = policy.decide(policy.initial(), observe(0.25, epoch=1.02))
    assert (decision.ratio, decision.reason) == (0.0625, "warm-up: 6.25 % (16x) from epoch 1.02")


# --- Accordion ---


def accordion_ratios(policy, norms, *, epochs=None, rates=None):
    state, ratio, found = policy.initial(), policy.first(None).ratio, []
    for k, norm in enumerate(norms):
        epoch = float(k) if epochs is None else epochs[k]
        rate = None if rates is None else rates[k]
        state, decision = policy.decide(state, observe(ratio, norm=norm, epoch=epoch, rate=rate))
        ratio = decision.ratio
        found.append(ratio)
    return found


def test_accordion_is_gentle_while_the_norm_changes():
    policy = Accordion(smoothing=1.0)
    assert accordion_ratios(policy, [10, 7, 6.9, 6.8, 9, 9]) == [0.01, 0.01, 0.001, 0.001, 0.01, 0.001]


def test_the_original_accordion_looks_every_ten_epochs_and_at_the_learning_rate():
    policy = Accordion(**ORIGINAL)
    norms = [10.0] * 10 + [4.0] * 10 + [4.0] * 10
    found = accordion_ratios(policy, norms)
    assert found == [0.99] * 20 + [0.25] * 10
    rates = [0.1] * 25 + [0.01] * 5
    assert accordion_ratios(policy, norms, rates=rates) == [0.99] * 20 + [0.25] * 5 + [0.99] * 5


# --- Laws of the policies that search or judge: GraVAC, ScaDLES's threshold, and AR-Topk's choice made exact


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


# --- ScaDLES ---


@pytest.mark.parametrize("count", range(5))
def test_more_than_half_of_the_votes_compress(count):
    """A minority and a tie do not, as they do in the released code."""
    kept = ((0.9,),) * count + ((0.5,),) * (4 - count)
    seen = replace(observe(DENSE), gain_curve=GainCurve(ratios=(0.1,), kept=kept, energy=(1.0,) * 4))
    policy = ThresholdRatio(ratio=0.1, delta=0.1)
    assert policy.decide(policy.initial(), seen)[1].ratio == (0.1 if count > 2 else DENSE)


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
