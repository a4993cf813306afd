"""A run's time over other links: every step counts as long as a step of its way takes there."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from benchmarks._composed import Job, Stretch, Trajectory, Way, final, reached_s, smoothed, trajectory
from hetopt.core.run_spec import Compression

JOB = Job(task="digits", data=None, batch=64, epochs=1, metric="perplexity", higher_is_better=False, points=1.0)
DENSE = Way(by="ddp", compression=Compression())
THIN = Way(by="hetopt", compression=Compression(name="topk", ratio=0.01))


def run(*steps: int, every: int = 5) -> Trajectory:
    """Dense and thin stretches in turn; evaluated now and then, at the end too."""
    stretches = tuple(
        Stretch(steps=count, way=(DENSE, THIN)[place % 2], sent_bytes=(100.0, 2.0)[place % 2])
        for place, count in enumerate(steps)
    )
    total = sum(steps)
    looks = sorted({*range(every, total + 1, every), total})
    return Trajectory(stretches=stretches, evaluations=tuple((step, -1 / step) for step in looks), dense_bytes=100.0)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.floats(0.01, 10), st.floats(0.01, 10))
def test_every_step_takes_the_time_of_its_way(steps: list[int], dense_s: float, thin_s: float) -> None:
    measured = run(*steps).over({DENSE: dense_s, THIN: thin_s})
    whole_s = sum(count * (dense_s, thin_s)[place % 2] for place, count in enumerate(steps))
    assert measured[-1][0] == pytest.approx(whole_s)
    assert [at_s for at_s, _ in measured] == sorted(at_s for at_s, _ in measured)
    alike = run(*steps).over({DENSE: dense_s, THIN: dense_s})
    assert [at_s for at_s, _ in alike] == pytest.approx([step * dense_s for step, _ in run(*steps).evaluations])


def test_a_quality_is_reached_on_the_line_between_means_of_three() -> None:
    measured = [(1.0, 0.0), (2.0, 3.0), (3.0, 6.0), (4.0, 9.0), (5.0, 9.0)]
    assert [quality for _, quality in smoothed(measured)] == [0.0, 1.5, 3.0, 6.0, 8.0]
    assert reached_s(measured, 4.5) == pytest.approx(3.5)
    assert reached_s(measured, 8.5) is None
    assert final(measured) == 8.0


def test_a_log_says_in_which_way_steps_travelled() -> None:
    sent = {"sent_bytes": 8.0, "dense_bytes": 400.0, "collective": "all_gather"}
    log = [
        {"event": "step", "steps": 2, "exchange": {**sent, "compressor": "topk", "ratio": 0.1}},
        {"event": "step", "steps": 3, "exchange": {**sent, "compressor": "topk", "ratio": 0.01}},
        {"event": "evaluated", "step": 5, "metrics": {"perplexity": 7.0}},
    ]
    found = trajectory(log, by="hetopt", compression=Compression(name="topk", ratio=0.01), job=JOB)
    assert [way.compression.ratio for way in found.ways] == [0.1, 0.01]
    assert {way.compression.memory for way in found.ways} == {"error_feedback"}
    assert found.evaluations == ((5, -7.0),)
    assert (found.sent_bytes, found.dense_bytes) == pytest.approx((5 * 8.0, 400.0))


def test_the_first_steps_of_a_hook_are_plain() -> None:
    log = [
        {"event": "step", "steps": 2, "exchange": {"way": "none", "sent_bytes": 400.0, "dense_bytes": 400.0}},
        {"event": "step", "steps": 8, "exchange": {"way": "powersgd", "sent_bytes": 4.0, "dense_bytes": 400.0}},
    ]
    found = trajectory(log, by="ddp-powersgd", compression=Compression(), job=JOB)
    assert [way.by for way in found.ways] == ["ddp", "ddp-powersgd"]
