"""The log of a run: one event a line, and a word where times on both sides do not belong together."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.events.log import JUMP_S, EventLog, read_events


class Clocks:
    """One that is set, and one that is not."""

    def __init__(self) -> None:
        self.passed_s, self.set_by_s = 0.0, 1.8e9

    def wall(self) -> float:
        return self.set_by_s + self.passed_s

    def steady(self) -> float:
        return self.passed_s


@given(st.lists(st.tuples(st.floats(0.0, 1e5), st.sampled_from([0.0, 0.5, -0.5, 20.0, -3600.0])), min_size=1))
def test_a_clock_that_was_set_is_told_before_the_next_event_and_one_that_runs_is_not(
    walk: list[tuple[float, float]],
) -> None:
    import tempfile

    clocks = Clocks()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        with closing(EventLog(path, clocks.wall, clocks.steady)) as log:
            log.write("run_started")
            for passes_s, jumps_s in walk:
                clocks.passed_s += passes_s
                clocks.set_by_s += jumps_s
                log.write("step")
        events = read_events(path)
    told = [event["by_s"] for event in events if event["event"] == "clock_jumped"]
    assert told == [jumps_s for _, jumps_s in walk if abs(jumps_s) > JUMP_S]
    assert sum(event["event"] == "step" for event in events) == len(walk)
    for before, after in pairwise(events):
        if before["event"] == "clock_jumped":
            assert after["time_s"] == before["time_s"]
