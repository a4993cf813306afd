"""Declared times are kept, whatever the real computation takes, and conditions count from the next step on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from hetopt.core.run_folder import conditions_in, write_conditions
from hetopt.core.run_spec import Conditions, DeclaredTime, WorkerSpec
from hetopt.trainer.steps.stopwatch import Declared, Slowdown, Stretched, make_pace

from .virtual_time import VirtualClock

CPU = torch.device("cpu")


def declared(time_: VirtualClock, run_dir: Path) -> Declared:
    return Declared(
        DeclaredTime(fixed_s=0.01, per_sample_s=0.002),
        "h1",
        conditions_in(run_dir),
        clock=time_,
        sleep=time_.sleep,
    )


@given(samples=st.integers(1, 100), parts=st.lists(st.floats(0, 0.02), min_size=1, max_size=6))
def test_a_step_takes_as_long_as_declared_unless_computing_takes_longer(samples: int, parts: list[float]) -> None:
    clock = VirtualClock()
    pace = declared(clock, Path("/nowhere"))
    pace.begin(samples)
    declared_s = 0.01 + 0.002 * samples
    for number, computed_s in enumerate(parts, start=1):
        clock.now_s += computed_s
        done = number / len(parts)
        pace.reach(done)
        assert clock.now_s >= done * declared_s - 1e-9
    assert clock.now_s >= declared_s - 1e-9
    if sum(parts) <= declared_s / len(parts):
        assert clock.now_s == pytest.approx(declared_s)


def test_conditions_count_from_the_next_step_on(tmp_path: Path) -> None:
    clock = VirtualClock()
    pace = declared(clock, tmp_path)

    def step_s() -> float:
        begun_s = clock.now_s
        pace.begin(10)
        write_conditions(tmp_path, changed)
        pace.reach(1.0)
        return clock.now_s - begun_s

    changed = Conditions(slowdown=2.0, speed_factors={"h1": 0.5, "h2": 9.0})
    assert step_s() == pytest.approx(0.03)
    changed = Conditions(slowdown=1.0, speed_factors={"h2": 9.0})
    assert step_s() == pytest.approx(0.03 * 2 / 0.5)
    assert step_s() == pytest.approx(0.03)


def test_a_stretched_worker_waits_in_proportion_to_the_time_it_used() -> None:
    used = iter([10.0, 10.5, 10.5, 10.75, 10.75])
    waits: list[float] = []
    pace = Stretched(3.0, lambda: next(used), waits.append)
    pace.begin(4)
    pace.reach(0.5)
    pace.reach(1.0)
    assert waits == [1.0, 0.5]
    assert pace.use() == 0


@pytest.mark.parametrize(
    ("worker", "kind"),
    [({}, Slowdown), ({"slowdown": 2}, Stretched), ({"slowdown": 2, "declared": {"per_sample_s": 0.1}}, Declared)],
)
def test_what_a_worker_has_decides_its_pace(tmp_path: Path, worker: dict[str, object], kind: type) -> None:
    spec = WorkerSpec.model_validate({"host": "h0", "type": "local", "local_batch_size": 4, **worker})
    pace = make_pace(spec, CPU, conditions=conditions_in(tmp_path), own_core=False)
    assert type(pace) is kind
