"""Numerics of our own, which are there because importing scipy takes too long, give what scipy gives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.optimize import least_squares, minimize, nnls
from scipy.special import ndtr, stdtrit

from hetopt.core.memory import non_negative, robust_non_negative
from hetopt.core.profile import Profile
from hetopt.core.step_samples import read_samples
from hetopt.optimizer.convergence.steps_law import student_half_width
from hetopt.optimizer.fit import HUBER_RELATIVE
from hetopt.optimizer.step_time import posterior, step_time
from hetopt.optimizer.step_time.model import observe_profile
from hetopt.optimizer.step_time.observed import Observed, observe
from hetopt.optimizer.step_time.priors import Latents

RECORDED = sorted((Path(__file__).resolve().parents[1] / "recorded").glob("*.json"))
ENTRIES = st.floats(1e-3, 1e3)

Array: TypeAlias = NDArray[np.float64]


@given(st.lists(st.tuples(ENTRIES, ENTRIES, st.floats(1e-2, 1.0)), min_size=2, max_size=8))
def test_two_coefficients_are_those_of_nnls(rows: list[tuple[float, float, float]]) -> None:
    table = np.array(rows)
    design, weights = table[:, :2], table[:, 2]

    def loss(coefficients: Array) -> float:
        return float(weights @ (design @ coefficients - 1) ** 2)

    root = np.sqrt(weights)
    exact, _ = nnls(design * root[:, None], root)
    found = non_negative(design, weights)
    assert (found >= 0).all()
    assert loss(found) == pytest.approx(loss(exact), rel=1e-6, abs=1e-9)


def profiles() -> list[Profile]:
    return [Profile.load(path) for path in RECORDED]


def test_robust_lines_through_recorded_steps_are_those_of_hubers_loss() -> None:
    compared = 0
    for device in (device for profile in profiles() for device in profile.devices if len(device.step_times) > 2):
        sizes = np.array([point.local_batch_size for point in device.step_times], dtype=np.float64)
        times = np.array([point.step_time_s for point in device.step_times])
        design = np.stack([sizes / times, 1 / times], axis=1)
        own = robust_non_negative(design, lambda _: HUBER_RELATIVE)
        start = np.array([times[-1] / sizes[-1], times[0]])
        theirs = least_squares(
            lambda share, design=design, start=start: design @ (share * start) - 1,
            np.ones(2),
            bounds=(0, np.inf),
            loss="huber",
            f_scale=HUBER_RELATIVE,
            xtol=1e-12,
            ftol=1e-12,
        )
        np.testing.assert_allclose(design @ own, design @ (theirs.x * start), rtol=2e-3)
        compared += 1
    assert compared


@pytest.mark.parametrize("freedom", [3, 4, 6, 10, 30, 1000])
def test_half_widths_are_those_of_students_t(freedom: int) -> None:
    assert student_half_width(freedom) == pytest.approx(stdtrit(freedom, 0.95), rel=0.01)


def density(value: float) -> float:
    """Return that of the normal distribution; `scipy.stats` takes a second to import."""
    return math.exp(-0.5 * value**2) / math.sqrt(2 * math.pi)


def test_the_normal_distribution_is_scipys() -> None:
    x = np.linspace(-8, 8, 997)
    np.testing.assert_allclose(step_time._normal_cdf(x), ndtr(x), rtol=0, atol=5e-6)
    for count in (2, 5, 64):
        exact, _ = quad(lambda value, n=count: value * n * density(value) * ndtr(value) ** (n - 1), -10, 10)
        assert step_time.expected_maximum(count) == pytest.approx(exact, rel=1e-5)


def is_a_peak(observed: Observed) -> bool:
    """Whether scipy, which starts from our parameters and needs no derivatives, finds none that are likelier."""
    found = posterior.fit(observed, classes=())
    latents = Latents.at(observed.rows.points, observed.rows.layouts, found.latents.spread)
    mean, sd = posterior._priors(observed, found.where, posterior.PRIORS)
    problem = posterior._problem(observed, found.where, mean, sd, latents)
    scale = np.sqrt(np.diag(found.covariance))

    def loss(away: Array) -> float:
        return posterior._peak(problem, found.mode + scale * away).loss

    best = minimize(loss, np.zeros(len(found.mode)), method="L-BFGS-B", options={"maxiter": 30})
    return loss(np.zeros(len(found.mode))) - float(best.fun) < 0.2


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_posterior_of_a_recorded_profile_is_at_its_peak(path: Path) -> None:
    assert is_a_peak(observe_profile(Profile.load(path)))


def test_the_posterior_of_measured_steps_is_at_its_peak(shared_data: Path) -> None:
    with (shared_data / "step-traces" / "bert-aws" / "profile.jsonl").open() as lines:
        assert is_a_peak(observe(read_samples(lines, origin="bert")))
