"""What compression costs in steps, and when it may not be planned with."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.optimizer.compression_penalty import (
    EXPONENT_SD,
    UNPROVEN_GAIN,
    CompressedPilot,
    CompressionPenalty,
    QualityGate,
    fit_penalty,
)
from hetopt.profiler.inflation import step_inflation

gains, shares = st.floats(0.01, 1.0), st.floats(0.0, 1.0)


def pilot(
    *, ratio: float = 0.01, gain: float = 0.5, share: float = 1.0, trained: float = 4_000, reached: float | None = 2_000
) -> CompressedPilot:
    return CompressedPilot(
        scheme="topk",
        ratio=ratio,
        gain=gain,
        deterministic_share=share,
        dense_steps=1_000,
        steps_trained=trained,
        steps_to_target=reached,
    )


@given(gains, shares)
def test_unfitted_it_is_the_inflation_of_the_trainer(gain: float, share: float) -> None:
    assert float(CompressionPenalty().inflation(gain, share)) == pytest.approx(step_inflation(gain, share))


@given(gains, gains, shares, st.floats(0, 3))
def test_keeping_more_never_costs_more(one: float, other: float, share: float, exponent: float) -> None:
    penalty = CompressionPenalty(exponent=exponent)
    poor, good = sorted((one, other))
    assert float(penalty.inflation(good, share)) >= 1 - 1e-12
    assert penalty.inflation(good, share) <= penalty.inflation(poor, share) * (1 + 1e-12)
    assert float(penalty.log_sd(1.0, share)) == 0


def test_pilots_teach_the_exponent() -> None:
    planted = [pilot(gain=g, reached=1_000 * g**-0.4) for g in (0.2, 0.4, 0.6)]
    penalty = fit_penalty(planted)
    assert penalty.exponent == pytest.approx(0.4, abs=0.05)
    assert penalty.exponent_sd < 0.15 < EXPONENT_SD
    assert fit_penalty([pilot(reached=None)]) == CompressionPenalty()
    # below the critical batch size compression costs next to nothing, so such a pilot teaches next to nothing
    assert fit_penalty([pilot(share=0.01, reached=1_010)]).exponent_sd == pytest.approx(EXPONENT_SD, rel=0.1)


def test_the_gate_opens_for_high_gain_or_a_pilot_that_arrived() -> None:
    unproven = QualityGate()
    assert unproven.objection(scheme="topk", ratio=0.1, gain=UNPROVEN_GAIN) is None
    refused = unproven.objection(scheme="topk", ratio=0.01, gain=0.5)
    assert refused is not None
    assert "no pilot has shown" in refused
    proven = QualityGate(pilots=(pilot(ratio=0.01),))
    assert proven.objection(scheme="topk", ratio=0.01, gain=0.5) is None
    assert proven.objection(scheme="topk", ratio=0.05, gain=0.6) is None
    assert proven.objection(scheme="topk", ratio=0.001, gain=0.3) is not None
    assert proven.objection(scheme="randomk", ratio=0.01, gain=0.5) is not None


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
    [{"gain": 0.0}, {"ratio": 1.5}, {"share": -0.1}, {"trained": 0}, {"reached": 5_000}, {"reached": math.nan}],
)
def test_impossible_pilots_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="pilot"):
        pilot(**change)


def test_an_impossible_exponent_is_refused() -> None:
    with pytest.raises(ValueError, match="exponent"):
        CompressionPenalty(exponent=-1)
