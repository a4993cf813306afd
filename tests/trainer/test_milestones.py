from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.run_spec import StopRule
from hetopt.trainer.balance import LONGEST_PERIOD_S, Milestones


def milestones(stop: StopRule, *, size: int = 100, batch: int = 8, every: float = 1.0, period: int = 20) -> Milestones:
    return Milestones(
        stop=stop,
        dataset_size=size,
        global_batch_size=batch,
        evaluate_every_epochs=every,
        control_period_steps=period,
    )


def walk(plan: Milestones, step_time_s: float | None, steps: int = 5000) -> tuple[list[int], list[int], str | None]:
    """Steps at which periods end, steps at which evaluations are due, and why the walk ends."""
    step, looks, evaluations = 0, [], []
    reason = plan.ended_by(step, 0)
    while reason is None and step < steps:
        before = step * plan.global_batch_size
        step += plan.period_steps(step, before, step_time_s if looks else None)
        looks.append(step)
        if plan.evaluation_due(before, step * plan.global_batch_size):
            evaluations.append(step)
        reason = plan.ended_by(step, step * plan.global_batch_size)
    return looks, evaluations, reason


@given(
    size=st.integers(1, 500),
    batch=st.integers(1, 64),
    epochs=st.integers(1, 40).map(lambda tenths: tenths / 10),
    every=st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.5]),
    step_time_s=st.floats(0, 10),
)
def test_a_run_of_epochs_ends_and_evaluates_at_the_first_step_past_each_point(
    size: int, batch: int, epochs: float, every: float, step_time_s: float
) -> None:
    plan = milestones(StopRule(max_epochs=epochs), size=size, batch=batch, every=every)
    looks, evaluations, reason = walk(plan, step_time_s)
    assert reason == "epochs"
    assert looks[-1] == math.ceil(round(epochs * size, 6) / batch)
    points = [round(k * every * size, 6) for k in range(1, math.ceil(epochs / every) + 1)]
    expected = sorted({math.ceil(point / batch) for point in points if math.ceil(point / batch) <= looks[-1]})
    assert evaluations == expected


@given(st.integers(1, 300), st.integers(1, 50), st.floats(0.001, 10))
def test_periods_are_short_and_never_overshoot(steps: int, period: int, step_time_s: float) -> None:
    plan = milestones(StopRule(max_steps=steps), size=10_000, period=period)
    looks, _, reason = walk(plan, step_time_s)
    assert reason == "steps"
    assert looks[-1] == steps
    assert looks[0] == 1, "the first step's time is not known before it"
    lengths = [after - before for before, after in zip([0, *looks], looks, strict=False)]
    assert all(1 <= length <= period for length in lengths)
    assert all(length == 1 or length * step_time_s <= LONGEST_PERIOD_S + 1e-9 for length in lengths)


def test_a_run_of_fixed_length_knows_its_steps() -> None:
    assert milestones(StopRule(max_steps=50)).steps_left(10, 80) == 40
    assert milestones(StopRule(max_steps=50, max_epochs=2.0)).steps_left(10, 80) == 15
    assert milestones(StopRule(max_epochs=2.0)).steps_left(30, 240) == 1
    assert milestones(StopRule(max_steps=50, target=True)).steps_left(10, 80) is None
