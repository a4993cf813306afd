"""What compression costs in steps, and when it may not be planned with."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.training_laws import COEFFICIENT_SD, LEAST_GAIN, step_inflation
from hetopt.optimizer.convergence.compression_penalty import (
    CompressedPilot,
    CompressionPenalty,
    QualityGate,
    fit_penalty,
)

gains = st.floats(0.01, 1.0)


def pilot(
    *, ratio: float = 0.01, gain: float = 0.5, trained: float = 4_000, reached: float | None = 2_000
) -> CompressedPilot:
    return CompressedPilot(
        scheme="topk",
        ratio=ratio,
        gain=gain,
        dense_steps=1_000,
        steps_trained=trained,
        steps_to_target=reached,
    )


@given(gains)
def test_unfitted_it_is_the_inflation_of_the_trainer(gain: float) -> None:
    assert float(CompressionPenalty().inflation(gain)) == pytest.approx(step_inflation(gain))


@given(gains, gains, st.floats(0, 3))
def test_keeping_more_never_costs_more(one: float, other: float, coefficient: float) -> None:
    penalty = CompressionPenalty(coefficient=coefficient)
    poor, good = sorted((one, other))
    assert float(penalty.inflation(good)) >= 1
    assert penalty.inflation(good) <= penalty.inflation(poor) * (1 + 1e-12)
    assert float(penalty.log_sd(1.0)) == 0


@given(st.floats(1.0, 10.0), st.floats(0.01, 1))
def test_no_more_is_lost_than_may_be(inflation: float, coefficient: float) -> None:
    gain = CompressionPenalty(coefficient=coefficient, coefficient_sd=0.0).least_gain(inflation)
    assert LEAST_GAIN <= gain <= 1
    assert step_inflation(gain, coefficient) <= inflation * (1 + 1e-9)


def test_what_was_measured_lies_inside_the_prior() -> None:
    """0.11 to 0.14 for a small ResNet, at most 0.03 for an LSTM."""
    low, high = (CompressionPenalty().coefficient + sign * 1.645 * COEFFICIENT_SD for sign in (-1, 1))
    assert low < 0.0 < 0.14 < high


def test_pilots_teach_the_coefficient() -> None:
    planted = [pilot(gain=g, reached=1_000 * step_inflation(g, 0.3)) for g in (0.02, 0.05, 0.1)]
    penalty = fit_penalty(planted)
    assert penalty.coefficient == pytest.approx(0.3, abs=0.05)
    assert penalty.coefficient_sd < 0.06 < COEFFICIENT_SD
    assert fit_penalty([pilot(reached=None)]) == CompressionPenalty()
    # a pilot that held next to nothing back teaches next to nothing
    assert fit_penalty([pilot(gain=0.999, reached=1_010)]).coefficient_sd == pytest.approx(0.12, abs=0.02)


def test_the_gate_opens_for_high_gain_or_a_pilot_that_arrived() -> None:
    unproven = QualityGate()
    assert unproven.objection(scheme="topk", ratio=0.1, gain=LEAST_GAIN) is None
    refused = unproven.objection(scheme="topk", ratio=0.01, gain=0.04)
    assert refused is not None
    assert "no pilot has shown" in refused
    proven = QualityGate(pilots=(pilot(ratio=0.01, gain=0.04),))
    assert proven.objection(scheme="topk", ratio=0.01, gain=0.04) is None
    assert proven.objection(scheme="topk", ratio=0.05, gain=0.04) is None
    assert proven.objection(scheme="topk", ratio=0.001, gain=0.03) is not None
    assert proven.objection(scheme="randomk", ratio=0.01, gain=0.01) is not None


def test_a_pilot_that_fell_short_closes_the_gate_whatever_the_gain() -> None:
    """An LSTM kept 80 to 90 % of its gradient and still fell short: gain alone does not tell."""
    gate = QualityGate(pilots=(pilot(ratio=0.001, gain=0.85, trained=4_000, reached=None),))
    for ratio in (0.001, 0.0005):
        objection = gate.objection(scheme="topk", ratio=ratio, gain=0.85)
        assert objection is not None
        assert "did not reach the target in 4000 steps" in objection
    assert gate.objection(scheme="topk", ratio=0.01, gain=0.95) is None
    # one that was stopped early has shown nothing
    early = QualityGate(pilots=(pilot(ratio=0.001, gain=0.85, trained=1_200, reached=None),))
    assert early.objection(scheme="topk", ratio=0.001, gain=0.85) is None


@pytest.mark.parametrize(
    "change",
    [{"gain": 0.0}, {"ratio": 1.5}, {"trained": 0}, {"reached": 5_000}, {"reached": math.nan}],
)
def test_impossible_pilots_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="pilot"):
        pilot(**change)


def test_an_impossible_coefficient_is_refused() -> None:
    with pytest.raises(ValueError, match="coefficient"):
        CompressionPenalty(coefficient=-1)
