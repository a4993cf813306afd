"""Steps of workers under CPU quotas: as fast as processors and network are, or as slow as the quotas make them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.prediction.processor_sharing import finish_times_s, under_quotas

WORKERS = st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0.05, 1.0)), min_size=1, max_size=6)


@given(workers=WORKERS, exchange_s=st.floats(0, 1), compress_s=st.floats(0, 0.1), processors=st.integers(1, 4))
def test_no_step_is_shorter_than_the_machine_or_the_quotas_allow(workers, exchange_s, compress_s, processors):
    work_s, quotas = [work for work, _ in workers], [quota for _, quota in workers]
    step = under_quotas(work_s, quotas, processors=processors, exchange_s=exchange_s, compress_s=compress_s)
    free_s = max(finish_times_s(work_s, processors)) + exchange_s
    throttled_s = max((work + compress_s) / quota for work, quota in workers)
    assert step.step_time_s >= max(free_s, throttled_s) * (1 - 1e-9)
    assert step.step_time_s <= 1.13 * max(free_s + compress_s * max(1, len(workers) / processors), throttled_s)
    assert step.waiting_s >= 0
    assert step.communication_s >= 0
    assert step.step_time_s == pytest.approx(step.compute_s + step.communication_s)


def test_quotas_do_not_show_where_the_network_takes_longer():
    work_s, quotas = [0.04, 0.025, 0.015], [0.8, 0.5, 0.3]
    slow = under_quotas(work_s, quotas, processors=3, exchange_s=1.0, compress_s=0.0)
    assert slow.step_time_s == pytest.approx(1.04, rel=1e-3)
    fast = under_quotas(work_s, quotas, processors=3, exchange_s=0.0, compress_s=0.0)
    assert fast.step_time_s == pytest.approx(0.05, rel=0.07)
    coded = under_quotas(work_s, quotas, processors=3, exchange_s=0.0, compress_s=0.003)
    assert coded.step_time_s - fast.step_time_s == pytest.approx(0.003 / 0.3, rel=0.2)
