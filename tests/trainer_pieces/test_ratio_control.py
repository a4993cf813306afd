"""Laws of the ratio policies: all ranks decide alike, restarts change nothing, and each does what was published."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetopt.core.errors import BadInput
from hetopt.core.run_rules import CONTROLLERS
from hetopt.core.training_laws import step_inflation
from hetopt.trainer.policies.ratio.accordion import Accordion
from hetopt.trainer.policies.ratio.auto import AutoRatio
from hetopt.trainer.policies.ratio.choose import WARM_UP, ScheduledRatio, choose_ratio_policy
from hetopt.trainer.policies.ratio.gravac import Gravac
from hetopt.trainer.policies.ratio.policy import GainCurve
from hetopt.trainer.policies.ratio.scan import ScanRatio
from hetopt.trainer.policies.ratio.threshold import ThresholdRatio

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


@given(st.sampled_from([None, NETWORK]), st.sampled_from(sorted(CONTROLLERS)))
@settings(max_examples=20)
def test_policies_are_chosen_by_name(network, name):
    policy = choose_ratio_policy(name, ratio=0.01, options=OPTIONS)
    assert 0.01 <= policy.first(network).ratio <= 1


def test_unknown_policies_and_idle_ones_are_refused():
    with pytest.raises(BadInput, match="'gravack'") as caught:
        choose_ratio_policy("gravack", ratio=0.1)
    assert "'gravac'" in str(caught.value.hint)
    with pytest.raises(BadInput, match="the ratio of accordion must be above 0 and below 1, got 1"):
        choose_ratio_policy("accordion", ratio=1.0)


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


# --- what compression costs ---


# --- DGC's warm-up ---


def test_warm_up_is_dgcs():
    """Sparsity of 75, 93.75, 98.4375, 99.6 and from the fourth epoch on 99.9 %."""
    policy = ScheduledRatio(ratio=0.001, schedule=WARM_UP)
    assert [round(100 * (1 - policy.at(epoch)), 4) for epoch in range(6)] == [75, 93.75, 98.4375, 99.6, 99.9, 99.9]
    assert policy.first(None).ratio == 0.25
    _, decision = policy.decide(policy.initial(), observe(0.25, epoch=1.02))
    assert (decision.ratio, decision.reason) == (0.0625, "warm-up: 6.25 % (16x) from epoch 1.02")


@given(st.floats(1e-4, 1), st.floats(0, 10), st.floats(0, 10))
def test_warm_up_never_sends_less_than_the_ratio_nor_more_later(ratio, one, other):
    policy, (early, late) = ScheduledRatio(ratio=ratio, schedule=WARM_UP), sorted((one, other))
    assert policy.at(early) >= policy.at(late) >= ratio


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


def test_accordion_smooths_single_norms():
    assert accordion_ratios(Accordion(smoothing=0.1), [10, 10, 13, 10])[1:] == [0.001] * 3


def test_the_original_accordion_looks_every_ten_epochs_and_at_the_learning_rate():
    policy = Accordion(**ORIGINAL)
    norms = [10.0] * 10 + [4.0] * 10 + [4.0] * 10
    found = accordion_ratios(policy, norms)
    assert found == [0.99] * 20 + [0.25] * 10
    rates = [0.1] * 25 + [0.01] * 5
    assert accordion_ratios(policy, norms, rates=rates) == [0.99] * 20 + [0.25] * 5 + [0.99] * 5


def test_accordion_is_blind_to_norms_that_stay_zero():
    assert accordion_ratios(Accordion(), [0.0, 0.0, 0.0]) == [0.01, 0.001, 0.001]


@pytest.mark.parametrize(
    "impossible",
    [
        lambda: Accordion(threshold=0),
        lambda: Gravac(floor=0.5),
        lambda: Gravac(window=0),
        lambda: ThresholdRatio(ratio=1.0),
        lambda: ThresholdRatio(delta=1.5),
        lambda: ScanRatio(options=()),
        lambda: ScanRatio(options=OPTIONS, time=-1),
        lambda: AutoRatio(options=OPTIONS[1:]),
        lambda: AutoRatio(options=(*OPTIONS, OPTIONS[0])),
        lambda: step_inflation(0),
    ],
)
def test_impossible_settings_are_refused(impossible):
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own sentence
        impossible()
