"""Recordings of spot clusters as fates of rehearsed hosts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from benchmarks._spot_nodes import NOTICE_S, Move, NodeTrace, best_samples, moves_of
from benchmarks.spot_rehearsal import calm_rates, gone_for_good_s, samples_in, spec

COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=30).map(lambda rest: [4, *rest])


def trace(running: list[int], nodes: int = 4) -> NodeTrace:
    return NodeTrace(name="t", nodes=nodes, running=np.array(running), gap_s=300.0)


@given(COUNTS, st.integers(0, 9), st.booleans())
def test_as_many_hosts_are_there_as_the_recording_says(running: list[int], seed: int, notice: bool) -> None:
    there, warned = set(range(4)), set()
    moves = moves_of(trace(running), compression=30.0, seed=seed, notice=notice)
    for number, count in enumerate(running):
        at_s = number * 10.0
        for move in (move for move in moves if move.at_s == at_s and move.fate != "notice"):
            (there.remove if move.fate == "dies" else there.add)(move.host)
        assert len(there) == count
    deaths = [(move.at_s, move.host) for move in moves if move.fate == "dies"]
    warned = {(move.at_s, move.host) for move in moves if move.fate == "notice"}
    assert warned == ({(max(0.0, at_s - NOTICE_S / 30), host) for at_s, host in deaths} if notice else set())
    assert [move.at_s for move in moves] == sorted(move.at_s for move in moves)


def test_the_fates_are_those_of_a_run() -> None:
    moves = moves_of(trace([4, 2, 3]), compression=30.0, seed=0, notice=True)
    run = spec(4, moves, 20.0)
    assert run.miniature is not None
    assert [
        sum(getattr(change, fate) for change in run.miniature.changes) for fate in ("dies", "returns", "notice")
    ] == [
        2,
        1,
        2,
    ]


def test_a_run_may_end_once_its_last_host_is_gone_for_good() -> None:
    def gone_s(running: list[int]) -> float:
        return gone_for_good_s(spec(4, moves_of(trace(running), compression=30.0, seed=0, notice=True), 20.0))

    assert gone_s([4, 2, 0, 0]) == 20.0
    assert gone_s([4, 0, 1, 1]) == gone_s([4, 4]) == float("inf")
    assert gone_s([4, 0, 1, 0]) == 30.0


def test_a_group_is_there_when_all_of_it_is() -> None:
    grouped = trace([16, 15, 12, 3, 0], nodes=16).grouped(4)
    assert (grouped.nodes, grouped.running.tolist()) == (4, [4, 3, 3, 0, 0])
    assert trace([4, 2]).grouped(4).running.tolist() == [4, 2]


def test_the_busiest_part_begins_with_all_and_is_seldom_without_any() -> None:
    part = trace([3, 4, 3, 4, 3, 4, 0, 4, 0, 4]).busiest(4, without_any=0.0)
    assert part.running.tolist() == [4, 3, 4, 3]
    assert trace([4, 4, 4]).busiest(2).paid_node_s() == 2400.0
    with pytest.raises(ValueError, match="no part of 2 samples"):
        trace([3, 2]).busiest(2)


def test_goodput_counts_what_is_kept_at_the_end() -> None:
    events = [
        {"event": "training_started", "time_s": 10.0},
        *(
            {"event": "step", "time_s": 10.0 + at, "step": step, "step_time_s": 0.1, "local_batch_sizes": [48, 48]}
            for at, step in [(1, 10), (2, 20), (3, 30), (4, 15), (5, 25), (9, 99)]
        ),
    ]
    assert samples_in(events, 6.0) == 25 * 96
    slower = [{**event, "step_time_s": 0.2} for event in events]
    rates = calm_rates([events, slower], 3)
    assert rates[2] == pytest.approx(960.0), "of the quicker side"
    assert rates[3] == pytest.approx(96 / (0.02 + 0.002 * 32)), "as declared"


def test_the_oracle_trains_on_what_has_started() -> None:
    rates = {1: 10.0, 2: 18.0}
    moves = [
        Move(at_s=10.0, host=0, fate="dies"),
        Move(at_s=20.0, host=0, fate="returns"),
        Move(at_s=40.0, host=0, fate="dies"),
        Move(at_s=41.0, host=0, fate="returns"),
        Move(at_s=42.0, host=0, fate="dies"),
        Move(at_s=50.0, host=1, fate="dies"),
    ]
    assert best_samples(moves, 2, 60.0, rates) == 10 * 18 + 10 * 10 + 20 * 18 + 1 * 10 + 1 * 18 + 8 * 10
    assert best_samples(moves, 2, 60.0, rates, start_s=5.0) == 10 * 18 + 15 * 10 + 15 * 18 + 10 * 10
