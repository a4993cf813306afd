"""What others use of a host: laws of the count, and a real process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.ssh.others import MEAN_OVER_S, Others, Process, is_taken, processes, used_by_others_s

OWN = 100


@st.composite
def looks(draw: st.DrawFn) -> tuple[dict[int, Process], dict[int, Process]]:
    """Two looks at a tree of processes in which nobody's use falls."""
    pids = draw(st.lists(st.integers(2, 99), unique=True, max_size=12))
    now = {OWN: Process(1, draw(st.floats(0, 10)))}
    for pid in pids:
        now[pid] = Process(draw(st.sampled_from([1, *now])), draw(st.floats(0, 10)))
    seen = draw(st.sets(st.sampled_from(sorted(now))))
    return {pid: Process(now[pid].parent, now[pid].used_s * draw(st.floats(0, 1))) for pid in seen}, now


def descends(pid: int, now: dict[int, Process]) -> bool:
    while pid in now:
        if pid == OWN:
            return True
        pid = now[pid].parent
    return False


@given(looks())
def test_what_is_ours_does_not_count_and_all_else_does(both: tuple[dict[int, Process], dict[int, Process]]) -> None:
    before, now = both
    others = {pid: one for pid, one in now.items() if not descends(pid, now)}
    expected = sum(one.used_s - (before[pid].used_s if pid in before else 0) for pid, one in others.items())
    assert used_by_others_s(before, now, OWN) == pytest.approx(expected)


@given(st.booleans(), st.floats(0, 64), st.floats(0.01, 64))
def test_it_does_not_come_and_go_at_one_figure(was: bool, busy: float, limit: float) -> None:
    taken = is_taken(was, busy, limit)
    assert is_taken(taken, busy, limit) is taken
    assert taken or busy <= limit
    assert not taken or busy > limit / 2


@given(st.floats(0, 8))
def test_the_mean_is_that_of_the_last_minute(cpus: float) -> None:
    now_s = 0.0

    def look() -> dict[int, Process]:
        return {7: Process(1, cpus * max(0.0, now_s - 300))}  # it begins in the fifth minute

    others = Others(own=OWN, look=look, clock=lambda: now_s)
    said = []
    while now_s < 500:
        said.append((now_s, others.busy_cpus()))
        now_s += 5
    assert all((busy is None) == (at < MEAN_OVER_S) for at, busy in said)
    assert all(busy == pytest.approx(0, abs=1e-9) for at, busy in said if busy is not None and at <= 300)
    assert said[-1][1] == pytest.approx(cpus)


def test_a_real_process_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burning:
        try:
            before = processes()
            assert before[burning.pid].parent == os.getpid()
            began_s = before[burning.pid].used_s
            while sum(psutil.Process(burning.pid).cpu_times()[:2]) < began_s + 0.3:
                time.sleep(0.05)
            now = processes()
            assert used_by_others_s({burning.pid: before[burning.pid]}, {burning.pid: now[burning.pid]}, 1) >= 0.25
            assert used_by_others_s(before, {burning.pid: now[burning.pid]}, os.getpid()) == 0
        finally:
            burning.kill()
