"""Laws of steps by batch size: what every fit keeps, what planted runs give back, and how one law is preferred."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._law_choice import MCCANDLISH, SCAVENGER, StepsLaw, hold_out
from hetopt.optimizer.convergence.averaged_law import KAPPA, AveragedLaw
from hetopt.optimizer.convergence.steps_law import Z90, PriorRun, student_half_width

SIZES = (64, 128, 256, 512, 1024, 2048)
LAWS: tuple[StepsLaw, ...] = (AveragedLaw(), MCCANDLISH, SCAVENGER)
runs_of_a_job = st.lists(
    st.builds(
        PriorRun, global_batch_size=st.sampled_from([2.0**k for k in range(4, 15)]), steps_to_target=st.floats(1, 1e7)
    ),
    min_size=1,
    max_size=8,
)


def runs(steps: Callable[[float], float], sizes: Sequence[float] = SIZES) -> list[PriorRun]:
    return [PriorRun(global_batch_size=b, steps_to_target=steps(b)) for b in sizes]


def mccandlish(batch: float) -> float:
    return 1_000 + 1e6 / batch


def scavenger(batch: float) -> float:
    return (2e5 + 4e6 / math.sqrt(batch)) / batch


@given(runs_of_a_job, st.one_of(st.none(), st.floats(0, 1e12)))
def test_more_batch_needs_neither_more_steps_nor_fewer_samples(found: list[PriorRun], noise: float | None) -> None:
    batch = np.geomspace(1, 1e6, 40)
    steps = AveragedLaw(noise_scale=noise).fit(found).steps(batch)
    assert np.isfinite(steps).all()
    assert (steps > 0).all()
    assert (np.diff(steps) <= 1e-9 * steps[1:]).all()
    assert (np.diff(steps * batch) >= -1e-9 * (steps * batch)[1:]).all()


@given(runs_of_a_job, st.randoms())
def test_order_and_units_of_the_runs_do_not_matter(found: list[PriorRun], random) -> None:
    shuffled = found.copy()
    random.shuffle(shuffled)
    doubled = [
        PriorRun(global_batch_size=run.global_batch_size, steps_to_target=3 * run.steps_to_target) for run in found
    ]
    at = np.array([32.0, 500.0, 20_000.0])
    fitted = AveragedLaw().fit(found)
    assert AveragedLaw().fit(shuffled).steps(at) == pytest.approx(fitted.steps(at), rel=1e-6)
    assert AveragedLaw().fit(doubled).steps(at) == pytest.approx(3 * fitted.steps(at), rel=1e-6)
    assert AveragedLaw().fit(doubled).log_sd(at) == pytest.approx(fitted.log_sd(at), rel=1e-4)


@pytest.mark.parametrize(("law", "truth"), [(MCCANDLISH, mccandlish), (SCAVENGER, scavenger)])
def test_published_laws_give_their_own_runs_back(law: StepsLaw, truth: Callable[[float], float]) -> None:
    curve = law.fit(runs(truth, (64, 512)))
    assert float(curve.steps(4096)) == pytest.approx(truth(4096), rel=1e-6)


def test_the_average_comes_close_to_runs_without_spread() -> None:
    """Not onto them: it always allows for a run's spread, so at the ends of the range it leans on its prior."""
    errors = [abs(held.log_error) for held in hold_out(AveragedLaw(), runs(mccandlish))]
    assert max(errors) < 0.05
    assert np.median(errors) < 0.02


def test_intervals_widen_away_from_the_runs_and_with_fewer_of_them() -> None:
    curve = AveragedLaw().fit(runs(mccandlish))
    near, far, further = curve.log_sd(np.array([256.0, 16_384.0, 131_072.0]))
    assert near < far < further
    assert AveragedLaw().fit(runs(mccandlish, (64, 256))).log_sd(4096) > curve.log_sd(4096)
    assert AveragedLaw().fit(runs(mccandlish, (64,))).log_sd(4096) > 0.5


def test_the_noise_scale_stands_in_for_a_second_batch_size() -> None:
    one = runs(mccandlish, (64,))  # the critical batch size is 1,000
    informed, blind = AveragedLaw(noise_scale=1_000.0 / KAPPA).fit(one), AveragedLaw().fit(one)
    assert float(informed.steps(2048)) == pytest.approx(mccandlish(2048), rel=0.01)
    assert informed.log_sd(2048) < blind.log_sd(2048)
    many = runs(mccandlish)
    misled = AveragedLaw(noise_scale=1e9).fit(many).steps(4096)
    assert float(misled) == float(AveragedLaw().fit(many).steps(4096))


@pytest.mark.parametrize("spread", [0.02, 0.07, 0.15])
def test_nine_in_ten_new_batch_sizes_fall_in_the_interval(spread: float) -> None:
    rng = np.random.default_rng(7)
    inside, total = 0, 0
    for _ in range(60):
        critical = math.exp(rng.uniform(math.log(32), math.log(20_000)))
        found = runs(lambda b, c=critical: 1e5 * (1 / b + 1 / c) * math.exp(spread * rng.normal()))
        held = hold_out(AveragedLaw(), found)
        inside += sum(abs(each.log_error) <= Z90 * each.log_sd for each in held)
        total += len(held)
    assert 0.84 <= inside / total <= (1.0 if spread < 0.07 else 0.97)


def test_many_clusters_at_few_batch_sizes_are_quick() -> None:
    """A plan asks for a hundred thousand clusters at once, at some dozens of batch sizes."""
    curve = AveragedLaw().fit(runs(mccandlish))
    sizes = np.array([64.0, 512.0])
    asked = np.tile(sizes, (50_000, 1))
    assert (curve.steps(asked) == curve.steps(sizes)).all()
    assert (curve.log_sd(asked) == curve.log_sd(sizes)).all()


@pytest.mark.parametrize(("freedom", "exact"), [(3, 2.3534), (5, 2.0150), (10, 1.8125), (100, 1.6602)])
def test_quantile_of_students_t(freedom: int, exact: float) -> None:
    assert student_half_width(freedom) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(("batch", "steps"), [(0, 1), (-1, 1), (1, 0), (1, math.inf), (math.nan, 1)])
def test_impossible_runs_are_refused(batch: float, steps: float) -> None:
    with pytest.raises(ValueError, match="above zero"):
        PriorRun(global_batch_size=batch, steps_to_target=steps)


def test_a_law_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="two batch sizes"):
        MCCANDLISH.fit(runs(mccandlish, (64, 64)))
    with pytest.raises(ValueError, match="at least one run"):
        AveragedLaw().fit([])
