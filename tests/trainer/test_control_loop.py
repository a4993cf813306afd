"""What the loop reads off its steps, and what it remembers of it: rows, shares, and milestones."""

from __future__ import annotations

import json
import math
from dataclasses import astuple

import pytest
import torch
from hypothesis import given, strategies as st

from hetopt.core.run_spec import RunSpec, StopRule
from hetopt.trainer.engine import LONGEST_PERIOD_S, Milestones
from hetopt.trainer.steps.period import ControlRow, Period, PeriodLog
from hetopt.trainer.steps.step import StepTrace

from .scenarios import toy_spec


class Ticks:
    """A stopwatch that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def processor_s(self, first: float, last: float) -> float:  # type: ignore[override]
        return (last - first) / 2

    def seconds(self, first: float, last: float) -> float:
        return last - first


def step(log: PeriodLog, ticks: Ticks, compute_s: float, *, loss: float = 1.0) -> None:
    """One step: a second of preparation, the computation, two seconds of exchange, a second of applying it."""
    begun = ticks.now_s + 1
    ticks.now_s += compute_s + 4
    log.add(
        StepTrace(
            loss_sum=torch.tensor(loss, dtype=torch.float64),
            start=begun,
            backward_end=begun + compute_s,
            reduce_end=begun + compute_s + 2,
        )
    )


def close(log: PeriodLog) -> ControlRow:
    return log.close(pace_use=0.5, memory_bound=7, stop_wished=False, since_checkpoint_s=9.0)


def test_a_row_tells_of_the_steps_since_the_last_one() -> None:
    ticks = Ticks()
    log = PeriodLog(ticks)
    for compute_s in (10.0, 12.0, 11.0, 30.0):
        step(log, ticks, compute_s)
    assert log.unread == 4
    row = close(log)
    assert log.unread == 0
    assert (row.steps, row.step_time_s, row.compute_s, row.exchange_s) == (4, 15.75 + 4, 15.75, 2)
    assert (row.judged_steps, row.compute_median_s) == (4, 11.5)
    assert row.compute_spread_s == pytest.approx(1.4826 * 1.0)
    assert (row.loss_sum, row.memory_bound, row.pace_use) == (4.0, 7, 0.5)
    ticks.now_s += 100
    log.resume()
    step(log, ticks, 10.0)
    row = close(log)
    assert row.step_time_s == 14, "what lies between periods is no part of a step"
    assert (row.judged_steps, row.compute_median_s) == (5, 11), "judged are all steps since shares were last judged"
    *numbers, looked = astuple(row)
    assert ControlRow(*numbers, look_energies=looked) == row


def test_steps_with_other_shares_are_no_evidence_about_the_new_ones() -> None:
    ticks = Ticks()
    log = PeriodLog(ticks)
    step(log, ticks, 10.0)
    close(log)
    step(log, ticks, 99.0)  # under way when the shares change
    log.judged(changed=True)
    for compute_s in (5.0, 6.0, 7.0):
        step(log, ticks, compute_s)
    row = close(log)
    assert (row.steps, row.loss_sum) == (4, 4)
    assert (row.judged_steps, row.compute_s, row.compute_median_s) == (3, 6, 6)
    assert row.step_time_s == (99 + 5 + 6 + 7) / 4 + 4
    step(log, ticks, 8.0)
    log.judged(changed=False)
    step(log, ticks, 6.0)
    assert close(log).judged_steps == 2, "shares that stayed: every step counts"


def period(rows: list[ControlRow], shares: tuple[int, ...]) -> Period:
    return Period(rows=tuple(rows), local_batch_sizes=shares)


def run_spec(**changes: object) -> RunSpec:
    return RunSpec.model_validate_json(json.dumps(toy_spec(**changes)))


@given(steps=st.integers(1, 40), size=st.integers(20, 200), batch=st.integers(1, 30), done=st.integers(0, 50))
def test_all_meet_where_a_run_ends_or_is_evaluated(steps: int, size: int, batch: int, done: int) -> None:
    spec = run_spec(stop={"max_steps": 60})
    plan = Milestones(
        stop=spec.stop, dataset_size=size, global_batch_size=batch, evaluate_every_epochs=1, control_period_steps=20
    )
    seen = done * batch
    expected = done + steps >= 60 or (seen + steps * batch) // size > seen // size
    assert plan.all_meet(done, seen, steps) == expected


# --- When all meet, and when a run ends: milestones


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


@pytest.mark.parametrize(
    ("stop", "step", "left"),
    [
        ({"max_steps": 50}, 10, 40),
        ({"max_steps": 50, "max_epochs": 2.0}, 10, 15),
        ({"max_epochs": 2.0}, 30, 1),
        ({"max_steps": 50, "target": True}, 10, None),
    ],
)
def test_a_run_of_fixed_length_knows_its_steps(stop: dict[str, float], step: int, left: int | None) -> None:
    assert milestones(StopRule.model_validate(stop)).steps_left(step, 8 * step) == left
