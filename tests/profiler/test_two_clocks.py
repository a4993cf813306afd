"""Speed is processor time and contention is wall over processor time: neither is taken for the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, strategies as st

from hetopt.core.calibration_benchmark import measure_yardstick_s, read_machine
from hetopt.profiler.probe.sweep import timed_step
from hetopt.trainer.steps.stopwatch import CpuMark, Stopwatch

used_s = st.lists(st.floats(1e-4, 10.0), min_size=4, max_size=4)


@given(used=used_s, contention=st.floats(1.0, 80.0), waited_s=st.floats(0.0, 10.0))
def test_a_step_takes_what_it_computes_and_waits_for_however_busy_others_keep_the_processor(
    used: list[float], contention: float, waited_s: float
) -> None:
    """It waits for its samples as long as ever; computing, loading included, takes longer on the wall alone."""
    walls = [contention * part for part in used]
    walls[0] += waited_s
    marks = [CpuMark(*clocks) for clocks in zip(accumulate([0.0, *walls]), accumulate([0.0, *used]), strict=True)]
    step = timed_step(Stopwatch(), (marks[0], marks[-1]), *([span] for span in pairwise(marks)))
    assert step.wall_s == pytest.approx(sum(walls))
    assert step.alone_s == pytest.approx(sum(used) + waited_s, rel=1e-6)
    assert step.phases_s == pytest.approx([used[0] + waited_s, *used[1:]], rel=1e-6)


def test_a_busy_machine_is_as_fast_as_before_and_says_that_it_is_busy() -> None:
    before_s = measure_yardstick_s()
    with _beside_another():
        now, meanwhile_s = read_machine(), measure_yardstick_s()
    assert meanwhile_s < 2 * before_s
    assert now.contention > 1.2


@contextmanager
def _beside_another() -> Iterator[None]:
    """Share one core with a process that never waits."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()
